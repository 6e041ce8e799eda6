"""Facade: the command `openenv fork`. Re-exports only."""

from __future__ import annotations

from openenv.cli.published import command_exports

__getattr__, __dir__, __all__ = command_exports(
    __name__,
    {"fork": "openenv.cli.fork"},
    app="fork",
    unlisted={"HfApi": "huggingface_hub", "login": "huggingface_hub", "whoami": "huggingface_hub"},
)
