"""A server in its own thread, with a loop for connections of agents: on TCP, and on a unix socket for sandboxes.

If all requests come from one event loop of this process, it runs on that loop instead (`on_this_loop`). Knows threads,
loops and sockets. A subclass answers the requests.
"""

# A caller's thread                     the server's thread
#
#   listen() -- start -----------------> _main: new loop, _listen: TCP, unix socket, on_listening
#      returns <----- started ---------- run_forever: every connection, call and coroutine of the server
#   run(work) -- the coroutine --------> on the loop; the caller waits for its result
#   schedule(work) --------------------> on the loop; nobody waits
#   run_here(work), from a loop -------> on the loop; the caller's loop goes on, and may be the same
#   stop() ----------------------------> _shut: close listeners, on_stop, close connections; the loop ends

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from openenv.errors import CaptureError

from .inbound import AgentConnections, AgentReply, AgentRequest, InboundLimits, LocalReply, RequestRefused

T = TypeVar("T")
log = logging.getLogger("openenv.rollout.capture")


class ProxyListener(ABC):
    """Listens in its own thread.

    Args:
        host: The address to listen on.
        port: 0 for a free one.
        limits: The limits of connections.
        sockets: The parent of the unix socket's folder; by default the system's folder for temporary files.
    """

    def __init__(self, host: str, port: int, limits: InboundLimits, sockets: Path | None = None) -> None:
        self._host = host
        self._port = port
        self._agents = AgentConnections(limits, is_known=self.is_known)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: threading.Thread | None = None  # runs the loop: `_thread`, or that of `on_this_loop`
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket_parent = sockets
        self._folder: Path | None = None

    # a subclass implements these

    @abstractmethod
    def is_known(self, key: str) -> bool:
        """Return whether requests with a key may be large."""

    @abstractmethod
    async def answer(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer a request that came on TCP."""

    @abstractmethod
    async def answer_sandbox(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer a request that came on the unix socket, from a sandbox."""

    @abstractmethod
    async def on_listening(self) -> None:
        """Start the tasks of the subclass; runs on the loop when the server listens."""

    @abstractmethod
    async def on_stop(self) -> None:
        """Release the resources of the subclass, before connections are closed."""

    # life

    def listen(self, timeout_s: float | None = None) -> None:
        """Start the thread, and return when it listens.

        Args:
            timeout_s: How long that may take; None for no limit.

        Raises:
            CaptureError: The server cannot listen there, or not in time.
        """
        self._require_stopped()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="openenv-capture", daemon=True)
        self._runner = self._thread
        self._thread.start()
        try:
            started.result(timeout_s)
        except concurrent.futures.TimeoutError:
            started.add_done_callback(self._stop_late)
            raise CaptureError(f"The capture proxy does not listen after {timeout_s:g} s.") from None
        except OSError as exc:
            self._thread.join()
            self._thread = self._runner = None
            raise CaptureError(f"The capture proxy cannot listen on {self._host}:{self._port}: {exc}") from exc

    def _stop_late(self, started: concurrent.futures.Future[None]) -> None:
        """Stop a server that started after the caller of `listen` gave up; runs in the server's thread."""
        if started.exception() is None:
            threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        """End and record all calls, and stop listening."""
        if self._thread is None or self._loop is None:
            return
        self.run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._thread = self._runner = None

    # On many cores, a change of threads costs more than most steps of a call: both threads want the interpreter lock,
    # and the kernel wakes another core. So callers with a loop of their own need no second thread.
    @contextlib.asynccontextmanager
    async def on_this_loop(self) -> AsyncIterator[Self]:
        """Answer requests of this process on the running loop: the server has no thread and no address.

        Raises:
            CaptureError: The server runs already.
        """
        self._require_stopped()
        self._loop, self._runner = asyncio.get_running_loop(), threading.current_thread()
        try:
            await self.on_listening()
            yield self
        finally:
            await self._shut()
            self._loop = self._runner = None

    def _require_stopped(self) -> None:
        if self._runner is not None:
            raise CaptureError("The capture server runs already.")

    @property
    def url(self) -> str:
        """Return the address on TCP, without `/v1`."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::", "") else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def port(self) -> int:
        """Return the TCP port."""
        return self._port

    @property
    def socket(self) -> Path:
        """Return the unix socket, which has the agents' routes only."""
        if self._folder is None:
            raise CaptureError("The capture server does not run.")
        return self._folder / SOCKET_NAME

    # the thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop from another thread, and wait for it."""
        if threading.current_thread() is self._runner:
            work.close()
            raise CaptureError("This would wait for itself: call it from another thread.")
        return self._submit(work).result()

    async def run_here(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop, and wait for it in the running loop, which may be the same."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            loop = self._running_loop()
        except CaptureError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._runner is None or self._loop is None or self._loop.is_closed():
            raise CaptureError("The capture server does not run.")
        return self._loop

    def schedule(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine on the server's loop, without waiting for it; drop it if the loop has ended."""
        if self._loop is None or self._loop.is_closed():
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)

    # A connection to this server would cost several times as much as the call itself. If the caller has another loop,
    # its request has one hop to the server's loop and one back.
    #
    #   the caller's loop                      the server's loop, or the same
    #     answer_here -- handle -------------> answer_sandbox, `answer_here` waits for `answered`
    #                 <------- answered ------
    #     cancelled, or too late: hang_up ---> the call ends as if its agent had hung up
    async def answer_here(self, request: AgentRequest, reply: LocalReply, timeout_s: float | None = None) -> None:
        """Answer a request from an event loop of this process.

        Raises:
            CaptureError: The server does not run, or the answer takes longer than `timeout_s`.
        """
        server, caller = self._running_loop(), asyncio.get_running_loop()
        answered: asyncio.Future[None] = caller.create_future()

        def wake() -> None:
            if not answered.done():
                answered.set_result(None)

        def wake_caller() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has ended
                caller.call_soon_threadsafe(wake)

        is_here = server is caller
        self._begin_request(request, reply, wake if is_here else wake_caller, is_here=is_here)
        timer = None if timeout_s is None else caller.call_later(timeout_s, wake)
        try:
            await answered
        finally:
            if timer is not None:
                timer.cancel()
            if is_late := not reply.ended:
                self._hang_up(reply, is_here=is_here)
        if is_late:
            raise CaptureError(f"The model call has no answer after {timeout_s:g} s.")

    def answer_and_wait(self, request: AgentRequest, reply: LocalReply, timeout_s: float) -> None:
        """Answer a request from a thread without an event loop.

        Raises:
            CaptureError: The server does not run, or the answer takes longer than `timeout_s`.
        """
        if threading.current_thread() is self._runner:
            raise CaptureError("This would wait for itself: call it from another thread.")
        answered = threading.Event()
        self._begin_request(request, reply, answered.set, is_here=False)
        try:
            answered.wait(timeout_s)
        finally:
            if not answered.is_set():
                self._hang_up(reply, is_here=False)
        if not answered.is_set():
            raise CaptureError(f"The model call has no answer after {timeout_s:g} s.")

    def _begin_request(
        self, request: AgentRequest, reply: LocalReply, wake: Callable[[], None], *, is_here: bool
    ) -> None:
        """Begin to answer a request on the server's loop; `wake` is called there at its end."""
        server = self._running_loop()

        async def handle() -> None:
            try:
                self._agents.limits.check(request.body)
                await self.answer_sandbox(request, reply)
            except RequestRefused as exc:
                await reply.send(exc.status, str(exc).encode())
            except Exception:  # the boundary of a request
                log.exception("a request failed: %s %s", request.method, request.route_path)
            finally:
                if not reply.ended:
                    reply.abort()
                wake()

        # A task also on the caller's loop: stopping a call must not cancel its caller.
        if is_here:
            self._keep(server.create_task(handle()))
        else:
            server.call_soon_threadsafe(lambda: self._keep(server.create_task(handle())))

    def _hang_up(self, reply: LocalReply, *, is_here: bool) -> None:
        """End a call whose caller no longer waits."""
        if is_here:
            reply.hang_up()
            return
        with contextlib.suppress(CaptureError, RuntimeError):  # the server has ended, and its calls with it
            self._running_loop().call_soon_threadsafe(reply.hang_up)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a reference to a task until it ends: a loop has weak ones only."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the loop of an ASGI server, unless the server has its own."""
        if self._runner is None:
            self._loop = loop

    @property
    def is_listening(self) -> bool:
        """Return whether the server runs and has addresses."""
        return self._thread is not None

    def _main(self, started: concurrent.futures.Future[None]) -> None:
        loop = _new_loop()
        asyncio.set_event_loop(loop)
        self._loop = loop
        try:
            loop.run_until_complete(self._listen())
        except BaseException as exc:
            loop.run_until_complete(self._shut())
            loop.close()
            started.set_exception(exc)
            return
        started.set_result(None)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        tcp = await loop.create_server(lambda: self._agents.accept(self.answer), self._host, self._port, backlog=1024)
        self._servers.append(tcp)
        self._port = tcp.sockets[0].getsockname()[1]
        if hasattr(socket, "AF_UNIX"):
            self._folder = make_socket_folder(self._socket_parent)
            listening = _listening_socket(self._folder)
            unix = await loop.create_unix_server(
                lambda: self._agents.accept(self.answer_sandbox), sock=listening, backlog=1024
            )
            self._servers.append(unix)
            os.chmod(self._folder, 0o711)
        await self.on_listening()

    # The order matters: no new connections, then the end of all calls (their agents get an answer), then a moment for
    # connections with buffered answers, then all are aborted.
    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        await self.on_stop()
        self._agents.close()
        await asyncio.sleep(0)
        self._agents.close(abort=True)
        await asyncio.sleep(0.01)  # for the transports' connection_lost
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# The unix socket of the agents has its own folder, with a short path: the kernel accepts about 100 bytes. If a proxy is
# killed, the next one that starts removes its folder.

FOLDER_PREFIX = "openenv-capture-"
SOCKET_NAME = "agents.sock"
_PATH_LIMIT = 100


# Path limit: 104 bytes on macOS, 108 on Linux, with the final zero. A long TMPDIR falls back to /tmp.
def make_socket_folder(parent: Path | None = None) -> Path:
    """Make a folder for a socket, below `parent` if that path is short enough, and remove abandoned ones there."""
    parents = [path for path in (parent, Path(tempfile.gettempdir())) if path is not None]
    room = _PATH_LIMIT - len(f"/{FOLDER_PREFIX}12345678/{SOCKET_NAME}")
    short = next((path for path in parents if len(str(path)) <= room), Path("/tmp"))
    for folder in short.glob(f"{FOLDER_PREFIX}*"):
        if _is_abandoned(folder / SOCKET_NAME):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=short))


def _listening_socket(folder: Path) -> socket.socket:
    """Return a socket that listens under its usual name in a folder."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A socket that is bound and does not listen yet looks like the socket of a killed proxy, and another proxy that
    # starts at this moment would remove its folder. So it gets its usual name only when it listens.
    draft = folder / "draft.sock"
    listening.bind(str(draft))
    listening.listen(1024)
    listening.setblocking(False)
    os.chmod(draft, 0o666)  # agents run as other users; the folder and the key decide who gets through
    draft.rename(folder / SOCKET_NAME)
    return listening


def _is_abandoned(path: Path) -> bool:
    """Return whether the listener of a socket has ended."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not path.is_socket():
            return False
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
