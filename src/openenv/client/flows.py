"""Request flows, written once as generators, for the blocking and the awaiting client alike.

Those of protocol v1 are here; where the server speaks v2, the same names lead to `resumption`. Knows the protocol's
client side; must not know sockets.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import (
    AccessDenied,
    ConnectFailed,
    EnvironmentFactoryError,
    OpenEnvError,
    ProtocolError,
    RequestTimeout,
    SessionCapacityError,
    SessionError,
    SessionLost,
    StaleRequest,
)
from ..protocol.client_sessions import CLOSE, ClientSession, ContinuedElsewhere, Event, ResumableSession
from .options import ConnectionOptions

# commands: What flows ask for, and the two drivers that carry it out, blocking or awaiting.
#
# A flow is a generator that yields commands (connect, exchange, hang up, pause, call something slow) and
# gets the outcome sent back. It decides what a failure means; a driver only does the work. Knows no protocol.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Try once to open a connection, within that many seconds if they are fewer than the client allows."""

    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class SendAndReceive:
    """Send a message, unless it is None, and return the next one that comes."""

    payload: bytes | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection, after a last message if there is one."""

    farewell: bytes | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RunBlocking:
    """Call something that may take long."""

    function: Callable[[], Any]


class Unasked(Exception):
    """A message was there before anything was asked; nothing has been sent."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("a message came before the request")
        self.payload = payload


Command = Connect | SendAndReceive | HangUp | Pause | RunBlocking
Flow = Generator[Command, Any, T]


class BlockingTransport(Protocol):
    """What the blocking driver runs commands on."""

    def open(self, limit_s: float | None = None) -> None:
        """Connect."""
        ...

    def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send and wait."""
        ...

    def close(self, farewell: bytes | None) -> None:
        """Hang up."""
        ...


class LoopTransport(Protocol):
    """What the awaiting driver runs commands on."""

    async def open(self, limit_s: float | None = None) -> None:
        """Connect."""
        ...

    def exchange(self, payload: bytes | None, timeout_s: float | None) -> Awaitable[bytes]:
        """Send and wait."""
        ...

    async def close(self, farewell: bytes | None) -> None:
        """Hang up."""
        ...


def run_blocking(flow: Flow[T], transport: BlockingTransport) -> T:
    """Run a flow to its end in this thread."""
    failure: BaseException | None = None
    try:
        command = next(flow)
        while True:
            try:
                outcome = _do(command, transport)
            except BaseException as exc:
                failure = exc  # thrown outside this handler: what the flow raises instead does not hang on it
            command, failure = (flow.send(outcome) if failure is None else flow.throw(failure)), None
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        failure = None  # or its traceback and this frame would keep each other, and the client, alive


def _do(command: Command, transport: BlockingTransport) -> Any:
    if isinstance(command, SendAndReceive):
        return transport.exchange(command.payload, command.timeout_s)
    if isinstance(command, Connect):
        return transport.open(command.limit_s)
    if isinstance(command, HangUp):
        return transport.close(command.farewell)
    return time.sleep(command.seconds) if isinstance(command, Pause) else command.function()


async def run_on_loop(flow: Flow[T], transport: LoopTransport) -> T:
    """Run a flow to its end on the running loop."""
    failure: BaseException | None = None
    try:
        command = next(flow)
        while True:
            try:
                if isinstance(command, SendAndReceive):
                    outcome = await transport.exchange(command.payload, command.timeout_s)
                else:
                    outcome = await _await(command, transport)
            except BaseException as exc:
                failure = exc  # as above
            command, failure = (flow.send(outcome) if failure is None else flow.throw(failure)), None
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        failure = None


async def _await(command: Connect | HangUp | Pause | RunBlocking, transport: LoopTransport) -> Any:
    if isinstance(command, Connect):
        return await transport.open(command.limit_s)
    if isinstance(command, HangUp):
        return await transport.close(command.farewell)
    if isinstance(command, Pause):
        return await asyncio.sleep(command.seconds)
    return await asyncio.get_running_loop().run_in_executor(None, command.function)


# link: What flows know of their client: its session, its connection, and how patient it is.
#
# Knows interfaces only.


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """How a client gets back to a server that it has lost.

    Args:
        timeout_s: How long it may take in all for one request; 0 for never.
        first_pause_s: The longest pause before the first attempt; each further one may be twice as long.
        longest_pause_s: The longest of all.
        clock: Tells the time in seconds.
        jitter: Returns a number between 0 and 1.
    """

    timeout_s: float = 30.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def pause_s(self, attempt: int) -> float:
        """How long to wait before an attempt; the first is 0. Not the same for all clients."""
        longest: float = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * self.jitter())


class Link(Protocol):
    """What a flow needs to know of its client."""

    session: ClientSession | ResumableSession
    has_connected: bool
    reconnecting: Reconnecting
    options: ConnectionOptions
    wait_s: float | None

    @property
    def is_open(self) -> bool:
        """Whether a connection is there."""
        ...

    @property
    def lost_reason(self) -> str:
        """Why it is not."""
        ...

    @property
    def is_hopeless(self) -> bool:
        """Whether it broke in a way that would break the next one as well."""
        ...

    def last_words(self) -> bytes | None:
        """What the server said before it hung up, if nobody has heard it yet."""
        ...

    def agree(self) -> None:
        """Take up the protocol that a new connection speaks.

        Raises:
            ProtocolError: It is not the one that the client insists on.
        """
        ...

    def leave_will(self, payload: bytes | None) -> None:
        """Say what the server is told when this client lets go of the connection."""
        ...


# connecting: How often a client tries to connect, and for how long: until its time is over, or a failure
# will not go away.
#
# Knows failures and time; must not know sockets or protocols.


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


# resumption: Request flows of protocol v2: a lost connection is replaced, the session resumed, the
# unanswered request repeated.
#
# The caller notices nothing, or gets `SessionLost`: a request is never answered by another session or another request's
# reply. Knows the protocol's client side; must not know sockets.


@dataclass(slots=True)
class ClientRequest:
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


def ask(link: Link, session: ResumableSession, call: ClientRequest) -> Flow[dict[str, Any]]:
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


def _answer(link: Link, session: ResumableSession, call: ClientRequest, payload: bytes) -> Flow[dict[str, Any]]:
    """Send a request on the connection that is there, and wait for its reply."""
    to_send: bytes | None = payload
    clock, left_s = link.reconnecting.clock, call.timeout_s
    deadline = None if left_s is None else clock() + left_s
    while True:
        try:
            raw = yield SendAndReceive(to_send, left_s)
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


def _tell(link: Link, session: ResumableSession, call: ClientRequest, event: Event) -> Flow[None]:
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
    link: Link, session: ResumableSession, call: ClientRequest, outage: _Outage | None, attempts: Attempts | None
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


def _hear_last_words(link: Link, session: ResumableSession, call: ClientRequest) -> Flow[None]:
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


def _open(link: Link, session: ResumableSession, call: ClientRequest, outage: _Outage | None) -> Flow[None]:
    """Open a session, or resume the one that is there."""
    payload: bytes | None = session.open_request(link.wait_s)
    may_begin_anew = call.kind == "reset" or not session.is_resuming
    link.leave_will(CLOSE)
    while True:
        try:
            raw = yield SendAndReceive(payload, _patience_s(link, session, call, outage))
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


def _patience_s(link: Link, session: ResumableSession, call: ClientRequest, outage: _Outage | None) -> float | None:
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


CLOSED_BY_CLIENT = "closed by the client"


def connect(link: Link) -> Flow[None]:
    """Open a connection unless there is one."""
    if link.is_open:
        return
    if link.has_connected and isinstance(link.session, ClientSession):
        link.session.lose(link.lost_reason)
    yield from reach(link)
    link.has_connected = True
    try:
        link.agree()
    except ProtocolError:
        yield HangUp()
        raise


def request(
    link: Link,
    kind: str,
    data: Any,
    timeout_s: float | None,
    *,
    extra: Mapping[str, Any] | None = None,
    listen: Callable[[Event], object] | None = None,
    events_count: bool = True,
) -> Flow[dict[str, Any]]:
    """Send a request and return its reply's data; a lost episode stays lost until `reset`.

    Args:
        link: The client's connection and session.
        kind: The type of the request.
        data: What it is about.
        timeout_s: How long the reply may take; None for ever.
        extra: Further keys; v1 has none.
        listen: Told of events; v1 has none.
        events_count: Whether an event gives the reply its time anew.
    """
    if not link.has_connected:
        yield from connect(link)
    session = link.session
    if isinstance(session, ResumableSession):
        try:
            return (yield from ask(link, session, ClientRequest(kind, data, timeout_s, extra, listen, events_count)))
        except OtherProtocol:
            return (yield from request(link, kind, data, timeout_s))
    return (yield from _request_v1(link, session, kind, data, timeout_s))


def _request_v1(
    link: Link, session: ClientSession, kind: str, data: Any, timeout_s: float | None
) -> Flow[dict[str, Any]]:
    if not link.is_open and link.has_connected:
        session.lose(link.lost_reason)
        if kind != "reset" and (farewell := link.last_words()) is not None:
            session.reply(kind, farewell)  # raises: it says why the server has hung up
    payload = session.request(kind, data)
    was_open = link.is_open
    yield from connect(link)
    if link.session is not session:
        return (yield from request(link, kind, data, timeout_s))
    try:
        raw = yield from _exchange(session, kind, payload, timeout_s)
    except SessionLost:
        # A reset begins anew anyway, so a connection that had died unnoticed may be replaced for it.
        if not (was_open and kind == "reset"):
            raise
        yield from connect(link)
        if link.session is not session:
            return (yield from request(link, kind, data, timeout_s))
        raw = yield from _exchange(session, kind, payload, timeout_s)
    return (yield from _reply(session, kind, raw))


def next_reply(link: Link, kind: str, timeout_s: float | None) -> Flow[dict[str, Any]]:
    """Wait for one more message of the server to the request that it is still at work on."""
    session = link.session
    assert isinstance(session, ClientSession), "v2 has events instead"
    raw = yield from _exchange(session, kind, None, timeout_s)
    return (yield from _reply(session, kind, raw))


def _reply(session: ClientSession, kind: str, raw: bytes) -> Flow[dict[str, Any]]:
    """Read a reply; one that ends the session ends the connection as well."""
    try:
        return session.reply(kind, raw)
    except (SessionCapacityError, EnvironmentFactoryError, SessionError, ProtocolError) as exc:
        session.lose(f"the server ended the session: {exc}")
        yield HangUp()
        raise


def _exchange(session: ClientSession, kind: str, payload: bytes | None, timeout_s: float | None) -> Flow[bytes]:
    """SendAndReceive messages; whatever goes wrong, the episode is lost with it."""
    try:
        raw: bytes = yield SendAndReceive(payload, timeout_s)
        return raw
    except SessionLost as exc:
        session.lose(exc.reason)
        raise
    except RequestTimeout:
        session.lose("a request timed out")
        raise
    except Unasked as exc:
        early = exc.payload
    except BaseException:
        session.lose("a request was interrupted")
        raise
    session.lose("the server sent a message that nobody asked for")
    yield HangUp()
    session.reply(kind, early)  # raises, where it is the reason why the server hung up
    raise SessionLost("the server sent a message that nobody asked for")


def hang_up(link: Link) -> Flow[None]:
    """End session and connection."""
    if link.is_open:  # a v2 session has left a will that says the same
        yield HangUp(b'{"type":"close"}' if isinstance(link.session, ClientSession) else None)
    if link.has_connected:
        link.session.lose(CLOSED_BY_CLIENT)


def detach(link: Link) -> Flow[str]:
    """Hang up and leave the session to whoever has its token; return that.

    Raises:
        ProtocolError: There is no session that could be resumed.
    """
    session = link.session
    token = session.token if isinstance(session, ResumableSession) and session.lost_reason is None else None
    if token is None:
        raise ProtocolError("Nothing to detach: no session has been opened, or the server speaks only protocol v1")
    link.leave_will(None)
    if link.is_open:
        yield HangUp()
    session.lose("detached by the client")
    return token
