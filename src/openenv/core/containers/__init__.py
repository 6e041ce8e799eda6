"""Facade: providers. No logic lives here; the code is in `openenv.providers`."""

from __future__ import annotations
