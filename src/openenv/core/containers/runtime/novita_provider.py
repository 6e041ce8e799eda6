"""Facade: the provider of Novita sandboxes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.novita import NovitaSandboxProvider as NovitaSandboxProvider

export_imports(__name__)
