"""Facade: `openenv.server.web.gradio_ui`, which loads Gradio at the first use. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "build_gradio_app": "openenv.server.web.gradio_ui",
    "get_gradio_display_title": "openenv.server.web.gradio_ui",
}

if TYPE_CHECKING:
    from openenv.server.web.gradio_ui import build_gradio_app as build_gradio_app
    from openenv.server.web.gradio_ui import get_gradio_display_title as get_gradio_display_title

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
