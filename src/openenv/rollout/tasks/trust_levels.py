"""The three trust levels of a reward, and their order. `verify/trust.py` decides which level a check has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Trust = Literal["judged", "isolated", "shared"]
"""How far a verdict can be trusted."""
TRUSTS: tuple[Trust, ...] = ("shared", "isolated", "judged")
"""From the weakest to the strongest."""


def weakest(trusts: Iterable[Trust]) -> Trust | None:
    """Return the weakest trust level; None for an empty list."""
    return min(trusts, key=TRUSTS.index, default=None)


def reaches(trust: Trust | None, minimum: Trust) -> bool:
    """Return whether `trust` is at least `minimum`. Old records have None, which never is."""
    return trust is not None and TRUSTS.index(trust) >= TRUSTS.index(minimum)
