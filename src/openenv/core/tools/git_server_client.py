"""Facade: repositories of a git server. The code is in `openenv.tools.git_server_client`."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.tools.git_server_client import GitServerClient as GitServerClient
from openenv.tools.git_server_client import RepoInfo as RepoInfo

export_imports(__name__)
