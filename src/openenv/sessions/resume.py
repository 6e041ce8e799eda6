"""Who holds a resumable session, and how somebody else comes to hold it.

A session is attached to one holder at a time. When that one is gone, whoever has its token may attach to it for the
grace period. Knows sessions and tokens; must not know connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from ..errors import SessionLost
from .lifetime import DISCONNECTED, EXPIRED, RESTARTED, TAKEN_OVER, UNKNOWN, client_reason
from .session import Session, SessionHolder

# Secrets that let their holder attach to a session from anywhere.
#
# A token names the server process, the session, and a secret: a token of an earlier process differs from a wrong one.
# Knows text only.


class Claim(NamedTuple):
    """What a token claims."""

    session_id: str
    secret: str

    def is_proved_by(self, secret: str) -> bool:
        """Compare with a session's own secret, in constant time; a session without one belongs to nobody."""
        return bool(secret) and hmac.compare_digest(secret.encode(), self.secret.encode())


class Tokens:
    """The tokens of one server process."""

    def __init__(self) -> None:
        self._boot = secrets.token_urlsafe(6).replace(".", "-")

    @staticmethod
    def new_secret() -> str:
        """Make a secret that nobody can guess."""
        return secrets.token_urlsafe(24)

    def write(self, session_id: str, secret: str) -> str:
        """Return the token of a session."""
        return f"{self._boot}.{session_id}.{secret}"

    def read(self, token: str) -> Claim:
        """Read a token.

        Raises:
            SessionLost: It is of another process, or none at all.
        """
        boot, _, rest = token.partition(".")
        session_id, _, secret = rest.partition(".")
        if boot != self._boot:
            raise SessionLost(RESTARTED if secret else UNKNOWN)
        return Claim(session_id, secret)


Lookup = Callable[[str], tuple[Session | None, str | None]]


class Attachments:
    """The attachments of one server's sessions.

    Args:
        lookup: Returns a live session by its id, and how one that is gone has ended.
        grace_s: Tells how long a session is kept without a holder.
    """

    def __init__(self, lookup: Lookup, grace_s: Callable[[], float]) -> None:
        self._lookup = lookup
        self._grace_s = grace_s
        self._tokens = Tokens()
        self.resumes = 0

    def token(self, session: Session) -> str:
        """Return the secret that lets its holder attach to a session from anywhere."""
        if not session.secret:
            session.secret = self._tokens.new_secret()
        return self._tokens.write(session.id, session.secret)

    def claimed(self, token: str) -> Session:
        """Return the session of a token.

        Raises:
            SessionLost: There is none; the reason says why.
        """
        claim = self._tokens.read(token)
        session, ended = self._lookup(claim.session_id)
        if session is None or not claim.is_proved_by(session.secret):
            raise SessionLost(client_reason(ended) if ended is not None else UNKNOWN)
        if session.is_ending:
            raise SessionLost(client_reason(session.close_reason))
        return session

    def reattach(self, session: Session, holder: SessionHolder) -> None:
        """Attach to a session that goes on; whoever held it before is told."""
        former = session.attach(holder)
        self.resumes += 1
        if former is not None:
            former.let_go(session, TAKEN_OVER)

    def hold(self, session: Session, holder: SessionHolder) -> None:
        """Attach to a session that was just opened."""
        session.attach(holder)

    def release(self, session: Session, holder: SessionHolder) -> None:
        """Leave a session to whoever has its token, for the grace period."""
        if session.detach(holder) and self._grace_s() <= 0:
            session.close(DISCONNECTED)


# Sessions by the nonce that they were opened with: an `open` that is repeated gets the first one's session, no second.
#
# A client whose answer was lost repeats its `open`, on any connection; a nonce is its own secret. Knows nonces
# and sessions; must not know connections. Sessions are opened on the loop of whoever asks first.


_REMEMBERED = 10_000

OnPosition = Callable[[int], None]


class Opening:
    """A session on its way, for all who have asked for it under one nonce.

    Args:
        is_kept: Whether it is kept for somebody who has gone but may come back.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self._task: asyncio.Task[Session] | None = None
        self._askers = 0
        self._listeners: list[OnPosition] = []
        self._is_reserved = False
        self._is_given_up = False

    def start(self, work: Coroutine[Any, Any, Session]) -> asyncio.Task[Session]:
        """Begin to open it."""
        self._task = asyncio.get_running_loop().create_task(work)
        return self._task

    @property
    def can_be_joined(self) -> bool:
        """Whether it is still being opened, on the running loop."""
        task = self._task
        return task is not None and not self._is_given_up and task.get_loop() is asyncio.get_running_loop()

    def reserved(self, session: Session) -> None:
        """Record that it has a slot: from now on it is kept for whoever comes back."""
        self._is_reserved = True

    def tell_position(self, position: int) -> None:
        """Tell all who wait their place in line."""
        for listener in self._listeners:
            listener(position)

    async def wait(self, on_position: OnPosition | None = None) -> Session:
        """Wait until it is open, and raise what kept it from that. Whoever is cancelled here has to `leave`."""
        assert self._task is not None
        self._askers += 1
        if on_position is not None:
            self._listeners.append(on_position)
        try:
            return await asyncio.shield(self._task)
        finally:
            if on_position is not None:
                self._listeners.remove(on_position)
            self._askers -= 1

    def leave(self, *, is_final: bool) -> None:
        """Stop waiting. The last one takes the place in line with him; a slot only if he does not come back."""
        if self._askers or self._task is None:
            return
        if is_final or not (self.is_kept and self._is_reserved):
            self._is_given_up = True
            self._task.cancel()


class Openings:
    """The nonces of one server's sessions.

    Args:
        lookup: Returns a live session by its id, and how one that is gone has ended.
        grace_s: Tells how long a session is kept for a client that may come back.
    """

    def __init__(self, lookup: Lookup, grace_s: Callable[[], float]) -> None:
        self._lookup = lookup
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[bytes, Opening] = {}

    def find(self, nonce: str | None) -> Session | None:
        """Return the session that a nonce has opened; None where it has not, or not yet.

        Raises:
            SessionLost: It has, and the session has ended.
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
        """Return what opens a session under a nonce: what is under way already, else this work."""
        if nonce is None or self._grace_s() <= 0:  # nobody could come back to it
            opening = Opening(is_kept=False)
            opening.start(work(opening))
            return opening
        digest = _digest(nonce)
        with self._lock:
            found = self._under_way.get(digest)
            if found is not None and found.can_be_joined:
                return found
            opening = self._under_way[digest] = Opening(is_kept=True)
        opening.start(work(opening)).add_done_callback(lambda task: self._done(digest, opening, task))
        return opening

    def _done(self, digest: bytes, opening: Opening, task: asyncio.Task[Session]) -> None:
        is_open = not task.cancelled() and task.exception() is None
        with self._lock:
            if self._under_way.get(digest) is opening:
                del self._under_way[digest]
            if is_open:
                self._ids[digest] = task.result().id
                while len(self._ids) > _REMEMBERED:
                    self._ids.popitem(last=False)


def _digest(nonce: str) -> bytes:
    """What is kept of a nonce, which is as good as the session's token."""
    return hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()
