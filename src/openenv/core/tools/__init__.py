"""Facade: tools for environments. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.env.tools.git_server import GitServerClient as GitServerClient
    from openenv.env.tools.git_server import RepoInfo as RepoInfo
    from openenv.sandboxes.python_session import PyExecutor as PyExecutor

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.env.tools.git_server": "GitServerClient RepoInfo",
                "openenv.sandboxes.python_session": "PyExecutor",
            }
        ),
    )
