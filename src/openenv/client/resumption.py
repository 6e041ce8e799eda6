"""Request flows of protocol v2: a lost connection is replaced, the session resumed, the unanswered request repeated.

The caller notices nothing, or gets `SessionLost`: a request is never answered by another session or another request's
reply. Knows the protocol's client side; must not know sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import (
    AccessDenied,
    ConnectFailed,
    OpenEnvError,
    ProtocolError,
    RequestTimeout,
    SessionError,
    SessionLost,
    StaleRequest,
)
from ..protocol.client_sessions import CLOSE, ContinuedElsewhere, Event, ResumableSession
from .commands import Connect, Exchange, Flow, HangUp, Pause, Unasked
from .connecting import Attempts
from .link import Link, Reconnecting


@dataclass(slots=True)
class Call:
    """A request and how long its reply may take.

    Args:
        kind: Its type.
        data: What it is about.
        timeout_s: How long the reply may take; None for ever.
        extra: Further keys.
        listen: Told of its events.
        events_count: Whether an event gives the reply its time anew.
    """

    kind: str
    data: Any
    timeout_s: float | None
    extra: Mapping[str, Any] | None = None
    listen: Callable[[Event], object] | None = None
    events_count: bool = True


class OtherProtocol(Exception):
    """The server that is there now speaks v1."""


class _Dropped(Exception):
    """The connection is gone; the session may be there."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Outage:
    """The time that one request has spent without a session, and how often it has tried to get back."""

    def __init__(self, plan: Reconnecting, reason: str) -> None:
        self._plan = plan
        self._left_s = plan.timeout_s
        self._since: float | None = plan.clock()
        self._attempts = 0
        self.reason = reason

    def begin(self, reason: str) -> None:
        """The connection is lost again, or still."""
        if self._since is None:
            self._since = self._plan.clock()
            self.reason = reason

    def end(self) -> None:
        """The session is back. What was spent stays spent: a connection that breaks each time must have an end."""
        self._left_s = self.left_s
        self._since = None

    @property
    def left_s(self) -> float:
        """How much longer it may take."""
        return self._left_s - (0.0 if self._since is None else self._plan.clock() - self._since)

    def next_pause_s(self) -> float:
        """How long to wait before the next attempt."""
        self._attempts += 1
        return min(self._plan.pause_s(self._attempts - 1), max(0.0, self.left_s))

    def verdict(self, last_reason: str) -> str:
        """Say why the session is given up."""
        if not self._plan.timeout_s:
            return self.reason
        told = self.reason if last_reason == self.reason else f"{self.reason}; {last_reason}"
        return f"{told}; not resumed within {self._plan.timeout_s:g} s"


def ask(link: Link, session: ResumableSession, call: Call) -> Flow[dict[str, Any]]:
    """Send a request and return its reply's data, over as many connections as it takes.

    Raises:
        SessionLost: The episode is gone; only a reset goes on.
        ConnectFailed: There is no session yet, and none could be opened.
        RequestTimeout: No reply came in time; the episode is given up.
        OtherProtocol: The server does not speak v2 any more.
    """
    if session.lost_reason is not None and call.kind != "reset":
        raise SessionLost(session.lost_reason)
    payload: bytes | None = None
    outage: _Outage | None = None
    attempts: Attempts | None = None
    while True:
        try:
            if not (session.is_attached and link.is_open):
                yield from _attach(link, session, call, outage, attempts)
            if payload is None or not session.is_waiting:
                payload = session.request(call.kind, call.data, call.extra)
            return (yield from _answer(link, session, call, payload))
        except _Dropped as exc:
            if call.kind == "reset" and not link.reconnecting.timeout_s and session.token is not None:
                session.lose(exc.reason, is_stranded=True)  # a reset begins anew anyway
                continue
            reason, is_unreachable = exc.reason, False
            failure = ConnectFailed(reason, is_transient=True)
        except ConnectFailed as exc:
            # Without its traceback, which would keep this frame, and the client, alive.
            reason, is_unreachable, failure = str(exc), True, exc.with_traceback(None)
        if outage is None and session.token is None and not link.is_hopeless:  # there is nothing to get back to
            attempts = attempts or Attempts(link.reconnecting, link.options, was_there=link.has_connected)
            yield Pause(attempts.pause_after(failure))
            continue
        if outage is None:
            outage = _Outage(link.reconnecting, reason)
        outage.begin(reason)
        if link.is_hopeless or outage.left_s <= 0:
            verdict = outage.verdict(reason)
            session.lose(verdict, is_stranded=not link.is_hopeless)
            raise ConnectFailed(reason) if is_unreachable and call.kind == "reset" else SessionLost(verdict)
        yield from _pause(session, outage)


def _answer(link: Link, session: ResumableSession, call: Call, payload: bytes) -> Flow[dict[str, Any]]:
    """Send a request on the connection that is there, and wait for its reply."""
    to_send: bytes | None = payload
    clock, left_s = link.reconnecting.clock, call.timeout_s
    deadline = None if left_s is None else clock() + left_s
    while True:
        try:
            raw = yield Exchange(to_send, left_s)
            to_send = None
        except Unasked as exc:  # nothing was sent
            raw = exc.payload
        except BaseException as exc:
            yield from _failed(link, session, exc)
            raise
        try:
            found = session.receive(raw)
        except (SessionLost, StaleRequest, SessionError, ProtocolError) as exc:
            yield from _ended(link, session, exc)
            raise
        if type(found) is dict:
            return found
        if isinstance(found, Event):
            yield from _tell(link, session, call, found)
            if call.events_count and call.timeout_s is not None:
                deadline = clock() + call.timeout_s
        if deadline is not None:
            left_s = max(0.001, deadline - clock())


def _tell(link: Link, session: ResumableSession, call: Call, event: Event) -> Flow[None]:
    if call.listen is None:
        return
    try:
        call.listen(event)
    except BaseException as exc:
        yield from _failed(link, session, exc)
        raise


def _failed(link: Link, session: ResumableSession, exc: BaseException) -> Flow[None]:
    """Decide what it means that no message came: a lost connection is replaced, anything else gives the session up."""
    if isinstance(exc, SessionLost):
        session.is_attached = False
        raise _Dropped(exc.reason) from None
    # Whether the request has run is not known, and whoever gave up waiting must not go on as if it had not.
    farewell = session.cancel_request()
    session.lose("a request timed out" if isinstance(exc, RequestTimeout) else "a request was interrupted")
    if link.is_open:
        yield HangUp(farewell)


def _ended(link: Link, session: ResumableSession, exc: Exception) -> Flow[None]:
    """The server says that the session is over, or nothing that can be understood."""
    session.lose(exc.reason if isinstance(exc, SessionLost) else f"the server ended the session: {exc}")
    if isinstance(exc, SessionLost):
        link.leave_will(None)  # somebody else may have it
    if link.is_open:
        yield HangUp()


# -- getting there, and back ----------------------------------------------------------------------------------------


def _attach(
    link: Link, session: ResumableSession, call: Call, outage: _Outage | None, attempts: Attempts | None
) -> Flow[None]:
    """Have a connection that holds the session."""
    if not link.is_open:
        if session.is_attached:
            yield from _hear_last_words(link, session, call)
        if session.token is not None and outage is None and link.has_connected:
            raise _Dropped(link.lost_reason)
        try:
            left_s = None if attempts is None else attempts.left_s
            yield from _connect(link, session, left_s if outage is None else max(0.05, outage.left_s))
        except (ConnectFailed, OtherProtocol, ProtocolError):
            raise
        except BaseException as exc:
            if session.is_waiting:
                reason = str(exc) if isinstance(exc, AccessDenied) else "a request was interrupted"
                session.lose(reason, is_stranded=True)
            raise
    yield from _open(link, session, call, outage)
    if outage is not None:
        outage.end()


def _connect(link: Link, session: ResumableSession, limit_s: float | None) -> Flow[None]:
    """Connect, and see which protocol the server speaks.

    Raises:
        OtherProtocol: It is v1.
    """
    yield Connect(limit_s)
    link.has_connected = True
    try:
        link.agree()
    except ProtocolError:
        yield HangUp()
        raise
    if link.session is not session:
        raise OtherProtocol


def _hear_last_words(link: Link, session: ResumableSession, call: Call) -> Flow[None]:
    """Read what came before the connection was lost: it may say that the session has ended."""
    while (words := link.last_words()) is not None:
        try:
            session.receive(words)
        except SessionLost as exc:
            if call.kind == "reset":
                session.forget()
                return
            yield from _ended(link, session, exc)
            raise
        except OpenEnvError:
            continue


def _open(link: Link, session: ResumableSession, call: Call, outage: _Outage | None) -> Flow[None]:
    """Open a session, or resume the one that is there."""
    payload: bytes | None = session.open_request(link.wait_s)
    may_begin_anew = call.kind == "reset" or not session.is_resuming
    link.leave_will(CLOSE)
    while True:
        try:
            raw = yield Exchange(payload, _patience_s(link, session, call, outage))
            payload = None
        except Unasked:
            continue
        except RequestTimeout as exc:
            if outage is None or not session.is_resuming:
                yield from _failed(link, session, exc)
                raise
            link.leave_will(None)
            yield HangUp()
            raise _Dropped("no answer to the attempt to resume") from None
        except BaseException as exc:
            yield from _failed(link, session, exc)
            raise
        try:
            if session.opened(raw):
                return
        except (SessionLost, ProtocolError, SessionError) as exc:
            if not may_begin_anew or isinstance(exc, ContinuedElsewhere) or not isinstance(exc, SessionLost):
                yield from _ended(link, session, exc)
                raise
            may_begin_anew = False
            session.forget()  # a reset begins anew anyway, and so does who has never had the session
            payload = session.open_request(link.wait_s)


def _patience_s(link: Link, session: ResumableSession, call: Call, outage: _Outage | None) -> float | None:
    """How long the answer to an `open` may take: as long as that to the request, and as the queue."""
    limit_s = call.timeout_s
    if session.is_resuming:
        if outage is None:
            return limit_s
        return max(0.05, outage.left_s if limit_s is None else min(limit_s, outage.left_s))
    return limit_s if limit_s is None or link.wait_s is None else limit_s + link.wait_s


def _pause(session: ResumableSession, outage: _Outage) -> Flow[None]:
    """Wait before the next attempt."""
    try:
        yield Pause(outage.next_pause_s())
    except BaseException:
        if session.is_waiting:
            session.lose("a request was interrupted", is_stranded=True)
        raise
