"""Runs a client's flows, blocking or on an event loop, one at a time; keeps blocking clients' connections alive.

The first use decides which; the other way then raises `ClientModeError`. Knows connections and flows; must not know
payloads.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from openenv.errors import ClientModeError, ProtocolError
from openenv.protocol.backoff import Backoff
from openenv.protocol.client_sessions import SUBPROTOCOL_JSON, ClientSession, ResumableSession
from openenv.protocol.redaction import redacted

from .flows import Command, Connect, Flow, HangUp, Pause, RunFlows, SendAndReceive
from .network import ConnectionOptions, parse_ws_url
from .websocket import AsyncConnection, BlockingConnection, WebSocket

P = ParamSpec("P")
T = TypeVar("T")

_ELSEWHERE = "opened in another process"
_IN_BLOCKING_USE = "This client is in blocking use; make another one, or new_session(), to await"


class Driver:
    """The connection of one client, and the loop that runs its flows.

        undecided --- run() or claim_blocking() without a running loop ---> blocking, for good
            |  ^
            |  +-- the loop was closed: the connection is gone with it, another loop may come
            |
            +--- run() inside a running loop ---> on that loop

    A forked process leaves the connection to its parent, and the lock, which a thread of the parent may hold.

    Args:
        options: How to connect.
        url: The WebSocket URL; may be set later, before it is needed.
        backoff: The pauses between attempts to resume a session after its connection is lost.
        resume_token: Names a session that exists.
        wait_s: How long to wait in the server's queue for a session; None for not at all.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        url: str,
        *,
        backoff: Backoff,
        resume_token: str | None = None,
        wait_s: float | None = None,
    ) -> None:
        # A v1 session until a connection says which protocol the server speaks; a token exists in v2 only.
        self.session: ClientSession | ResumableSession = (
            ClientSession() if resume_token is None else ResumableSession(resume_token)
        )
        self.backoff = backoff
        self.wait_s = wait_s
        self.has_connected = False
        self.url = url
        self.options = options
        self._pid = os.getpid()
        self._connection: BlockingConnection | AsyncConnection | None = None
        self._forget_connection()
        self._is_blocking = False
        self._blocks_loops = False
        self._thread_lock = ProcessLock()
        self._lock = self._thread_lock.here()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock: asyncio.Lock | None = None
        # For coroutines that a blocking client calls; see `run_helper`.
        self._private_loop: asyncio.AbstractEventLoop | None = None
        self._end_private_loop: weakref.finalize[[asyncio.AbstractEventLoop, int], Driver] | None = None
        self._release: weakref.finalize[[Any, int], Driver] | None = None

    # -- for flows ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self.websocket.lost is None

    def adopt_protocol(self) -> None:
        """Switch to the protocol that a new connection speaks; a lost episode stays lost in either.

        Raises:
            ProtocolError: It is not the one that the client requires.
        """
        session, lost = self.session, self.session.lost_reason
        if self.websocket.subprotocol == SUBPROTOCOL_JSON:
            if isinstance(session, ClientSession):
                self.session = ResumableSession(lost_reason=lost)
            else:
                session.is_attached = False
            return
        if isinstance(session, ResumableSession):  # the server was replaced by one that speaks v1 only
            if session.token is not None:
                session.lose("the server does not speak protocol v2")
            self.session = ClientSession()
            if session.lost_reason is not None:
                self.session.lose(session.lost_reason)
        if self.options.protocol == "v2":
            shown = redacted(self.url)
            raise ProtocolError(f"The server at {shown} does not speak protocol v2; protocol='auto' allows v1")

    @property
    def status(self) -> str:
        """The state of connection and session in a few words."""
        if self._pid != os.getpid() and self._connection is not None:
            return _ELSEWHERE
        if self.is_open:
            return "connected"
        if isinstance(self.session, ResumableSession) and self.session.token is not None:
            return "not connected, to be resumed"
        lost = self.session.lost_reason or (self.websocket.lost if self.has_connected else None)
        return "not connected" if lost is None else f"lost: {lost}"

    # -- which process, which loop --------------------------------------------------------------------------------

    def _leave_stale(self) -> None:
        """Leave a loop that has ended and, in a forked process, the connection to the one that opened it."""
        if self._pid != os.getpid():
            with self._thread_lock.here():
                if self._pid != os.getpid():  # another thread of the fork may have been here first
                    self._leave_to_parent()
        if self._loop is not None and self._loop.is_closed():
            self._leave_loop()

    def _leave_to_parent(self) -> None:
        connection = self._connection
        self._forget_connection()
        # A v2 session is the parent's even without a connection: it has the token and may be about to resume.
        if connection is not None or isinstance(self.session, ResumableSession):
            self.session.lose(_ELSEWHERE)
        if isinstance(connection, BlockingConnection):
            connection.drop(_ELSEWHERE)
        if self._release is not None:
            self._release.detach()
        self._release = self._loop = self._loop_lock = None
        self.drop_loop()
        self._lock = self._thread_lock.here()
        self._pid = os.getpid()

    def _leave_loop(self) -> None:
        """Give up the connection, which is gone with its loop; another loop may use this client now."""
        self._loop = self._loop_lock = None
        if self._connection is not None:
            if isinstance(self.session, ResumableSession):
                self.session.is_attached = False  # the session outlives its connection
            else:
                self.session.lose("its event loop was closed")
            self._forget_connection()

    # -- which way ------------------------------------------------------------------------------------------------

    @property
    def is_blocking(self) -> bool:
        """Whether this client blocks: it was claimed so, or nothing has been decided and no loop runs here."""
        self._leave_stale()
        return self._is_blocking or (self._loop is None and _running_loop() is None)

    def claim_blocking(self, *, on_loops: bool = False) -> None:
        """Decide for blocking use.

        Args:
            on_loops: Block also while a loop runs here: in a notebook one always does.

        Raises:
            ClientModeError: The client is used asynchronously.
        """
        self._leave_stale()
        if self._loop is not None:
            raise ClientModeError("This client is in asynchronous use; make another one, or new_session(), to block")
        self._is_blocking = True
        self._blocks_loops = self._blocks_loops or on_loops

    def run(self, flow: Flow[T], name: str) -> Coroutine[Any, Any, T]:
        """Run a flow: return a coroutine of that name on a running loop, the result otherwise."""
        running = _running_loop()
        if running is not None and not self._is_blocking:
            return named(self.run_on_loop(flow), name)
        self.claim_blocking()
        if running is None or running is self._private_loop:
            return self.awaitable(self.run_blocking(flow))
        if self._blocks_loops:
            return cast("Coroutine[Any, Any, T]", self.run_blocking(flow))
        flow.close()
        raise ClientModeError(_IN_BLOCKING_USE)

    def awaitable(self, value: T) -> Coroutine[Any, Any, T]:
        """Return a value so that the asynchronous helpers of a blocking client can await it.

        Typed as the result of the asynchronous call; `sync()` has exact types for blocking code.
        """
        return cast("Coroutine[Any, Any, T]", value if _running_loop() is None else Ready(value))

    # The two loops below are the same program; each command is one of `flows`. A failure is thrown into the flow
    # outside of the handler that caught it, so that an error raised by the flow has no __context__. No variable keeps
    # it: traceback and frame would refer to each other and keep the client alive until the garbage collector runs.

    def run_blocking(self, flow: Flow[T]) -> T:
        """Run a flow in this thread; calls from several threads take turns."""
        self._leave_stale()
        with self._lock:
            failure: BaseException | None = None
            try:
                command = next(flow)
                while True:
                    try:
                        if type(command) is SendAndReceive:
                            connection = self._connection
                            assert isinstance(connection, BlockingConnection)
                            outcome: Any = connection.exchange(command.payload, command.timeout_s)
                        else:
                            outcome = self._do(command)
                    except BaseException as exc:
                        failure = exc
                    command, failure = (flow.send(outcome) if failure is None else flow.throw(failure)), None
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                failure = None

    async def run_on_loop(self, flow: Flow[T]) -> T:
        """Run a flow on the running loop; concurrent calls take turns."""
        self._leave_stale()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        lock = self._loop_lock
        assert lock is not None
        await lock.acquire()  # not `async with`, which costs two more coroutines per step
        failure: BaseException | None = None
        try:
            command = next(flow)
            while True:
                try:
                    if type(command) is SendAndReceive:
                        connection = self._connection
                        assert isinstance(connection, AsyncConnection)
                        outcome: Any = await connection.exchange(command.payload, command.timeout_s)
                    else:
                        outcome = await self._do_on_loop(command)
                except BaseException as exc:
                    failure = exc
                command, failure = (flow.send(outcome) if failure is None else flow.throw(failure)), None
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            failure = None
            lock.release()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin use on a loop."""
        if self._is_blocking:
            raise ClientModeError(_IN_BLOCKING_USE)
        if self._loop is not None:
            raise ClientModeError("This client is in use on another event loop that is still open")
        self._loop = loop
        self._loop_lock = asyncio.Lock()

    # -- commands -------------------------------------------------------------------------------------------------

    def _do(self, command: Command) -> Any:
        if isinstance(command, Connect):
            blocking = BlockingConnection(parse_ws_url(self.url), self.options)
            blocking.open(command.limit_s)
            self._keep(blocking)
            if blocking.websocket.subprotocol is not None:
                # Its session would outlive a client that was garbage collected, and the program.
                self._release = weakref.finalize(self, _release_blocking, blocking, os.getpid())
            if self.options.ping_interval_s is not None:
                KEEPALIVE.add(self)
            return None
        if isinstance(command, HangUp):
            KEEPALIVE.discard(self)
            assert isinstance(self._connection, BlockingConnection)
            self._connection.close(command.last_message)
            self.drop_loop()
            return None
        if isinstance(command, Pause):
            return time.sleep(command.seconds)
        assert not isinstance(command, SendAndReceive)
        if isinstance(command, RunFlows):
            for driver, flow in command.flows:
                driver.claim_blocking(on_loops=self._blocks_loops)
                driver.run_blocking(flow)
            return None
        return command.function()

    async def _do_on_loop(self, command: Command) -> Any:
        if isinstance(command, Connect):
            connection = AsyncConnection(parse_ws_url(self.url), self.options)
            await connection.open(command.limit_s)
            self._keep(connection)
            # The loop knows the connection, so it would outlive a client that was garbage collected.
            self._release = weakref.finalize(self, _release_on_loop, connection, os.getpid())
            self._release.atexit = False  # the loop is gone by then
            return None
        if isinstance(command, HangUp):
            assert isinstance(self._connection, AsyncConnection)
            return self._connection.close(command.last_message)
        if isinstance(command, Pause):
            return await asyncio.sleep(command.seconds)
        assert not isinstance(command, SendAndReceive)
        if isinstance(command, RunFlows):
            return await asyncio.gather(*(driver.run_on_loop(flow) for driver, flow in command.flows))
        return await asyncio.get_running_loop().run_in_executor(None, command.function)

    def _keep(self, connection: BlockingConnection | AsyncConnection) -> None:
        self._connection, self.websocket = connection, connection.websocket
        if self._release is not None:
            self._release.detach()
            self._release = None

    def _forget_connection(self) -> None:
        self._connection = None
        # Flows read the protocol's state of the connection, or of the last one; this is that of none.
        self.websocket = WebSocket(self.options)
        self.websocket.lose("connection closed")

    def keep_alive(self) -> None:
        """Answer pings while no request runs; called by the keepalive thread."""
        lock = self._thread_lock.here()
        if self._pid == os.getpid() and lock.acquire(blocking=False):
            try:
                if isinstance(self._connection, BlockingConnection):
                    self._connection.keep_alive()
                    if not self._connection.is_open:
                        KEEPALIVE.discard(self)
            finally:
                lock.release()

    # -- coroutines of blocking clients ---------------------------------------------------------------------------

    def run_helper(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of a blocking client, plain or not, as if no loop ran here: in a notebook one does.

        A coroutine runs to its end in this thread, on a private loop.
        """
        current = _running_loop()
        asyncio._set_running_loop(None)
        try:
            outcome: Any = function(*args, **kwargs)
            if inspect.iscoroutine(outcome):
                outcome = self._run_on_private_loop(outcome)
        finally:
            asyncio._set_running_loop(current)
        result: T = outcome
        return result

    def _run_on_private_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._leave_stale()
        loop = self._private_loop
        if loop is None or loop.is_closed():
            loop = self._private_loop = asyncio.new_event_loop()
            self._end_private_loop = weakref.finalize(self, _close_loop, loop, os.getpid())
        try:
            return loop.run_until_complete(coroutine)
        finally:
            if not self.is_open:  # the coroutine may have closed the client, but not the loop under itself
                self.drop_loop()

    def drop_loop(self) -> None:
        """Close the private loop, unless it is running: then it is closed when it stops."""
        loop = self._private_loop
        if loop is not None and self._end_private_loop is not None and not loop.is_running():
            self._private_loop = None
            self._end_private_loop()


class Ready(Generic[T]):
    """A value that may be awaited, for asynchronous helper methods that run on a blocking client."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        """Return the value without waiting."""
        return self._value
        yield


def named(work: Coroutine[Any, Any, T], name: str) -> Coroutine[Any, Any, T]:
    """Rename a coroutine to the called method, for Python's warning when it is never awaited."""
    coroutine: Any = work  # its type does not say that it has a name
    coroutine.__qualname__ = name
    return work


def run_async_safely(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result, also when a loop already runs in this thread."""
    if _running_loop() is None:
        return asyncio.run(coro)
    with ThreadPoolExecutor(1, thread_name_prefix="openenv-run-async") as pool:
        return pool.submit(asyncio.run, coro).result()


def _release_on_loop(connection: AsyncConnection, pid: int) -> None:
    loop = connection.loop
    if pid == os.getpid() and connection.is_open and not loop.is_closed():
        loop.call_soon_threadsafe(connection.close, None, "dropped by the client")


def _release_blocking(connection: BlockingConnection, pid: int) -> None:
    if pid == os.getpid():
        connection.release("dropped by the client")


def _close_loop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close a loop that the process `pid` has made; in a fork of that process, leave the parent's loop as it is."""
    if loop.is_running() or loop.is_closed():
        return
    if pid != os.getpid():
        shared: Any = loop
        if not hasattr(shared, "_selector"):
            return
        # Both processes share one selector: unregistering here would unregister there. So close only our copy of it.
        shared._selector.close()
        shared._selector = selectors.SelectSelector()
    loop.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    return asyncio._get_running_loop()


# -- keeping blocking clients alive ---------------------------------------------------------------------------------
#
# A trainer may compute for minutes between two steps. Its server would take it for dead: nothing reads the socket, so
# no ping is answered. One thread of the process does it for all blocking clients.


class ProcessLock:
    """A lock for each process: one that was held at the moment of a fork would never be released in the child."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.Lock()}

    def here(self) -> threading.Lock:
        """Return the lock of this process, the same one to all its threads."""
        pid = os.getpid()
        lock = self._locks.get(pid)
        return lock if lock is not None else self._locks.setdefault(pid, threading.Lock())


class KeptAlive(Protocol):
    """A blocking client: `EnvClient`'s driver, or a `VectorEnv`."""

    def keep_alive(self) -> None:
        """Answer the server's pings; must not block."""
        ...


class KeepaliveThread:
    """Keeps connections alive; its thread lives as long as there are any."""

    def __init__(self, period_s: float = 5.0) -> None:
        self._period_s = period_s
        self._lock = ProcessLock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._clients: weakref.WeakSet[KeptAlive] = weakref.WeakSet()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def _leave_stale(self) -> None:
        """Start over in a forked process, which has neither the thread nor the connections; the lock is held."""
        if self._pid != os.getpid():
            self._begin()

    def add(self, client: KeptAlive) -> None:
        """Keep a client's connections alive from now on."""
        with self._lock.here():
            self._leave_stale()
            self._clients.add(client)
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="openenv-client-keepalive", daemon=True)
                self._thread.start()

    def discard(self, client: KeptAlive) -> None:
        """Stop doing so."""
        with self._lock.here():
            self._leave_stale()
            self._clients.discard(client)
            if not self._clients:
                self._wake.set()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(self._period_s)
            with self._lock.here():
                self._wake.clear()
                clients = list(self._clients)
                if not clients:
                    self._thread = None
                    return
            if not woken:
                while clients:  # emptied, so that none is kept alive while this thread sleeps
                    clients.pop().keep_alive()
            del clients


KEEPALIVE = KeepaliveThread()
