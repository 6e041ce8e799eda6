"""Facade: the web page. Re-exports only; the code lives in `openenv.web`, which loads with the first name used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "ActionLog": "openenv.web.visitors",
    "EpisodeState": "openenv.web.visitors",
    "WebInterfaceManager": "openenv.web.web_interface",
    "create_web_interface_app": "openenv.web.web_page",
    "get_quick_start_markdown": "openenv.web.quickstart",
    "load_environment_metadata": "openenv.web.page_description",
}

if TYPE_CHECKING:
    from openenv.web.page_description import load_environment_metadata as load_environment_metadata
    from openenv.web.quickstart import get_quick_start_markdown as get_quick_start_markdown
    from openenv.web.visitors import ActionLog as ActionLog
    from openenv.web.visitors import EpisodeState as EpisodeState
    from openenv.web.web_interface import WebInterfaceManager as WebInterfaceManager
    from openenv.web.web_page import create_web_interface_app as create_web_interface_app

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
