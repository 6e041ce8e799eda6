"""Threads for blocking functions that a coroutine waits for, and may stop waiting for.

Kept and used again; daemons, so that a function which never returns keeps neither its caller nor the process. Knows
callables only.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_IDLE = 8


@dataclass(frozen=True, slots=True)
class _Work:
    function: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class DaemonThreads:
    """Runs each function in a thread that nothing else runs in at that time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[_Work]] = []
        self._pid = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function with this task's context variables; a cancelled wait leaves it running."""
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._pid, self._idle = os.getpid(), []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put(_Work(function, contextvars.copy_context(), loop, future))
        return await future

    def _serve(self, inbox: queue.SimpleQueue[_Work]) -> None:
        while True:
            work = inbox.get()
            value: Any = None
            error: BaseException | None = None
            try:
                value = work.context.run(work.function)
            except BaseException as exc:
                error = exc
            stays = len(self._idle) < _MOST_IDLE
            if stays:
                self._idle.append(inbox)
            _tell(work, value, error)
            del work, value, error
            if not stays:
                return


def _tell(work: _Work, value: Any, error: BaseException | None) -> None:
    try:
        work.loop.call_soon_threadsafe(_settle, work.future, value, error)
    except RuntimeError:  # the loop was closed; nobody waits any more
        return


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # which a future does not take
        error = RuntimeError(f"StopIteration: {error}")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


TOOL_THREADS = DaemonThreads("openenv-tool")
