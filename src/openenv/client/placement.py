"""Which session of a `VectorEnv` lives where: even shares for servers, and for the connections to each of them.

Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A connection to be made, and the slots that it carries."""

    url: str
    slots: range


def placements(urls: Sequence[str], n: int, connections: int) -> list[Place]:
    """Spread slots over connections and connections over servers, as evenly as whole numbers allow.

    Args:
        urls: The servers.
        n: How many slots.
        connections: How many connections in all; each server that has a slot gets at least one.
    """
    used = list(urls)[:n]
    wanted = max(len(used), min(connections, n))
    places, first = [], 0
    for url, share, lines in zip(used, shares(n, len(used)), shares(wanted, len(used)), strict=True):
        for size in shares(share, min(lines, share)):
            places.append(Place(url, range(first, first + size)))
            first += size
    return places


def shares(total: int, parts: int) -> list[int]:
    """Split a number into parts that differ by one at most, the larger ones first."""
    size, more = divmod(total, parts)
    return [size + 1] * more + [size] * (parts - more)
