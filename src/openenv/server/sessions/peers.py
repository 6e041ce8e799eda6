"""What the sessions of one process know of the other processes of their server: by default, that there are none.

`openenv serve --workers N` gives each process the `SharedPeers` of `server.workers.board`; the workers of plain uvicorn
get `SeparatePeers`, which share nothing. Must not know how processes talk to each other.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
import uuid
from collections.abc import Callable
from multiprocessing import current_process, parent_process
from typing import Final, NamedTuple

from openenv.errors import OpenEnvError, SessionElsewhere, SessionNotFoundError


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

# Every id is a UUID whose first 48 bits name the server as it was started, so that a gateway finds it without a table:
#
#     3f9a61c2-7be0-4d13-9a52-c06f1e8b7d44
#     |-- boot ---| |------ 74 random bits
_BOOT: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}(?=-)")


def new_boot() -> str:
    """Return a name for a server that starts now."""
    digits = secrets.token_hex(6)
    return f"{digits[:8]}-{digits[8:]}"


def boot_of(name: str) -> str | None:
    """Return which server, as it was started, has made the id of a session or the cookie of a visitor."""
    match = _BOOT.match(name)
    return None if match is None else match[0]


class Peers:
    """The other processes of a server that has one process: none.

    `with peers as counts` holds the lock that all processes share; `counts` are those of the others, and stay true
    while it is held.

    Args:
        boot: The name of the server as it was started: ids and resume tokens begin with it.
    """

    is_shared = False
    is_draining = False
    processes = 1
    """How many processes the server has."""

    def __init__(self, boot: str | None = None) -> None:
        self.boot = boot or new_boot()

    def __enter__(self) -> SlotCounts:
        return NO_SLOTS

    def __exit__(self, *_: object) -> None:
        return None

    def counts(self) -> SlotCounts:
        """Return the counts of the others at this moment, without the lock."""
        return NO_SLOTS

    def publish(self, counts: SlotCounts) -> None:
        """Let the others know the counts of this process; where a slot is taken, the caller holds the lock."""

    def leave(self) -> None:
        """Let the others know that this process opens no more sessions."""

    def refused(self) -> None:
        """Note that a client that came for a session gets none."""

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
        return self.boot + str(uuid.uuid4())[len(self.boot) :]

    def mark(self, name: str) -> str:
        """Return a name by which requests find this process."""
        return f"{self.boot}-{name}"

    def absence(self, session_id: str) -> OpenEnvError | None:
        """Return the error for a session that this process does not know, where another one has or had it."""
        return None

    async def ask(self, question: str) -> list[bytes]:
        """Return the answers of the other processes (`SessionManager.answers`)."""
        return []


_SEPARATE: Final = re.compile(r"-p([0-9a-f]{1,7})-([0-9a-f]{12})$")


class SeparatePeers(Peers):
    """Processes that serve one port and share nothing, such as the workers of `uvicorn --workers N`.

    Connections go to any of them, so a request may reach a process that does not have its session. Ids name the process
    that has made them (`-pPID-TAG`), and the tag shows that this was a process of the same parent: then the answer can
    be more than "not found".

    Args:
        family: A secret that the processes have from their parent.
        pid: This process.
        boot: The name of the process as a server.
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
            "where each request reaches the process of its session, or with one process.",
        )


def is_process(pid: int) -> bool:
    """Say whether a process of this machine runs."""
    if sys.platform == "win32":  # where looking would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def peers_of_process(boot: str | None = None) -> Peers:
    """Return what this process knows of others: those that `multiprocessing` has started beside it, as uvicorn does."""
    if parent_process() is None:
        return Peers(boot)
    return SeparatePeers(bytes(current_process().authkey), os.getpid(), boot)


def not_found(peers: Peers, session_id: str) -> OpenEnvError:
    """Return the error for a session that no slot holds and that has not ended here."""
    return peers.absence(session_id) or SessionNotFoundError(session_id)


Answers = dict[str, Callable[[], bytes]]
