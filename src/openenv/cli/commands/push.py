"""Facade: the command `openenv push`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(
    __name__,
    {"push": "openenv.cli.push"},
    app="push",
    unlisted={"HfApi": "huggingface_hub", "login": "huggingface_hub", "whoami": "huggingface_hub"},
)
