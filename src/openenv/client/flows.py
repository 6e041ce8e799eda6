"""Request flows, written once as generators, and the two drivers that run them.

A flow yields what it needs done (connect, exchange, hang up, call something slow) and gets the outcome sent back. It
decides what a failure means; a driver only does the work, blocking or awaiting. Knows the protocol's client side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import (
    EnvironmentFactoryError,
    ProtocolError,
    RequestTimeout,
    SessionCapacityError,
    SessionError,
    SessionLost,
)
from ..protocol.client import ClientSession

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send a message, unless it is None, and return the next one that comes."""

    payload: bytes | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection, after a last message if there is one."""

    farewell: bytes | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Call something that may take long."""

    function: Callable[[], Any]


class Unasked(Exception):
    """A message was there before anything was asked: an error that ends the session, or nothing to trust."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("a message came before the request")
        self.payload = payload


Command = Connect | Exchange | HangUp | Block
Flow = Generator[Command, Any, T]


class Link(Protocol):
    """What a flow needs to know of its client."""

    session: ClientSession
    has_connected: bool

    @property
    def is_open(self) -> bool:
        """Whether a connection is there."""
        ...

    @property
    def lost_reason(self) -> str:
        """Why it is not."""
        ...

    def last_words(self) -> bytes | None:
        """What the server said before it hung up, if nobody has heard it yet."""
        ...


def connect(link: Link) -> Flow[None]:
    """Open a connection unless there is one."""
    if not link.is_open:
        if link.has_connected:
            link.session.lose(link.lost_reason)
        yield Connect()
        link.has_connected = True


def request(link: Link, kind: str, data: Any, timeout_s: float | None) -> Flow[dict[str, Any]]:
    """Send a request and return its reply's data; a lost episode stays lost until `reset`."""
    if not link.is_open and link.has_connected:
        link.session.lose(link.lost_reason)
        if kind != "reset" and (farewell := link.last_words()) is not None:
            link.session.reply(kind, farewell)  # raises: it says why the server has hung up
    payload = link.session.request(kind, data)
    was_open = link.is_open
    yield from connect(link)
    try:
        raw = yield from _exchange(link, kind, payload, timeout_s)
    except SessionLost:
        # A reset begins anew anyway, so a connection that had died unnoticed may be replaced for it.
        if not (was_open and kind == "reset"):
            raise
        yield Connect()
        raw = yield from _exchange(link, kind, payload, timeout_s)
    return (yield from _reply(link, kind, raw))


def next_reply(link: Link, kind: str, timeout_s: float | None) -> Flow[dict[str, Any]]:
    """Wait for one more message of the server to the request that it is still at work on."""
    raw = yield from _exchange(link, kind, None, timeout_s)
    return (yield from _reply(link, kind, raw))


def _reply(link: Link, kind: str, raw: bytes) -> Flow[dict[str, Any]]:
    """Read a reply; one that ends the session ends the connection as well."""
    try:
        return link.session.reply(kind, raw)
    except (SessionCapacityError, EnvironmentFactoryError, SessionError, ProtocolError) as exc:
        link.session.lose(f"the server ended the session: {exc}")
        yield HangUp()
        raise


def _exchange(link: Link, kind: str, payload: bytes | None, timeout_s: float | None) -> Flow[bytes]:
    """Exchange messages; whatever goes wrong, the episode is lost with it."""
    try:
        raw: bytes = yield Exchange(payload, timeout_s)
        return raw
    except SessionLost as exc:
        link.session.lose(exc.reason)
        raise
    except RequestTimeout:
        link.session.lose("a request timed out")
        raise
    except Unasked as exc:
        early = exc.payload
    except BaseException:
        link.session.lose("a request was interrupted")
        raise
    link.session.lose("the server sent a message that nobody asked for")
    yield HangUp()
    link.session.reply(kind, early)  # raises, where it is the reason why the server hung up
    raise SessionLost("the server sent a message that nobody asked for")


def hang_up(link: Link) -> Flow[None]:
    """End session and connection."""
    if link.is_open:
        yield HangUp(b'{"type":"close"}')
    if link.has_connected:
        link.session.lose("closed by the client")


class BlockingTransport(Protocol):
    """What the blocking driver runs commands on."""

    def open(self) -> None:
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

    async def open(self) -> None:
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
    if isinstance(command, Exchange):
        return transport.exchange(command.payload, command.timeout_s)
    if isinstance(command, Connect):
        return transport.open()
    if isinstance(command, HangUp):
        return transport.close(command.farewell)
    return command.function()


async def run_on_loop(flow: Flow[T], transport: LoopTransport) -> T:
    """Run a flow to its end on the running loop."""
    failure: BaseException | None = None
    try:
        command = next(flow)
        while True:
            try:
                if isinstance(command, Exchange):
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


async def _await(command: Connect | HangUp | Block, transport: LoopTransport) -> Any:
    if isinstance(command, Connect):
        return await transport.open()
    if isinstance(command, HangUp):
        return await transport.close(command.farewell)
    return await asyncio.get_running_loop().run_in_executor(None, command.function)


__all__ = [
    "Block",
    "Connect",
    "Exchange",
    "Flow",
    "HangUp",
    "Link",
    "connect",
    "hang_up",
    "next_reply",
    "request",
    "run_blocking",
    "run_on_loop",
]
