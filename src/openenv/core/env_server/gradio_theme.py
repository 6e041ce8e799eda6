"""Facade: `openenv.server.web.gradio_ui`, which loads Gradio at the first use. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "OPENENV_GRADIO_CSS": "openenv.server.web.gradio_ui",
    "OPENENV_GRADIO_THEME": "openenv.server.web.gradio_ui",
}

if TYPE_CHECKING:
    from openenv.server.web.gradio_ui import OPENENV_GRADIO_CSS as OPENENV_GRADIO_CSS
    from openenv.server.web.gradio_ui import OPENENV_GRADIO_THEME as OPENENV_GRADIO_THEME

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
