"""Facade: the published path of `openenv.packaging.validate.runtime`. Re-exports only."""

from __future__ import annotations
