"""Facade: a provider of a cloud. Not part of this release; its name says so when it is asked for."""

from __future__ import annotations

from openenv._lazy import missing_exports

__getattr__ = missing_exports(__name__, ("NovitaSandboxProvider",), "Cloud providers")
