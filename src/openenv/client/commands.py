"""What flows ask for, and the two drivers that carry it out, blocking or awaiting.

A flow is a generator that yields commands (connect, exchange, hang up, pause, call something slow) and gets the outcome
sent back. It decides what a failure means; a driver only does the work. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """Try once to open a connection, within that many seconds if they are fewer than the client allows."""

    limit_s: float | None = None


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
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Block:
    """Call something that may take long."""

    function: Callable[[], Any]


class Unasked(Exception):
    """A message was there before anything was asked; nothing has been sent."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("a message came before the request")
        self.payload = payload


Command = Connect | Exchange | HangUp | Pause | Block
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
    if isinstance(command, Exchange):
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


async def _await(command: Connect | HangUp | Pause | Block, transport: LoopTransport) -> Any:
    if isinstance(command, Connect):
        return await transport.open(command.limit_s)
    if isinstance(command, HangUp):
        return await transport.close(command.farewell)
    if isinstance(command, Pause):
        return await asyncio.sleep(command.seconds)
    return await asyncio.get_running_loop().run_in_executor(None, command.function)
