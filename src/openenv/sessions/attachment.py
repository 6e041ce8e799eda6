"""Who holds a resumable session, and how somebody else comes to hold it.

A session is attached to one holder at a time. When that one is gone, whoever has its token may attach to it for the
grace period. Knows sessions and tokens; must not know connections.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import SessionLost
from .lifetime import DISCONNECTED, TAKEN_OVER, UNKNOWN, ending
from .session import Holder, Session
from .tokens import Tokens

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
            raise SessionLost(ending(ended) if ended is not None else UNKNOWN)
        if session.is_ending:
            raise SessionLost(ending(session.close_reason))
        return session

    def reattach(self, session: Session, holder: Holder) -> None:
        """Attach to a session that goes on; whoever held it before is told."""
        former, session.holder = session.holder, holder
        session.is_attached = True
        session.touch()
        self.resumes += 1
        if former is not None and former is not holder:
            former.let_go(session, TAKEN_OVER)

    def hold(self, session: Session, holder: Holder) -> None:
        """Attach to a session that was just opened."""
        session.holder, session.is_attached = holder, True

    def release(self, session: Session, holder: Holder) -> None:
        """Leave a session to whoever has its token, for the grace period."""
        if session.holder is not holder:
            return
        session.holder, session.is_attached = None, False
        session.touch()
        if self._grace_s() <= 0:
            session.close(DISCONNECTED)
