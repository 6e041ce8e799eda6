"""Facade: the Gradio UI. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.server.web.gradio_ui import build_gradio_app as build_gradio_app
    from openenv.server.web.gradio_ui import get_gradio_display_title as get_gradio_display_title

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, by_module({"openenv.server.web.gradio_ui": "build_gradio_app get_gradio_display_title"})
    )
