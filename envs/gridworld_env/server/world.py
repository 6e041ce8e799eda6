"""Maps: made from a seed, always with a safe way from start to goal. Knows cells; must not know episodes."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gridworld_env.models import FLOOR, GOAL, OFFSETS, PIT, WALL, Cell

WALL_SHARE = 0.22
PIT_SHARE = 0.08


@dataclass(frozen=True, slots=True)
class World:
    """A map: rows of tiles, a start, a goal, and how far it is from one to the other."""

    tiles: tuple[str, ...]
    start: Cell
    goal: Cell
    shortest_path: int

    @property
    def size(self) -> int:
        """Rows, and columns."""
        return len(self.tiles)

    def tile(self, cell: Cell) -> str:
        """What is at a cell; outside the map there is wall."""
        row, column = cell
        return self.tiles[row][column] if 0 <= row < self.size and 0 <= column < self.size else WALL


def make_world(seed: int, size: int) -> World:
    """Make the map of a seed; the same seed and size make the same map, on any machine."""
    chance = random.Random(f"gridworld {size} {seed}")
    for attempt in itertools.count():
        world = _draft(chance, size, thinning=0.9**attempt)
        if world is not None:
            return world
    raise AssertionError("a board without walls has a way")


def _draft(chance: random.Random, size: int, *, thinning: float) -> World | None:
    """Draw a map, or return None when it has no safe way or too short a one; later drafts have fewer obstacles."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    chance.shuffle(cells)
    start, goal, *others = cells
    walls = int(len(cells) * WALL_SHARE * thinning)
    pits = int(len(cells) * PIT_SHARE * thinning)
    kinds = {goal: GOAL, **dict.fromkeys(others[:walls], WALL), **dict.fromkeys(others[walls : walls + pits], PIT)}
    tiles = tuple("".join(kinds.get((row, column), FLOOR) for column in range(size)) for row in range(size))
    distance = _distance(tiles, start, goal)
    if distance is None or distance < size // 2:
        return None
    return World(tiles, start, goal, distance)


def _distance(tiles: tuple[str, ...], start: Cell, goal: Cell) -> int | None:
    """Count the moves of the shortest way that enters no pit."""
    seen = {start}
    queue = deque([(start, 0)])
    while queue:
        cell, moves = queue.popleft()
        if cell == goal:
            return moves
        for neighbour in _neighbours(tiles, cell):
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append((neighbour, moves + 1))
    return None


def _neighbours(tiles: tuple[str, ...], cell: Cell) -> Iterator[Cell]:
    for rows, columns in OFFSETS.values():
        row, column = cell[0] + rows, cell[1] + columns
        if 0 <= row < len(tiles) and 0 <= column < len(tiles) and tiles[row][column] in (FLOOR, GOAL):
            yield row, column
