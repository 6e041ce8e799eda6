"""Facade: a provider of a cloud. Not part of this release: importing its name raises an error that says so."""

from __future__ import annotations

from openenv._lazy import missing_exports

__getattr__ = missing_exports(__name__, ("NovitaSandboxProvider",), "Cloud providers")
