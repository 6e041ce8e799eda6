"""One event loop in a thread of its own, for coroutines that synchronous code has to wait for.

Shared by every environment of the process, so that no call pays for a thread or a loop. Knows asyncio only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastmcp import FastMCP
from fastmcp.tools.function_tool import FunctionTool

T = TypeVar("T")


class BackgroundLoop:
    """An event loop that starts when it is first needed. A forked child starts its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread, where waiting for it would never end."""
        return self._thread is threading.current_thread()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            RuntimeError: Called on the loop itself.
        """
        if self.is_current:
            work.close()
            raise RuntimeError("synchronous code on the tool loop cannot wait for it; use the async method")
        return self.submit(work).result()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function on the loop."""
        self._running().call_soon_threadsafe(function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call a function on the loop after a while; only for code that runs there."""
        self._running().call_later(delay_s, function)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


TOOL_LOOP = BackgroundLoop("openenv-tools")


# threads: Threads for blocking functions that a coroutine waits for, and may stop waiting for.
#
# Kept and used again; daemons, so that a function which never returns keeps neither its caller nor the process. Knows
# callables only.


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


# interrupt: Stopping a function that runs in another thread.
#
# Python can raise an exception inside a thread; it arrives at the thread's next bytecode. Code that loops or sleeps in
# short naps stops at once; one long wait inside C ends when it ends. Knows threads only.


class Interrupted(BaseException):
    """Raised inside a function that was stopped. No `Exception`: the function must not take it for its own."""


class Interruptible:
    """Runs one function in the calling thread; `stop` ends it from another."""

    def __init__(self) -> None:
        # Re-entrant: an interruption may arrive between taking the lock and using it.
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._stopped = False
        self._raised = False

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called; a function that turns the interruption into another error was stopped too."""
        return self._stopped

    def run(self, function: Callable[[], T]) -> T:
        """Call the function.

        Raises:
            Interrupted: It was stopped, before or while it ran.
        """
        with self._lock:
            if self._stopped:
                raise Interrupted
            self._thread = threading.get_ident()
        try:
            return function()
        finally:
            self._leave()

    def stop(self) -> None:
        """End the function if it runs, or keep it from beginning; one that has ended is left alone."""
        with self._lock:
            self._stopped = True
            if self._thread is not None and not self._raised:
                self._raised = True
                _raise_in(self._thread, Interrupted)

    def _leave(self) -> None:
        """Make sure that nothing arrives once the function is over."""
        while True:
            with contextlib.suppress(Interrupted):
                with self._lock:
                    if self._thread is not None and self._raised:
                        _raise_in(self._thread, None)  # withdrawn, if it has not arrived yet
                    self._thread = None
                return


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    argument = ctypes.py_object(exception) if exception is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


# cancellable: Synchronous tools that FastMCP itself calls, made such that a cancelled call ends them.
#
# FastMCP waits for the thread of a synchronous function whatever happens to the call. A coroutine in its place, of the
# same signature, lets go at once and interrupts the function. Knows FastMCP's tools; must not know environments.


_MARK = "__openenv_blocking__"


def make_cancellable(server: Any) -> None:
    """Replace the synchronous functions behind a server's tools, those of servers mounted in it included."""
    for tool in _function_tools(server, set()):
        if getattr(tool, "run_in_thread", True):  # else it asks for the loop's own thread
            tool.fn = cancellable(tool.fn)


def cancellable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function that does the same in a thread; asynchronous functions stay as they are."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return function

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        running = Interruptible()
        try:
            value = await TOOL_THREADS.run(lambda: running.run(lambda: _completed(function(*args, **kwargs))))
        except Interrupted:
            raise RuntimeError("the tool was interrupted") from None
        except BaseException:
            running.stop()
            raise
        return await value if inspect.isawaitable(value) else value

    setattr(call, _MARK, function)
    return call


def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `cancellable` was given; any other is returned as it is."""
    original: Callable[..., Any] = getattr(function, _MARK, function)
    return original


def _completed(value: Any) -> Any:
    """A generator's body is part of the call."""
    return list(value) if inspect.isgenerator(value) else value


def _function_tools(server: Any, seen: set[int]) -> Iterator[FunctionTool]:
    if id(server) in seen:
        return
    seen.add(id(server))
    for provider in server.providers:
        while (inner := getattr(provider, "_inner", None)) is not None:  # a mount under a prefix
            provider = inner
        mounted = getattr(provider, "server", None)
        if isinstance(mounted, FastMCP):
            yield from _function_tools(mounted, seen)
        for component in list(getattr(provider, "_components", {}).values()):
            yield from _of(component)


def _of(component: Any) -> Iterator[FunctionTool]:
    """The function behind a tool, also behind those that were made from another tool."""
    while component is not None:
        if isinstance(component, FunctionTool):
            yield component
        component = getattr(component, "parent_tool", None)


# watchdog: Deadlines of calls that run in threads, watched from the tool loop.
#
# Setting and lifting one costs a dictionary entry; the loop looks at them a few times a second, and not at all while
# there are none. Knows callbacks only.


logger = logging.getLogger(__name__)

PERIOD_S = 0.05
_PATIENCE = 40  # looks at nothing before it stops looking


class Watchdog:
    """Calls back when time is up."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self._loop = loop
        self._watched: dict[object, tuple[float, Callable[[], None]]] = {}
        self._looking = False
        self._idle = 0
        self._pid = os.getpid()

    @contextmanager
    def limit(self, seconds: float, on_late: Callable[[], None]) -> Iterator[None]:
        """Call `on_late` on the tool loop if the block takes longer."""
        if self._pid != os.getpid():  # a forked child: nobody looks there, and what the parent runs is not its own
            self._pid, self._looking = os.getpid(), False
            self._watched.clear()
        key = object()
        self._watched[key] = (time.monotonic() + seconds, on_late)
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)
        try:
            yield
        finally:
            self._watched.pop(key, None)

    def _look(self) -> None:
        now = time.monotonic()
        for key, (deadline, on_late) in list(self._watched.items()):
            if deadline <= now and self._watched.pop(key, None) is not None:
                self._tell(on_late)
        self._idle = 0 if self._watched else self._idle + 1
        if self._idle > _PATIENCE:
            self._looking = False
            if not self._watched:  # one that came just now may have seen us looking
                return
            self._looking = True
        self._loop.call_later(PERIOD_S, self._look)

    @staticmethod
    def _tell(on_late: Callable[[], None]) -> None:
        try:
            on_late()
        except Exception:  # the other deadlines must be kept all the same
            logger.exception("a call whose time is up could not be stopped")


WATCHDOG = Watchdog(TOOL_LOOP)
