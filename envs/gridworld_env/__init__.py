"""Gridworld: find the goal on a seeded board with walls and pits."""

from __future__ import annotations

from gridworld_env.client import GridworldEnv
from gridworld_env.models import GridworldAction, GridworldObservation, GridworldState

__all__ = ["GridworldAction", "GridworldEnv", "GridworldObservation", "GridworldState"]
