"""A client's requests as flows: generators that yield commands and decide the meaning of each outcome.

A flow is written once; `Driver` runs it, blocking or awaiting, and sends each command's outcome back into it. Here are
connecting, v1 requests, and v2 requests, which resume their session after a lost connection. Must not know sockets.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from openenv.errors import (
    AccessDenied,
    ConnectFailed,
    EnvironmentFactoryError,
    OpenEnvError,
    ProtocolError,
    RequestTimeout,
    SessionCapacityError,
    SessionElsewhere,
    SessionError,
    SessionLost,
    StaleRequest,
)
from openenv.protocol.backoff import Backoff
from openenv.protocol.client_sessions import CLOSE, ClientSession, ContinuedElsewhere, Event, ResumableSession
from openenv.protocol.redaction import redacted

from .network import ConnectionOptions
from .websocket import UnexpectedMessage

if TYPE_CHECKING:
    from .driver import Driver

T = TypeVar("T")

CLOSED_BY_CLIENT = "closed by the client"
_ATTACH = "attach"  # no request of the protocol: the flow ends once the client holds its session
_UNEXPECTED = "the server sent an unexpected message"
_INTERRUPTED = "a request was interrupted"

# -- commands, which a flow yields ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Connect:
    """Try once to open a connection, within that many seconds if they are fewer than the options allow."""

    limit_s: float = inf


@dataclass(slots=True)
class SendAndReceive:
    """Send a message, unless it is None, and return the next one that comes."""

    payload: bytes | None
    timeout_s: float | None


@dataclass(slots=True)
class HangUp:
    """Close the connection, after a last message if there is one."""

    last_message: bytes | None = None


@dataclass(slots=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(slots=True)
class RunBlocking:
    """Call a function that may take long."""

    function: Callable[[], Any]


@dataclass(slots=True)
class RunFlows:
    """Run flows of other clients to their ends: one after the other, or side by side on an event loop."""

    flows: Sequence[tuple[Driver, Flow[Any]]]


Command = Connect | SendAndReceive | HangUp | Pause | RunBlocking | RunFlows
Flow = Generator[Command, Any, T]


@dataclass(slots=True)
class ClientRequest:
    """A request and how long its reply may take.

    Args:
        kind: Its type.
        data: Its data, such as an action.
        timeout_s: How long the reply may take; None for no limit.
        extra: Further keys; v1 has none.
        on_event: Called with its events; v1 has none.
        events_extend: Whether the time for the reply begins again with each event.
    """

    kind: str
    data: Any
    timeout_s: float | None
    extra: Mapping[str, Any] | None = None
    on_event: Callable[[Event], object] | None = None
    events_extend: bool = True


# -- connecting -----------------------------------------------------------------------------------------------------

# Errors of a connection to a server that runs; any other OSError means that no server was reached.
_BROKEN = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, TimeoutError, ssl.SSLError)


class Attempts:
    """The attempts to connect when no session is to be resumed.

    Args:
        backoff: The pauses and the clock.
        options: How long all attempts together may take (`connect_timeout_s`), and how long while nothing listens
            (`retry_refused_s`): a server that is just starting is reached, a wrong port is a quick error.
        was_there: Whether there was a server before: then it may be restarting and gets the whole time.
    """

    def __init__(self, backoff: Backoff, options: ConnectionOptions, *, was_there: bool = False) -> None:
        self._backoff = backoff
        self._was_there = was_there
        self._options = options
        self._began_at = backoff.clock()
        self._answered: ConnectFailed | None = None  # the last failure that did not run out of time
        self.count = 0

    @property
    def left_s(self) -> float:
        """How much longer it may take."""
        return max(0.05, self._options.connect_timeout_s - self._spent_s)

    @property
    def _spent_s(self) -> float:
        return self._backoff.clock() - self._began_at

    def pause_after(self, failure: ConnectFailed) -> float:
        """Count a failed attempt and return how long to wait before the next one.

        Raises:
            ConnectFailed: No attempt is left. The error gives the number of attempts and the last failure that did not
                run out of time.
        """
        self.count += 1
        limit_s = self._options.connect_timeout_s
        cause = failure.__cause__
        is_absent = isinstance(cause, OSError) and not isinstance(cause, _BROKEN)
        if is_absent and not self._was_there:
            limit_s = min(limit_s, self._options.retry_refused_s)
        pause_s = self._backoff.pause_s(self.count - 1)
        if not isinstance(cause, TimeoutError):
            self._answered = failure
        if failure.is_transient and self._spent_s + pause_s < limit_s:
            return pause_s
        if self._answered is not None:  # that the last try had little time left says less
            failure, cause = self._answered, self._answered.__cause__
        text = str(failure)
        if self.count > 1:
            text = f"{text} ({self.count} tries in {self._spent_s:.1f} s)"
        raise ConnectFailed(text, attempts=self.count, is_transient=failure.is_transient) from cause


class Outage:
    """The time that a request, or a connection of a `VectorEnv`, has spent on getting back to its sessions.

    The time stays spent when the connection is back (`end`) and breaks again (`begin`): a server that takes
    connections only to drop them is not retried for ever.
    """

    def __init__(self, backoff: Backoff, reason: str) -> None:
        self._backoff = backoff
        self._left_s = backoff.timeout_s
        self._since: float | None = backoff.clock()
        self._attempts = 0
        self.reason = reason

    def begin(self, reason: str) -> None:
        """Record that the connection is lost again, or still."""
        if self._since is None:
            self._since = self._backoff.clock()
            self.reason = reason

    def end(self) -> None:
        """Record that the session is back."""
        self._left_s = self.left_s
        self._since = None

    @property
    def left_s(self) -> float:
        """How much longer it may take."""
        return self._left_s - (0.0 if self._since is None else self._backoff.clock() - self._since)

    def next_pause_s(self) -> float:
        """Return how long to wait before the next attempt."""
        self._attempts += 1
        return min(self._backoff.pause_s(self._attempts - 1), max(0.0, self.left_s))

    def verdict(self, last_reason: str) -> str:
        """Return why the session is given up."""
        if not self._backoff.timeout_s:
            return self.reason
        reasons = self.reason if last_reason == self.reason else f"{self.reason}; {last_reason}"
        return f"{reasons}; not resumed within {self._backoff.timeout_s:g} s"


def connect(driver: Driver) -> Flow[None]:
    """Open a connection unless one is open; make several attempts if that may help.

    Raises:
        ConnectFailed: The server cannot be reached or refuses.
        AccessDenied: The server requires another token.
    """
    if driver.is_open:
        return
    if driver.has_connected and isinstance(driver.session, ClientSession):
        driver.session.lose(driver.websocket.lost_reason)
    attempts = Attempts(driver.backoff, driver.options)
    while True:
        try:
            yield Connect(attempts.left_s)
            break
        except ConnectFailed as exc:
            pause_s = attempts.pause_after(exc)
        yield Pause(pause_s)
    yield from _agree(driver)


def _agree(driver: Driver) -> Flow[None]:
    """Adopt the protocol of a new connection."""
    driver.has_connected = True
    try:
        driver.adopt_protocol()
    except ProtocolError:
        yield HangUp()
        raise


# -- requests -------------------------------------------------------------------------------------------------------


def request(driver: Driver, call: ClientRequest) -> Flow[dict[str, Any]]:
    """Send a request and return its reply's data; a lost episode stays lost until `reset`."""
    # Not a generator itself: that would be one more to resume on the way to and from each reply.
    if not driver.has_connected:
        return _first_request(driver, call)
    session = driver.session
    if isinstance(session, ResumableSession):
        return _request_v2(driver, session, call)
    return _request_v1(driver, session, call)


def _first_request(driver: Driver, call: ClientRequest) -> Flow[dict[str, Any]]:
    yield from connect(driver)  # only then is it known which protocol the server speaks
    return (yield from request(driver, call))


def require_v2(driver: Driver, what: str) -> Flow[None]:
    """Connect if need be.

    Raises:
        ProtocolError: The server speaks only v1, which has no such request.
    """
    yield from connect(driver)
    if not isinstance(driver.session, ResumableSession):
        raise ProtocolError(f"{what} needs protocol v2, and the server at {redacted(driver.url)} speaks only v1")


def attach(driver: Driver) -> Flow[None]:
    """Connect, and attach to the session that the client has the token of.

    Raises:
        SessionLost: There is no such session any more.
    """
    yield from request(driver, ClientRequest(_ATTACH, None, driver.options.message_timeout_s))


def hang_up(driver: Driver) -> Flow[None]:
    """End session and connection."""
    if driver.is_open:  # a v2 connection has a close message that says the same
        yield HangUp(b'{"type":"close"}' if isinstance(driver.session, ClientSession) else None)
    if driver.has_connected:
        driver.session.lose(CLOSED_BY_CLIENT)


def detach(driver: Driver) -> Flow[str]:
    """Hang up, leave the session to the client that has its token, and return the token.

    Raises:
        ProtocolError: The client has no session that could be resumed.
    """
    session = driver.session
    token = session.token if isinstance(session, ResumableSession) else None
    if token is None:
        raise ProtocolError("Nothing to detach: no session has been opened, or the server speaks only protocol v1")
    driver.websocket.close_message = None
    if driver.is_open:
        yield HangUp()
    session.lose("detached by the client")
    return token


# -- v1: a session is its connection, and is lost with it -------------------------------------------------------------


def _request_v1(driver: Driver, session: ClientSession, call: ClientRequest) -> Flow[dict[str, Any]]:
    kind = call.kind
    was_open = driver.is_open
    if not was_open:
        session.lose(driver.websocket.lost_reason)
        if kind != "reset" and driver.websocket.messages:
            last = driver.websocket.messages.popleft()
            session.reply(kind, last.payload)  # raises: it says why the server has hung up
    payload = session.request(kind, call.data)
    if not was_open:
        yield from connect(driver)
        if driver.session is not session:  # the server at this address speaks v2 now
            return (yield from request(driver, call))
    try:
        raw = yield from _exchange_v1(session, kind, payload, call.timeout_s)
    except SessionLost:
        # A reset starts a new episode in any case, so a connection that had died unnoticed may be replaced for it.
        if kind != "reset" or not was_open or driver.is_open:
            raise
        return (yield from request(driver, call))
    return (yield from _reply_v1(session, kind, raw))


def next_reply(driver: Driver, kind: str, timeout_s: float | None) -> Flow[dict[str, Any]]:
    """Wait for one more v1 message of the server about the request that it is still at work on."""
    session = driver.session
    assert isinstance(session, ClientSession), "v2 has events instead"
    raw = yield from _exchange_v1(session, kind, None, timeout_s)
    return (yield from _reply_v1(session, kind, raw))


def _reply_v1(session: ClientSession, kind: str, raw: bytes) -> Flow[dict[str, Any]]:
    """Read a reply; one that ends the session ends the connection as well."""
    try:
        return session.reply(kind, raw)
    except (SessionCapacityError, EnvironmentFactoryError, SessionError, ProtocolError) as exc:
        session.lose(f"the server ended the session: {exc}")
        yield HangUp()
        raise


def _exchange_v1(session: ClientSession, kind: str, payload: bytes | None, timeout_s: float | None) -> Flow[bytes]:
    """Send a message, unless it is None, and wait for the next one.

    v1 has no ids: after any failure the next reply might be that of another request, so the session is lost.
    """
    try:
        raw: bytes = yield SendAndReceive(payload, timeout_s)
        return raw
    except SessionLost as exc:
        session.lose(exc.reason)
        raise
    except RequestTimeout:
        session.lose("a request timed out")
        raise
    except UnexpectedMessage as exc:
        unexpected = exc.payload
    except BaseException:
        session.lose(_INTERRUPTED)
        raise
    session.lose(_UNEXPECTED)
    yield HangUp()
    session.reply(kind, unexpected)  # raises if it is the reason why the server hung up
    raise SessionLost(_UNEXPECTED)


# -- v2: a session outlives its connection, and the request is repeated on the next one -------------------------------
#
#   request --- attached ---> send, wait for the reply ------------------------------------> reply
#      |                              | connection lost (_Dropped)
#      | not attached                 v
#      +----> connect, open/resume <--+-- Outage: pause, until `reconnect_timeout_s` is spent
#                    |                            |
#                    | SESSION_LOST               | spent, or the failure is fatal
#                    v                            v
#             SessionLost               SessionLost; the session is stranded: the next reset tries it first
#
# Example: the connection breaks after the server has run step 7, before the reply arrived. The flow resumes the session
# with its token, sends the same bytes (id 7) again, and the server answers from its ledger without a second run.


class _Dropped(Exception):
    """The connection is gone; the session may still exist."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _request_v2(driver: Driver, session: ResumableSession, call: ClientRequest) -> Flow[dict[str, Any]]:
    """Send a request and return its reply's data, over as many connections as it takes.

    Raises:
        SessionLost: The episode is gone; only a reset goes on.
        ConnectFailed: No session was open, and none could be opened.
        RequestTimeout: No reply came in time; the episode is given up.
    """
    if session.lost_reason is not None and call.kind != "reset":
        raise SessionLost(session.lost_reason)
    payload: bytes | None = None
    outage: Outage | None = None
    attempts: Attempts | None = None
    while True:
        try:
            if not (session.is_attached and driver.is_open):
                yield from _attach(driver, session, call, outage, attempts)
                if call.kind == _ATTACH:
                    return {}
            if driver.session is session:
                payload = _payload(session, call, payload)
                return (yield from _exchange_v2(driver, session, call, payload))
        except _Dropped as exc:
            if call.kind == "reset" and not driver.backoff.timeout_s and session.token is not None:
                session.lose(exc.reason, is_stranded=True)  # a reset starts a new episode in any case
                continue
            reason, is_unreachable = exc.reason, False
            failure = ConnectFailed(reason, is_transient=True)
        except ConnectFailed as exc:
            # Without its traceback, which would keep this frame, and the client, alive.
            reason, is_unreachable, failure = str(exc), True, exc.with_traceback(None)
        else:  # the server at this address speaks v1 now
            return (yield from request(driver, call))
        is_fatal = driver.websocket.is_fatal
        if outage is None and session.token is None and not is_fatal:  # no session can be resumed
            attempts = attempts or Attempts(driver.backoff, driver.options, was_there=driver.has_connected)
            yield Pause(attempts.pause_after(failure))
            continue
        outage = outage or Outage(driver.backoff, reason)
        outage.begin(reason)
        if is_fatal or outage.left_s <= 0:
            verdict = outage.verdict(reason)
            session.lose(verdict, is_stranded=not is_fatal)
            raise ConnectFailed(reason) if is_unreachable and call.kind == "reset" else SessionLost(verdict)
        yield from _pause(session, outage)


def _payload(session: ResumableSession, call: ClientRequest, sent: bytes | None) -> bytes:
    """Return the payload to send: the same bytes again until the request is answered."""
    if sent is None or session.pending is None:
        return session.request(call.kind, call.data, call.extra)
    return sent


def _pause(session: ResumableSession, outage: Outage) -> Flow[None]:
    """Wait before the next attempt to resume."""
    try:
        yield Pause(outage.next_pause_s())
    except BaseException:
        if session.is_waiting:
            session.lose(_INTERRUPTED, is_stranded=True)
        raise


def _exchange_v2(
    driver: Driver, session: ResumableSession, call: ClientRequest, payload: bytes
) -> Flow[dict[str, Any]]:
    """Send a request on the present connection and wait for its reply; events may come before it."""
    to_send: bytes | None = payload
    clock, left_s = driver.backoff.clock, call.timeout_s
    deadline = None if left_s is None else clock() + left_s
    while True:
        try:
            raw = yield SendAndReceive(to_send, left_s)
            to_send = None
        except UnexpectedMessage as exc:  # nothing was sent
            raw = exc.payload
        except BaseException as exc:
            yield from _give_up(driver, session, exc)
            raise
        try:
            reply = session.receive(raw)
        except (SessionLost, StaleRequest, SessionError, ProtocolError) as exc:
            yield from _end(driver, session, exc)
            raise
        if type(reply) is dict:
            return reply
        if isinstance(reply, Event):
            if call.on_event is not None:
                try:
                    call.on_event(reply)
                except BaseException as exc:
                    yield from _give_up(driver, session, exc)
                    raise
            if call.events_extend and call.timeout_s is not None:
                deadline = clock() + call.timeout_s
        if deadline is not None:
            left_s = max(0.001, deadline - clock())


def _give_up(driver: Driver, session: ResumableSession, exc: BaseException) -> Flow[None]:
    """Handle that no message came: a lost connection is replaced, anything else gives the session up."""
    if isinstance(exc, SessionLost):
        session.is_attached = False
        raise _Dropped(exc.reason) from None
    # It is unknown whether the request has run, and a caller that stopped waiting must not go on as if it had not.
    last_message = session.cancel_request()
    session.lose("a request timed out" if isinstance(exc, RequestTimeout) else _INTERRUPTED)
    if driver.is_open:
        yield HangUp(last_message)


def _end(driver: Driver, session: ResumableSession, exc: Exception) -> Flow[None]:
    """Handle a server's message that ends the session, or an invalid message."""
    session.lose(exc.reason if isinstance(exc, SessionLost) else f"the server ended the session: {exc}")
    if isinstance(exc, SessionLost):
        driver.websocket.close_message = None  # another client may have the session
    if driver.is_open:
        yield HangUp()


def _attach(
    driver: Driver,
    session: ResumableSession,
    call: ClientRequest,
    outage: Outage | None,
    attempts: Attempts | None,
) -> Flow[None]:
    """Make a connection that holds the session: connect, then open or resume; unless the server speaks v1 now."""
    if not driver.is_open:
        if session.is_attached:
            yield from _read_unread(driver, session, call)
        if session.token is not None and outage is None and driver.has_connected:
            raise _Dropped(driver.websocket.lost_reason)
        try:
            left_s = inf if attempts is None else attempts.left_s
            yield Connect(left_s if outage is None else max(0.05, outage.left_s))
            yield from _agree(driver)
        except (ConnectFailed, ProtocolError):
            raise
        except BaseException as exc:
            if session.is_waiting:
                session.lose(str(exc) if isinstance(exc, AccessDenied) else _INTERRUPTED, is_stranded=True)
            raise
        if driver.session is not session:
            return
    yield from _open(driver, session, call, outage)
    if outage is not None:
        outage.end()


def _read_unread(driver: Driver, session: ResumableSession, call: ClientRequest) -> Flow[None]:
    """Read the messages that came before the connection was lost: one may say that the session has ended."""
    messages = driver.websocket.messages
    while messages:
        try:
            session.receive(messages.popleft().payload)
        except SessionLost as exc:
            if call.kind == "reset":
                session.forget()
                return
            yield from _end(driver, session, exc)
            raise
        except OpenEnvError:
            continue


def _open(driver: Driver, session: ResumableSession, call: ClientRequest, outage: Outage | None) -> Flow[None]:
    """Open a session, or resume the one that exists."""
    payload: bytes | None = session.open_request(driver.wait_s)
    # A reset starts a new episode in any case, and a client that never had the session has nothing to lose.
    may_start_over = call.kind == "reset" or not session.is_resuming
    driver.websocket.close_message = CLOSE
    while True:
        try:
            raw = yield SendAndReceive(payload, _open_timeout_s(driver, session, call, outage))
            payload = None
        except UnexpectedMessage:
            continue
        except RequestTimeout as exc:
            if outage is None or not session.is_resuming:
                yield from _give_up(driver, session, exc)
                raise
            driver.websocket.close_message = None
            yield HangUp()
            raise _Dropped("no answer to the attempt to resume") from None
        except BaseException as exc:
            yield from _give_up(driver, session, exc)
            raise
        try:
            if session.opened(raw):
                return
        except (SessionLost, SessionElsewhere, ProtocolError, SessionError) as exc:
            is_elsewhere = isinstance(exc, SessionElsewhere)
            if is_elsewhere and not may_start_over:  # another connection may reach the process that has it
                driver.websocket.close_message = None
                yield HangUp()
                raise _Dropped(str(exc)) from None
            is_gone = is_elsewhere or (isinstance(exc, SessionLost) and not isinstance(exc, ContinuedElsewhere))
            if not may_start_over or not is_gone:
                yield from _end(driver, session, exc)
                raise
            may_start_over = False
            session.forget()
            payload = session.open_request(driver.wait_s)


def _open_timeout_s(
    driver: Driver, session: ResumableSession, call: ClientRequest, outage: Outage | None
) -> float | None:
    """Return how long the answer to an `open` may take: as long as that to the request, and as the queue."""
    limit_s = call.timeout_s
    if session.is_resuming:
        if outage is None:
            return limit_s
        return max(0.05, outage.left_s if limit_s is None else min(limit_s, outage.left_s))
    return limit_s if limit_s is None or driver.wait_s is None else limit_s + driver.wait_s
