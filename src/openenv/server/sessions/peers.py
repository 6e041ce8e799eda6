"""`Peers`: the other processes of a server, as its sessions see them. By default the server has one process.

With `openenv serve --workers N` each process has the `SharedPeers` of `server.workers.board`. The workers of plain
uvicorn have `SeparatePeers`, which share nothing. Must not know how processes communicate.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
from collections.abc import Callable
from multiprocessing import current_process, parent_process
from typing import Final, NamedTuple

from openenv.errors import OpenEnvError, SessionElsewhere, SessionNotFoundError


class SlotCounts(NamedTuple):
    """Slot counts by use: of one process, or of all others together.

    Args:
        live: Sessions that hold a slot.
        once: Sessions for a single request.
        agents: Live sessions opened by agents.
        soft: Live sessions that may be evicted.
        closing: Live sessions that are about to end.
        waiting: Clients in the admission queue.
        waiting_briefly: Clients that wait for a closing session.
        waiting_once: Single requests that wait.
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

# Every id is a UUID. Its first 48 bits name this start of the server, so that a gateway finds it without a table:
#
#     3f9a61c2-7be0-4d13-9a52-c06f1e8b7d44
#     |-- boot ---| |------ 74 random bits
_BOOT: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}(?=-)")


def new_boot() -> str:
    """Return a name for a server that starts now."""
    digits = secrets.token_hex(6)
    return f"{digits[:8]}-{digits[8:]}"


def boot_of(name: str) -> str | None:
    """Return the name of the server in a session id or a visitor's cookie; each start has a new name."""
    match = _BOOT.match(name)
    return None if match is None else match[0]


class Peers:
    """The other processes of a server; this base class is for a server with one process.

    `with peers as counts` holds the lock of all processes. Meanwhile `counts` are the exact counts of the others.

    Args:
        boot: The server's name, new at each start: ids and resume tokens begin with it.
    """

    is_shared = False
    is_draining = False
    processes = 1
    """The number of processes of the server."""
    hung_processes = 0
    """How many of them do not respond."""
    shared_moves = 0
    """How often another process became the one that answers requests without a name."""

    def __init__(self, boot: str | None = None) -> None:
        self.boot = boot or new_boot()

    def __enter__(self) -> SlotCounts:
        return NO_SLOTS

    def __exit__(self, *_: object) -> None:
        return None

    def counts(self) -> SlotCounts:
        """Return the current counts of the others, without the lock."""
        return NO_SLOTS

    def publish(self, counts: SlotCounts) -> None:
        """Publish the counts of this process; hold the lock when taking a slot."""

    def leave(self) -> None:
        """Tell the others that this process opens no more sessions."""

    def refused(self) -> None:
        """Record that a client was refused a session."""

    def slot_freed(self, *, briefly: bool, once: bool) -> None:
        """Wake waiting clients of other processes: those that wait briefly, or with a single request."""

    def wake_first(self) -> None:
        """Wake the process with the first client of the admission queue."""

    def evict_soft(self, *, for_soft: bool) -> bool:
        """Ask another process to evict a soft session; return whether one may do so."""
        return False

    # -- the admission queue --------------------------------------------------------------------------------------

    def next_ticket(self) -> int:
        """Return the number of a client that joins the queue; numbers grow with time."""
        return 0

    def publish_waiting(self, tickets: list[int], first: int) -> None:
        """Publish the waiting tickets, and the one that gets the next free slot (0: none)."""

    @property
    def has_next(self) -> bool:
        """Whether the next free slot is for a client of another process."""
        return False

    def is_first(self, ticket: int) -> bool:
        """Return whether all earlier clients of other processes are served."""
        return True

    def waiting_before(self, ticket: int) -> int:
        """Return how many earlier clients wait in other processes."""
        return 0

    # -- the environment's class, which may be unknown until the first one is built -------------------------------

    @property
    def allows_concurrency(self) -> bool | None:
        """Whether the class allows concurrent sessions; None if no other process knows."""
        return None

    def learned_class(self, *, is_concurrent: bool) -> None:
        """Tell the others whether the class allows concurrent sessions."""

    # -- names ----------------------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Return the id of a new session."""
        # `uuid.uuid4`, whose objects cost ten times as much as the name.
        digits = os.urandom(16).hex()
        variant = "89ab"[int(digits[16], 16) & 3]
        random = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
        return self.boot + random[len(self.boot) :]

    def mark(self, name: str) -> str:
        """Add the server's name to a name, so that requests with it find this process."""
        return f"{self.boot}-{name}"

    def absence(self, session_id: str) -> OpenEnvError | None:
        """Return the error for an unknown session, if another process has or had it."""
        return None

    async def ask(self, question: str) -> list[bytes]:
        """Return the answers of the other processes (`SessionManager.answers`)."""
        return []


_SEPARATE: Final = re.compile(r"-p([0-9a-f]{1,7})-([0-9a-f]{12})$")


class SeparatePeers(Peers):
    """Processes that serve one port and share nothing, such as the workers of `uvicorn --workers N`.

    Connections go to any of them, so a request may reach a process without its session. Ids name the process that
    created them (`-pPID-TAG`), and the tag proves that it has the same parent. Then the error can explain the problem.

    Args:
        family: A secret that the processes inherit from their parent.
        pid: This process.
        boot: The server name of this process.
    """

    def __init__(self, family: bytes, pid: int, boot: str | None = None) -> None:
        super().__init__(boot)
        self._family = family
        self._pid = pid
        self._suffix = f"-p{pid:x}-{self._tag(pid)}"

    def _tag(self, pid: int) -> str:
        return hashlib.blake2b(str(pid).encode(), key=self._family[:64], digest_size=6).hexdigest()

    def new_id(self) -> str:
        return super().new_id() + self._suffix

    def absence(self, session_id: str) -> OpenEnvError | None:
        match = _SEPARATE.search(session_id)
        if match is None:
            return None
        pid = int(match[1], 16)
        if pid == self._pid or not hmac.compare_digest(match[2], self._tag(pid)) or not is_process(pid):
            return None
        return SessionElsewhere(
            session_id,
            f"Session '{session_id}' is held by another process of this server, and this request has reached one that "
            "does not have it: worker processes of uvicorn share no sessions. Serve with `openenv serve --workers N`, "
            "which routes each request to the process of its session, or with one process.",
        )


def is_process(pid: int) -> bool:
    """Return whether a process of this machine runs."""
    if sys.platform == "win32":  # `os.kill` would end the process there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def peers_of_process(boot: str | None = None) -> Peers:
    """Return the peers of this process: siblings if `multiprocessing` has started it, as uvicorn does, else none."""
    if parent_process() is None:
        return Peers(boot)
    return SeparatePeers(bytes(current_process().authkey), os.getpid(), boot)


def not_found(peers: Peers, session_id: str) -> OpenEnvError:
    """Return the error for a session that never existed in this process."""
    return peers.absence(session_id) or SessionNotFoundError(session_id)


Answers = dict[str, Callable[[], bytes]]
