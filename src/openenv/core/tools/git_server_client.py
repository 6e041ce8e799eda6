"""Facade: repositories of a git server. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.tools.git_server import GitServerClient as GitServerClient
from openenv.env.tools.git_server import RepoInfo as RepoInfo

export_imports(__name__)
