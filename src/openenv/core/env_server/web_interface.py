"""Facade: the web page. Not part of this release; every name says so when it is asked for."""

from __future__ import annotations

from openenv._lazy import missing_exports

__getattr__ = missing_exports(
    __name__,
    (
        "ActionLog",
        "EpisodeState",
        "WebInterfaceManager",
        "create_web_interface_app",
        "get_quick_start_markdown",
        "load_environment_metadata",
    ),
    "Web pages",
)
