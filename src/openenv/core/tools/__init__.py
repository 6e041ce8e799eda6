"""Facade: tools for environments. Re-exports only; the code lives in `openenv.tools`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.tools.git_server_client import GitServerClient as GitServerClient
from openenv.tools.git_server_client import RepoInfo as RepoInfo
from openenv.tools.python_executor import PyExecutor as PyExecutor

export_imports(__name__)
