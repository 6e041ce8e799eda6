"""Facade: repositories of a git server. The code is in `openenv.env.tools.git_server`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.tools.git_server import GitServerClient as GitServerClient
from openenv.env.tools.git_server import RepoInfo as RepoInfo

export_imports(__name__)
