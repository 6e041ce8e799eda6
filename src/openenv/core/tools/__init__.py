"""Facade: tools for environments. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.tools.git_server import GitServerClient as GitServerClient
from openenv.env.tools.git_server import RepoInfo as RepoInfo
from openenv.sandboxes.python_session import PyExecutor as PyExecutor

export_imports(__name__)
