"""Facade: the commands on their published module paths. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports, submodules

if TYPE_CHECKING:
    from . import build as build
    from . import catalog as catalog
    from . import collect as collect
    from . import fork as fork
    from . import harbor as harbor
    from . import import_env as import_env
    from . import init as init
    from . import push as push
    from . import serve as serve
    from . import skills as skills
    from . import validate as validate

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {},
        unlisted={
            **submodules(__name__, "build catalog collect fork harbor import_env init push serve skills validate")
        },
    )
