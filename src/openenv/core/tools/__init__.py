"""Facade: tools for environments. Not part of this release: importing a name raises an error that says so."""

from __future__ import annotations

from openenv._lazy import missing_exports

__getattr__ = missing_exports(__name__, ("GitServerClient", "PyExecutor", "RepoInfo"), "Environment tools")
