"""Whom a session counts for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a session counts for.

    Args:
        key: A name of the client's choosing.
        is_agent: Whether an agent has opened it.
    """

    key: str | None = None
    is_agent: bool = False
