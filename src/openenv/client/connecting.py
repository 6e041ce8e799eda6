"""How often a client tries to connect, and for how long: until its time is over, or a failure will not go away.

Knows failures and time; must not know sockets or protocols.
"""

from __future__ import annotations

import ssl

from ..errors import ConnectFailed
from .commands import Connect, Flow, Pause
from .link import Link, Reconnecting
from .options import ConnectionOptions

# What breaks a connection to a server that is there; any other failure of the system says that none is.
_BROKEN = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, TimeoutError, ssl.SSLError)


class Attempts:
    """The tries of one connect, with pauses between them that grow and differ from client to client.

    Args:
        plan: The pauses, the clock and the dice.
        options: How long all tries together may take, and how long it may look as if no server were there.
        was_there: Whether there was a server before: then it may be starting anew, and is not given up sooner.
    """

    def __init__(self, plan: Reconnecting, options: ConnectionOptions, *, was_there: bool = False) -> None:
        self._plan = plan
        self._was_there = was_there
        self._options = options
        self._began_at = plan.clock()
        self.count = 0

    @property
    def left_s(self) -> float:
        """How much longer it may take."""
        return max(0.05, self._options.connect_timeout_s - self._spent_s)

    @property
    def _spent_s(self) -> float:
        return self._plan.clock() - self._began_at

    def pause_after(self, failure: ConnectFailed) -> float:
        """Take note of a try that failed, and return how long to wait before the next one.

        Raises:
            ConnectFailed: There is no next one. It says how many there were, and how the last one failed.
        """
        self.count += 1
        limit_s = self._options.connect_timeout_s
        if is_absent(failure) and not self._was_there:
            limit_s = min(limit_s, self._options.retry_refused_s)
        pause_s = self._plan.pause_s(self.count - 1)
        if failure.is_transient and self._spent_s + pause_s < limit_s:
            return pause_s
        text = str(failure)
        if self.count > 1:
            text = f"{text} ({self.count} tries in {self._spent_s:.1f} s)"
        raise ConnectFailed(text, attempts=self.count, is_transient=failure.is_transient) from failure.__cause__


def is_absent(failure: ConnectFailed) -> bool:
    """Say whether it looks as if no server were there: nobody listens, or the host cannot be reached."""
    return isinstance(failure.__cause__, OSError) and not isinstance(failure.__cause__, _BROKEN)


def reach(link: Link) -> Flow[None]:
    """Connect, trying again within the client's limit where that may help.

    Raises:
        ConnectFailed: The server cannot be reached or refuses.
        AccessDenied: It asks for another token.
    """
    attempts = Attempts(link.reconnecting, link.options)
    while True:
        try:
            yield Connect(attempts.left_s)
            return
        except ConnectFailed as exc:
            pause_s = attempts.pause_after(exc)
        yield Pause(pause_s)
