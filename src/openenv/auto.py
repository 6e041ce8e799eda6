"""Facade: discovery of installed environments. Not part of this release; every name says so when it is asked for."""

from __future__ import annotations

from openenv._lazy import missing_exports

__getattr__ = missing_exports(__name__, ("AutoEnv", "AutoAction"), "Tools that discover environments")
