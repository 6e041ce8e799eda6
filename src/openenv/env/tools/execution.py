"""Running tools under limits: the tool loop, tool threads, interruption, deadlines, and cancellable FastMCP tools.

Knows threads, event loops and FastMCP's function tools; must not know environments or which tools there are.
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

logger = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 0.05
_IDLE_LOOKS = 40  # of the watchdog, with no deadline to watch, before it stops
_MAX_IDLE_THREADS = 8
_ORIGINAL = "__openenv_blocking__"


class BackgroundLoop:
    """An event loop in a separate thread, for coroutines that synchronous code waits for.

    It starts at its first use. All environments of a process share one, so that no call pays for a thread or a loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread, where waiting for the loop would never end."""
        return self._thread is threading.current_thread()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            RuntimeError: The caller is on the loop itself.
        """
        if self.is_current:
            work.close()
            raise RuntimeError("synchronous code on the tool loop cannot wait for it; use the async method")
        return self.submit(work).result()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function on the loop, without the caller's context variables: they may hold an environment."""
        self._running().call_soon_threadsafe(function, context=contextvars.Context())

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call a function on the loop after a delay; only for code that runs there."""
        self._running().call_later(delay_s, function)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


TOOL_LOOP = BackgroundLoop("openenv-tools")


# -- threads ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    function: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Set the result, on the waiting coroutine's loop."""
        if self.future.done():
            return
        if isinstance(error, StopIteration):  # a future refuses to raise it
            error = RuntimeError(f"StopIteration: {error}")
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class DaemonThreads:
    """Runs each function in a thread that runs nothing else at that time; threads are reused.

    An executor of `concurrent.futures` would not do: its threads are joined when the process ends, so a function that
    never returns would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[_Work]] = []
        self._pid = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function with this task's context variables; if the wait is cancelled, the function goes on."""
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
            # Idle again before the result is delivered: the next call of the waiting coroutine reuses this thread.
            stays = len(self._idle) < _MAX_IDLE_THREADS
            if stays:
                self._idle.append(inbox)
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its coroutines with it
                work.loop.call_soon_threadsafe(work.settle, value, error)
            del work, value, error  # an idle thread must not keep results or tracebacks alive
            if not stays:
                return


TOOL_THREADS = DaemonThreads("openenv-tool")


# -- interruption -----------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Raised inside a function that `Interruptible.stop` ends.

    No `Exception`: a tool's own `except Exception` must not swallow it.
    """


class Interruptible:
    """Runs one function in the calling thread; `stop` ends it from another thread.

    CPython can raise an exception in another thread (`PyThreadState_SetAsyncExc`). It arrives at that thread's next
    bytecode: code that loops or sleeps in short naps stops at once, one long wait inside C stops when it returns.

        NEW ----- run ----> RUNNING -- returns or raises --> OVER     `stop` has no effect on OVER
         | stop                | stop: raise Interrupted in the thread
         v                     v
        STOPPED: run raises   the function ends with Interrupted, or with another outcome (`is_stopped`)

    The hard part is the border between RUNNING and OVER: an exception that was requested just before the function
    returned may arrive after it, in code that is not part of the call. `_leave` withdraws it, and swallows one that
    arrives meanwhile.
    """

    def __init__(self) -> None:
        # Re-entrant: the exception may arrive in this very thread between taking the lock and using it.
        self._lock = threading.RLock()
        self._thread: int | None = None  # set while RUNNING
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
        """End the function if it runs, or keep it from starting."""
        with self._lock:
            self._stopped = True
            if self._thread is not None and not self._raised:
                self._raised = True
                _raise_in(self._thread, Interrupted)

    def _leave(self) -> None:
        """Make sure that no interruption arrives after the function."""
        while True:
            with contextlib.suppress(Interrupted):
                with self._lock:
                    if self._thread is not None and self._raised:
                        _raise_in(self._thread, None)  # withdraws one that has not arrived yet
                    self._thread = None
                return


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    argument = ctypes.py_object(exception) if exception is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


# -- deadlines --------------------------------------------------------------------------------------------------------


class Watchdog:
    """Calls back when a call in a thread passes its deadline.

    A timer per call would wake the tool loop for each call. Here a call only adds and removes a dictionary entry; the
    loop looks at all deadlines every `PERIOD_S`, and stops looking after two seconds without any.
    """

    def __init__(self, loop: BackgroundLoop) -> None:
        self._loop = loop
        self._deadlines: dict[object, tuple[float, Callable[[], None]]] = {}
        self._looking = False
        self._idle = 0
        self._pid = os.getpid()

    @contextmanager
    def limit(self, seconds: float, on_late: Callable[[], None]) -> Iterator[None]:
        """Call `on_late` on the tool loop if the block takes longer."""
        if self._pid != os.getpid():  # a forked child: its loop does not look yet, and the calls are its parent's
            self._pid, self._looking = os.getpid(), False
            self._deadlines.clear()
        key = object()
        self._deadlines[key] = (time.monotonic() + seconds, on_late)
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)
        try:
            yield
        finally:
            self._deadlines.pop(key, None)

    def _look(self) -> None:
        now = time.monotonic()
        for key, (deadline, on_late) in list(self._deadlines.items()):
            if deadline <= now and self._deadlines.pop(key, None) is not None:
                try:
                    on_late()
                except Exception:  # one failure must not keep the other deadlines from being watched
                    logger.exception("a call that passed its deadline could not be stopped")
        self._idle = 0 if self._deadlines else self._idle + 1
        if self._idle > _IDLE_LOOKS:
            self._looking = False
            if not self._deadlines:
                return
            self._looking = True  # an entry added just now may have seen `_looking` still set
        self._loop.call_later(PERIOD_S, self._look)


WATCHDOG = Watchdog(TOOL_LOOP)


# -- FastMCP's own calls ----------------------------------------------------------------------------------------------


def make_cancellable(server: FastMCP[Any]) -> None:
    """Replace the synchronous functions behind the tools of a server and of the servers mounted in it.

    FastMCP waits for the thread of a synchronous function even if its call is cancelled.
    """
    for tool in _components(server, set()):
        # Without `run_in_thread` a tool asks for the loop's own thread.
        if isinstance(tool, FunctionTool) and getattr(tool, "run_in_thread", True):
            tool.fn = cancellable(tool.fn)


def cancellable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function of the same signature that runs the function in a thread.

    Cancelling it returns at once and interrupts the function. Asynchronous functions are returned unchanged.
    """
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return list(value) if inspect.isgenerator(value) else value  # a generator's body is part of the call

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        running = Interruptible()
        try:
            value = await TOOL_THREADS.run(lambda: running.run(lambda: run(*args, **kwargs)))
        except Interrupted:
            raise RuntimeError("the tool was interrupted") from None
        except BaseException:
            running.stop()
            raise
        return await value if inspect.isawaitable(value) else value

    setattr(call, _ORIGINAL, function)
    return call


def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Undo `cancellable`; any other function is returned unchanged."""
    original: Callable[..., Any] = getattr(function, _ORIGINAL, function)
    return original


def functions_of(server: FastMCP[Any]) -> list[Callable[..., Any]]:
    """Return the functions behind the tools, resources and prompts of a server and of those mounted in it."""
    functions = (getattr(component, "fn", None) for component in _components(server, set()))
    return [variant for function in functions if function is not None for variant in (function, blocking(function))]


def _components(server: FastMCP[Any], seen: set[int]) -> Iterator[Any]:
    if id(server) in seen:
        return
    seen.add(id(server))
    for provider in server.providers:
        while (inner := getattr(provider, "_inner", None)) is not None:  # a mount under a prefix
            provider = inner
        mounted = getattr(provider, "server", None)
        if isinstance(mounted, FastMCP):
            yield from _components(mounted, seen)
        for component in list(getattr(provider, "_components", {}).values()):
            while component is not None:  # a tool may be made from another one
                yield component
                component = vars(component).get("parent_tool")  # `getattr` of a model's missing field is slow
