"""What goes wrong in an episode, and where: decided by its seed.

A point is a direction and the number of a message in it, the handshake included, counted over all connections of the
episode. The first fault of each seed goes through every kind at every point in turn; further ones are drawn.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from enum import Enum

UP, DOWN = "up", "down"  # from the client, to the client
FIRST_POINTS = 12
LAST_POINT = 24
OUTAGE_EVERY = 16


class Kind(Enum):
    """Faults. All but DELAY, STALL, DUPLICATE and LATE end the connection, or its use."""

    KILL_BEFORE = "killed before a message"
    KILL_AFTER = "killed after a message"
    TRUNCATE = "killed in the middle of a message"
    DELAY = "message delayed"
    STALL = "message delayed in its middle"
    DUPLICATE = "message sent twice"
    HALF_OPEN = "silence in both directions"
    DEAF = "silence in one direction"
    REFUSE = "killed, then refused for a while"
    OUTAGE = "killed, then refused for longer than the grace period"
    LATE = "request delivered once more, later, on a connection of its own"


@dataclass(frozen=True)
class Fault:
    """A fault at a point. `amount` between 0 and 1 says how much: how long, or which part of the message."""

    kind: Kind
    direction: str
    point: int
    amount: float
    hard: bool  # a reset instead of an end


@dataclass
class Plan:
    """The faults of one episode, and those that came true."""

    seed: int
    faults: dict[tuple[str, int], Fault]
    injected: list[Fault] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})

    def next(self, direction: str) -> Fault | None:
        """Count a message and return what is to go wrong with it."""
        point = self._seen[direction]
        self._seen[direction] = point + 1
        fault = self.faults.get((direction, point))
        if fault is not None:
            self.injected.append(fault)
        return fault


_COMMON = [kind for kind in Kind if kind not in (Kind.OUTAGE, Kind.LATE)]
_POINTS = list(itertools.product(_COMMON, (UP, DOWN), range(FIRST_POINTS)))


def plan_of(seed: int, *, late: bool = False) -> Plan:
    """Decide what goes wrong.

    Args:
        seed: Of the episode.
        late: Whether requests may also come once more, later: a request over HTTP is whole by itself, a frame is not.
    """
    dice = random.Random(f"faults {seed}")
    kind, direction, point = _POINTS[seed * 7 % len(_POINTS)]  # 7 has no factor in common with their number
    if seed % OUTAGE_EVERY == OUTAGE_EVERY - 1:
        kind, direction, point = Kind.OUTAGE, dice.choice((UP, DOWN)), dice.randrange(FIRST_POINTS)
    found = [Fault(kind, direction, point, dice.random(), dice.random() < 0.5)]
    for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
        drawn = dice.choice(_COMMON)
        where = dice.choice((UP, DOWN))
        found.append(Fault(drawn, where, dice.randrange(LAST_POINT), dice.random(), dice.random() < 0.5))
    if late:
        again = random.Random(f"late {seed}")
        found += [Fault(Kind.LATE, UP, again.randrange(FIRST_POINTS), again.random(), hard=False) for _ in range(2)]
    return Plan(seed, {(fault.direction, fault.point): fault for fault in reversed(found)})
