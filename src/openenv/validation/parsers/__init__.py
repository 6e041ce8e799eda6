"""Facade: the published path of `openenv.packaging.validate.manifest`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.packaging.validate.manifest import Parser as Parser
    from openenv.packaging.validate.manifest import ParserRegistry as ParserRegistry

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, by_module({"openenv.packaging.validate.manifest": "Parser ParserRegistry"})
    )
