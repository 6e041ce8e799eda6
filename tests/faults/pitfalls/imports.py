"""The scenario of the import: which packages come with a client. Imported before anything else of OpenEnv."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .stage import Stage

_SERVERS = {"fastapi", "fastmcp", "gradio", "uvicorn"}


def _servers_of_a_client() -> list[str]:
    assert not _SERVERS & set(sys.modules), "something was loaded before the client"
    assert importlib.import_module("openenv.core").GenericEnvClient
    return sorted(_SERVERS & set(sys.modules))


_FOUND = _servers_of_a_client()


def what_a_client_loads(stage: Stage) -> str:
    """W21: the server packages that come with the import of a client."""
    return f"loads {', '.join(_FOUND)}" if _FOUND else "loads no server"
