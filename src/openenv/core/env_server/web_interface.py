"""Facade: the web UI. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.server.web.page_description import load_environment_metadata as load_environment_metadata
    from openenv.server.web.quickstart import get_quick_start_markdown as get_quick_start_markdown
    from openenv.server.web.visitors import ActionLog as ActionLog
    from openenv.server.web.visitors import EpisodeState as EpisodeState
    from openenv.server.web.web_interface import WebInterfaceManager as WebInterfaceManager
    from openenv.server.web.web_page import create_web_interface_app as create_web_interface_app

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.server.web.page_description": "load_environment_metadata",
                "openenv.server.web.quickstart": "get_quick_start_markdown",
                "openenv.server.web.visitors": "ActionLog EpisodeState",
                "openenv.server.web.web_interface": "WebInterfaceManager",
                "openenv.server.web.web_page": "create_web_interface_app",
            }
        ),
    )
