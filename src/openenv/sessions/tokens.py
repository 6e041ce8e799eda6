"""Secrets that let their holder attach to a session from anywhere.

A token names the server process, the session, and a secret; so a token of an earlier process is told from a wrong one.
Knows text only.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

from ..errors import SessionLost
from .lifetime import RESTARTED, UNKNOWN


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
