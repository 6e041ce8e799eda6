"""Backpressure for both WebSocket protocols: messages that cannot be handled yet wait in order while the socket pauses.

A client that does not read its replies, or sends faster than its sessions step, must not make the server buffer more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from .sockets import Socket

logger = logging.getLogger(__name__)


class Oversize(NamedTuple):
    """Takes the place of a message that was over the limit, so that its refusal keeps its order."""

    size: int


class ReadAhead(NamedTuple):
    """How much may wait before the socket is paused."""

    messages: int = 0
    size: int = 0  # in bytes


NO_READ_AHEAD: Final = ReadAhead()


class LoopTurns:
    """Lets the connections of one event loop take turns with long messages: one per pass of the loop.

    A loop writes at the end of a pass. If one pass handled ten batches of a thousand steps, their clients would get all
    answers after the last batch and idle until then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def take(self) -> bool:
        """Take this pass, unless another connection has it or waits for it."""
        if self._is_taken:
            return False
        self._is_taken = True
        self._loop.call_soon(self._pass_on)
        return True

    def wait(self, action: Callable[[], None]) -> None:
        """Call `action` in a later pass, in order; only after `take` returned False."""
        self._waiting.append(action)

    def _pass_on(self) -> None:
        if not self._waiting:
            self._is_taken = False
            return
        self._loop.call_soon(self._pass_on)
        try:
            self._waiting.popleft()()
        except Exception:
            logger.exception("a message could not be handled in its turn")


@dataclass(slots=True, eq=False)
class UnpackingJob:
    """A message to unpack, and the receiver of its content or error."""

    unpack: Callable[[], bytes]
    done: Callable[[asyncio.Future[bytes]], None]


class LoopUnpacker:
    """Unpacks the large compressed messages of one event loop in a thread.

    One at a time: the content of each may have the largest size, so many at once would multiply the memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: deque[UnpackingJob] = deque()  # the first one runs

    def start(self, job: UnpackingJob) -> None:
        """Unpack a message after those before it."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._run_first()

    def drop(self, job: UnpackingJob) -> None:
        """Forget a job: its client is gone. One that runs ends, and nobody gets its content."""
        job.done = _ignore
        if job in self._jobs and job is not self._jobs[0]:
            self._jobs.remove(job)

    def _run_first(self) -> None:
        self._loop.run_in_executor(None, self._jobs[0].unpack).add_done_callback(self._end_first)

    def _end_first(self, future: asyncio.Future[bytes]) -> None:
        try:
            self._jobs[0].done(future)
        finally:
            self._jobs.popleft()
            if self._jobs:
                self._run_first()


def _ignore(future: asyncio.Future[bytes]) -> None:
    future.exception()  # or asyncio logs that nobody has taken it


class Backpressure:
    """The queue between a socket and the handler of its messages.

        message ---- is_open ----> handled at once
           |
           | busy, replies not read, or messages before it
           v
        [queue] ---- over `ahead` ----> socket paused
           |  ^                           |
           |  +--- at half of `ahead` ----+   reads again
           v
        handled by `resume`, in order, as far as there is room

    Protocol v1 reads ahead (128 messages) to notice a client that goes away during a step; protocol v2 handles requests
    side by side, so it queues nothing while it reads (`ahead=0`) and pauses itself at its limit of running requests.

    Args:
        socket: The source of the messages.
        handle: Handles one message: its payload, and whether it was binary.
        is_busy: Whether the handler can take no more messages now.
        ahead: How much may wait before the socket is paused.
        is_long: Whether a message is so much work that it must wait for a turn (`LoopTurns`).
        turns: The turns of the loop; required with `is_long`.
    """

    def __init__(
        self,
        socket: Socket,
        handle: Callable[[bytes | Oversize, bool], None],
        is_busy: Callable[[], bool],
        *,
        ahead: ReadAhead = NO_READ_AHEAD,
        is_long: Callable[[bytes], bool] | None = None,
        turns: LoopTurns | None = None,
    ) -> None:
        self._socket = socket
        self._handle = handle
        self._is_busy = is_busy
        self._ahead, self._ahead_bytes = ahead
        self._is_long = is_long
        self._turns = turns
        self._queue: deque[tuple[bytes | Oversize, bool]] = deque()
        self._queued_bytes = 0
        self._waits_for_turn = False
        self._is_draining = False
        self.is_paused = False
        self.is_open = True  # nothing is queued and the socket reads

    def receive(self, payload: bytes, binary: bool) -> None:
        """Handle a message, or queue it behind those before it."""
        if not self.is_open or self._socket.is_full:
            self.hold(payload, binary)
        elif self._is_long is not None and self._is_long(payload) and not self._take_turn():
            self._queue.append((payload, binary))
            self._queued_bytes += len(payload)
            self.is_open = False
        else:
            self._handle(payload, binary)

    def hold(self, message: bytes | Oversize, binary: bool) -> None:
        """Queue a message; too many pause the socket, which may have read some more by then."""
        self._queue.append((message, binary))
        self._queued_bytes += len(message)
        self.is_open = False
        if len(self._queue) >= self._ahead or self._queued_bytes >= self._ahead_bytes:
            self.pause()

    def pause(self) -> None:
        """Read no more for now."""
        if not self.is_paused:
            self.is_paused = True
            self.is_open = False
            self._socket.pause()

    def resume(self) -> None:
        """Handle queued messages while there is room, and read again once few are left."""
        # A message handled below may be answered at once and lead back here; the loop further up the stack goes on.
        if self._is_draining or self._waits_for_turn:
            return
        self._drain()
        is_low = len(self._queue) <= self._ahead // 2 and self._queued_bytes <= self._ahead_bytes // 2
        if self.is_paused and is_low and (self._ahead or not self._is_busy()):
            self.is_paused = False
            self._socket.resume()
        self.is_open = not (self.is_paused or self._queue)

    def drop(self) -> None:
        """Drop the queue: the client is gone, or the server shuts down."""
        self._queue.clear()
        self._queued_bytes = 0

    def _drain(self) -> None:
        self._is_draining = True
        try:
            while self._queue and not (self._is_busy() or self._socket.is_full):
                message, binary = self._queue.popleft()
                self._queued_bytes -= len(message)
                self._handle(message, binary)
        finally:
            self._is_draining = False

    def _take_turn(self) -> bool:
        assert self._turns is not None
        if self._turns.take():
            return True
        self._waits_for_turn = True
        self._turns.wait(self._start_turn)
        return False

    def _start_turn(self) -> None:
        self._waits_for_turn = False
        self._drain()
        if self._queue:
            self.pause()
        self.resume()  # the handled messages may have paused the socket and be finished already
