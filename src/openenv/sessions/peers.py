"""What the sessions of one process know of the other processes of their server: by default, that there are none.

`openenv serve --workers N` gives each process the `SharedPeers` of `server.workers.board`. Must not know how processes
talk to each other.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Final, NamedTuple

from ..errors import OpenEnvError, SessionNotFoundError


class SlotCounts(NamedTuple):
    """What slots are used for: those of one process, or of all others together.

    Args:
        live: Sessions that hold a slot.
        once: Sessions for a single request.
        agents: Live sessions that agents have opened.
        soft: Live sessions that may be evicted.
        closing: Live sessions that are about to end.
        waiting: Clients in the admission queue.
        waiting_briefly: Clients that wait for a session that is about to end.
        waiting_once: Single requests that wait for a place.
    """

    live: int = 0
    once: int = 0
    agents: int = 0
    soft: int = 0
    closing: int = 0
    waiting: int = 0
    waiting_briefly: int = 0
    waiting_once: int = 0


NO_SLOTS: Final = SlotCounts()


class Peers:
    """The other processes of a server that has one process: none.

    `with peers as counts` holds the lock that all processes share; `counts` are those of the others, and stay true
    while it is held.
    """

    is_shared = False
    is_draining = False
    boot: str | None = None
    """The first part of every resume token of the server; None where the process is the whole server."""

    def __enter__(self) -> SlotCounts:
        return NO_SLOTS

    def __exit__(self, *_: object) -> None:
        return None

    def counts(self) -> SlotCounts:
        """Return the counts of the others at this moment, without the lock."""
        return NO_SLOTS

    def publish(self, counts: SlotCounts) -> None:
        """Let the others know the counts of this process; the caller holds the lock."""

    def leave(self) -> None:
        """Let the others know that this process opens no more sessions."""

    def slot_freed(self, *, briefly: bool, once: bool) -> None:
        """Have the others look for clients that wait: in the admission queue, briefly, or for a single request."""

    def wake_first(self) -> None:
        """Wake the process whose client is the first of the admission queue."""

    def evict_soft(self, *, for_soft: bool) -> bool:
        """Ask another process to evict a soft session; say whether one may do so."""
        return False

    # -- the admission queue --------------------------------------------------------------------------------------

    def next_ticket(self) -> int:
        """Return the number of a client that joins the queue: the higher, the later it came."""
        return 0

    def publish_waiting(self, tickets: list[int], first: int) -> None:
        """Let the others know which tickets wait here, and which of them a free slot is for (0: none)."""

    @property
    def has_next(self) -> bool:
        """Whether a slot that is free now is for a client of another process."""
        return False

    def is_first(self, ticket: int) -> bool:
        """Say whether no client of another process came before."""
        return True

    def waiting_before(self, ticket: int) -> int:
        """Return how many clients of other processes came before."""
        return 0

    # -- the environment's class, which may be unknown until the first one is built -------------------------------

    @property
    def allows_concurrency(self) -> bool | None:
        """Whether the class allows concurrent sessions, as far as another process knows it."""
        return None

    def learned_class(self, *, is_concurrent: bool) -> None:
        """Let the others know that."""

    # -- names ----------------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Return the id of a new session."""
        return str(uuid.uuid4())

    def mark(self, name: str) -> str:
        """Return a name by which requests find this process."""
        return name

    def absence(self, session_id: str) -> OpenEnvError | None:
        """Return the error for a session that this process does not know, where another one has or had it."""
        return None

    async def ask(self, question: str) -> list[bytes]:
        """Return the answers of the other processes (`SessionManager.answers`)."""
        return []


def not_found(peers: Peers, session_id: str) -> OpenEnvError:
    """Return the error for a session that no slot holds and that has not ended here."""
    return peers.absence(session_id) or SessionNotFoundError(session_id)


Answers = dict[str, Callable[[], bytes]]
