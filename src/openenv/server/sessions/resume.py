"""Resuming a session: with its token after a lost connection, or with its nonce after a lost reply to `open`.

    open(nonce) ──> Opening ──> session, token ──> connection lost ──> DETACHED ── open(resume=token) ──> READY
                       ^                                                 │
    open(nonce) again ─┘ joins it, or gets the same session              └── grace period over ──> SESSION_LOST

Tokens and nonces are secrets: whoever has one may use the session. Knows sessions; must not know connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Final

from openenv.errors import SessionLost

from .lifetime import DISCONNECTED, EXPIRED, RESTARTED, TAKEN_OVER, UNKNOWN, client_reason
from .peers import Peers
from .session import Session, SessionHolder
from .slots import OnPosition

_REMEMBERED: Final = 10_000

SessionLookup = Callable[[str], tuple[Session | None, str | None]]
"""Returns a live session by its id, or the close reason of an ended one."""


class Attachments:
    """The resume tokens of one server's sessions, and the connections that attach with them.

    A token is `BOOT.SESSION_ID.SECRET`. The first part names this start of the server, so a client learns whether its
    server has restarted or its token is wrong.

    Args:
        lookup: Finds sessions.
        grace_s: Returns the lease of a detached session.
        peers: Returns the other processes of the server.
    """

    def __init__(self, lookup: SessionLookup, grace_s: Callable[[], float], peers: Callable[[], Peers]) -> None:
        self._lookup = lookup
        self._grace_s = grace_s
        self._peers = peers
        self.resumes = 0

    def token(self, session: Session) -> str:
        """Return the token of a session."""
        if not session.secret:
            session.secret = secrets.token_urlsafe(24)
        return f"{self._peers().boot}.{session.id}.{session.secret}"

    def claimed(self, token: str) -> Session:
        """Return the session of a token.

        Raises:
            SessionLost: The session is gone; the reason says why.
            SessionElsewhere: Another process of the server has it.
        """
        boot, _, rest = token.partition(".")
        session_id, _, secret = rest.partition(".")
        peers = self._peers()
        if boot != peers.boot:
            # If processes share nothing, the token may belong to another process, which may still run.
            absence = None if peers.is_shared else peers.absence(session_id)
            # A token with three parts comes from another server or an earlier start; any other text is invalid.
            raise absence or SessionLost(RESTARTED if secret else UNKNOWN)
        session, ended = self._lookup(session_id)
        # Compare in constant time. A session without a secret never had a token.
        if session is None or not session.secret or not hmac.compare_digest(session.secret.encode(), secret.encode()):
            absence = peers.absence(session_id) if session is None and ended is None else None
            raise absence or SessionLost(client_reason(ended) if ended is not None else UNKNOWN)
        if session.is_ending:
            raise SessionLost(client_reason(session.close_reason))
        return session

    def reattach(self, session: Session, holder: SessionHolder) -> None:
        """Attach a connection to a live session, and detach the former connection."""
        self.resumes += 1
        # Attach first: a reply that is ready now goes to the new connection. The former one may be on another loop, or
        # may not know yet that its client is gone; it sends `detached` if it still can (docs/protocol.md, 4).
        former = session.attach(holder)
        if former is not None:
            former.let_go(session, TAKEN_OVER)

    def release(self, session: Session, holder: SessionHolder) -> None:
        """Detach a lost connection; the token stays valid for the grace period."""
        if session.detach(holder) and self._grace_s() <= 0:
            session.close(DISCONNECTED)


class Opening:
    """A session that is being opened, for all requests with one nonce.

    Args:
        is_kept: Whether to keep the session for a client that may come back.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self._task: asyncio.Task[Session] | None = None
        self._waiters = 0  # requests with the nonce; a reconnecting client may repeat it before the first one ends
        self._listeners: list[OnPosition] = []
        self._is_reserved = False  # whether it has a slot; then its environment is being built, which may take long
        self._is_given_up = False

    def start(self, work: Coroutine[Any, Any, Session]) -> asyncio.Task[Session]:
        """Start opening the session."""
        self._task = asyncio.get_running_loop().create_task(work)
        return self._task

    @property
    def can_be_joined(self) -> bool:
        """Whether it is still being opened, on the running loop."""
        # A task can be awaited on its loop only; an application may run on several (Starlette's TestClient).
        task = self._task
        return task is not None and not self._is_given_up and task.get_loop() is asyncio.get_running_loop()

    def reserved(self, session: Session) -> None:
        """Record that the session has a slot: from now on, keep it for a client that comes back."""
        self._is_reserved = True

    def report_position(self, position: int) -> None:
        """Pass the place in the queue on to all waiters."""
        for listener in self._listeners:
            listener(position)

    async def wait(self, on_position: OnPosition | None = None) -> Session:
        """Wait until the session is open, or raise the failure. A cancelled waiter has to call `leave`."""
        assert self._task is not None
        self._waiters += 1
        if on_position is not None:
            self._listeners.append(on_position)
        try:
            return await asyncio.shield(self._task)  # shared: a cancelled waiter must not end it for the others
        finally:
            if on_position is not None:
                self._listeners.remove(on_position)
            self._waiters -= 1

    def leave(self, *, is_final: bool) -> None:
        """Give up the opening if this was the last waiter.

        A place in the queue is given up at once. A slot is kept for a client that may come back, unless `is_final` is
        true: the environment may be built already, and the client's next `open` with the nonce gets it.
        """
        if self._waiters or self._task is None:
            return
        if is_final or not (self.is_kept and self._is_reserved):
            self._is_given_up = True
            self._task.cancel()


class Openings:
    """The nonces of one server's sessions. Stores only digests, because a nonce grants access like a token.

    Args:
        lookup: Finds sessions.
        grace_s: Returns how long to keep a session for a client that may come back.
    """

    def __init__(self, lookup: SessionLookup, grace_s: Callable[[], float]) -> None:
        self._lookup = lookup
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[bytes, Opening] = {}

    def find(self, nonce: str | None) -> Session | None:
        """Return the session opened with a nonce; None if it is new or still being opened.

        Raises:
            SessionLost: The session of the nonce has ended.
        """
        with self._lock:
            session_id = None if nonce is None else self._ids.get(_digest(nonce))
        if session_id is None:
            return None
        session, ended = self._lookup(session_id)
        if session is None:
            raise SessionLost(client_reason(ended or EXPIRED))
        if session.is_ending:
            raise SessionLost(client_reason(session.close_reason))
        return session

    def begin(self, nonce: str | None, work: Callable[[Opening], Coroutine[Any, Any, Session]]) -> Opening:
        """Return the running opening of a nonce, or start one with this work."""
        if nonce is None or self._grace_s() <= 0:  # the client could not come back
            opening = Opening(is_kept=False)
            opening.start(work(opening))
            return opening
        digest = _digest(nonce)
        with self._lock:
            known = self._under_way.get(digest)
            if known is not None and known.can_be_joined:
                return known
            opening = self._under_way[digest] = Opening(is_kept=True)
        opening.start(work(opening)).add_done_callback(lambda task: self._done(digest, opening, task))
        return opening

    def _done(self, digest: bytes, opening: Opening, task: asyncio.Task[Session]) -> None:
        is_open = not task.cancelled() and task.exception() is None
        with self._lock:
            if self._under_way.get(digest) is opening:
                del self._under_way[digest]
            if is_open:  # after a failure the nonce may be used again
                self._ids[digest] = task.result().id
                while len(self._ids) > _REMEMBERED:
                    self._ids.popitem(last=False)


def _digest(nonce: str) -> bytes:
    return hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()
