"""What flows know of their client: its session, its connection, and how patient it is.

Knows interfaces only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..protocol.client_sessions import ClientSession, ResumableSession
from .options import ConnectionOptions


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """How a client gets back to a server that it has lost.

    Args:
        timeout_s: How long it may take in all for one request; 0 for never.
        first_pause_s: The longest pause before the first attempt; each further one may be twice as long.
        longest_pause_s: The longest of all.
        clock: Tells the time in seconds.
        jitter: Returns a number between 0 and 1.
    """

    timeout_s: float = 30.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def pause_s(self, attempt: int) -> float:
        """How long to wait before an attempt; the first is 0. Not the same for all clients."""
        longest: float = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * self.jitter())


class Link(Protocol):
    """What a flow needs to know of its client."""

    session: ClientSession | ResumableSession
    has_connected: bool
    reconnecting: Reconnecting
    options: ConnectionOptions
    wait_s: float | None

    @property
    def is_open(self) -> bool:
        """Whether a connection is there."""
        ...

    @property
    def lost_reason(self) -> str:
        """Why it is not."""
        ...

    @property
    def is_hopeless(self) -> bool:
        """Whether it broke in a way that would break the next one as well."""
        ...

    def last_words(self) -> bytes | None:
        """What the server said before it hung up, if nobody has heard it yet."""
        ...

    def agree(self) -> None:
        """Take up the protocol that a new connection speaks.

        Raises:
            ProtocolError: It is not the one that the client insists on.
        """
        ...

    def leave_will(self, payload: bytes | None) -> None:
        """Say what the server is told when this client lets go of the connection."""
        ...
