"""Facade: `openenv.server.web`, which loads at the first use. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "ActionLog": "openenv.server.web.visitors",
    "EpisodeState": "openenv.server.web.visitors",
    "WebInterfaceManager": "openenv.server.web.web_interface",
    "create_web_interface_app": "openenv.server.web.web_page",
    "get_quick_start_markdown": "openenv.server.web.quickstart",
    "load_environment_metadata": "openenv.server.web.page_description",
}

if TYPE_CHECKING:
    from openenv.server.web.page_description import load_environment_metadata as load_environment_metadata
    from openenv.server.web.quickstart import get_quick_start_markdown as get_quick_start_markdown
    from openenv.server.web.visitors import ActionLog as ActionLog
    from openenv.server.web.visitors import EpisodeState as EpisodeState
    from openenv.server.web.web_interface import WebInterfaceManager as WebInterfaceManager
    from openenv.server.web.web_page import create_web_interface_app as create_web_interface_app

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
