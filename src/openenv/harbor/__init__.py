"""Facade: the published path of `openenv.adapters.harbor`. Re-exports only."""

from __future__ import annotations
