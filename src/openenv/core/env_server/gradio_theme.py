"""Facade: the Gradio UI. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.server.web.gradio_ui import OPENENV_GRADIO_CSS as OPENENV_GRADIO_CSS
    from openenv.server.web.gradio_ui import OPENENV_GRADIO_THEME as OPENENV_GRADIO_THEME

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, by_module({"openenv.server.web.gradio_ui": "OPENENV_GRADIO_CSS OPENENV_GRADIO_THEME"})
    )
