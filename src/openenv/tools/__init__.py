"""Tools that environments use: Python code in a sandbox, and the repositories of a git server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "GitServerClient": "openenv.tools.git_server_client",
    "GitServerError": "openenv.tools.git_server_client",
    "PyExecutor": "openenv.tools.python_executor",
    "RepoInfo": "openenv.tools.git_server_client",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.tools.git_server_client import GitServerClient as GitServerClient
    from openenv.tools.git_server_client import GitServerError as GitServerError
    from openenv.tools.git_server_client import RepoInfo as RepoInfo
    from openenv.tools.python_executor import PyExecutor as PyExecutor

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
