"""A server in a thread of its own, with a loop for connections of agents: on TCP, and on a unix socket for sandboxes.

Must not know what the requests ask for: a subclass answers them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from openenv.errors import CaptureError

from .inbound import AgentConnections, AgentReply, AgentRequest, InboundLimits

T = TypeVar("T")


class ProxyListener(ABC):
    """Listens in a thread.

    Args:
        host: Where to listen.
        port: 0 for a free one.
        limits: What connections may use.
        sockets: Where the folder of the unix socket is made; by default the system's place for temporary files.
    """

    def __init__(self, host: str, port: int, limits: InboundLimits, sockets: Path | None = None) -> None:
        self._host = host
        self._port = port
        self._agents = AgentConnections(limits, is_known=self.is_known)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._servers: list[asyncio.Server] = []
        self._socket_parent = sockets
        self._folder: Path | None = None

    # a subclass has these

    @abstractmethod
    def is_known(self, key: str) -> bool:
        """Say whether requests with a key may be large."""

    @abstractmethod
    async def answer(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer a request that came on TCP."""

    @abstractmethod
    async def answer_sandbox(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer a request that came on the unix socket, from a sandbox."""

    @abstractmethod
    async def on_listening(self) -> None:
        """Do what is to be done once it listens, on its loop."""

    @abstractmethod
    async def on_stop(self) -> None:
        """Release what the subclass has, before connections are closed."""

    # life

    def listen(self, timeout_s: float | None = None) -> None:
        """Start the thread, and return when it listens.

        Args:
            timeout_s: How long that may take; None for no limit.

        Raises:
            CaptureError: it cannot, or not in time.
        """
        if self._thread is not None:
            raise CaptureError("The capture server runs already.")
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="openenv-capture", daemon=True)
        self._thread.start()
        try:
            started.result(timeout_s)
        except concurrent.futures.TimeoutError:
            started.add_done_callback(self._stop_late)
            raise CaptureError(f"The capture proxy does not listen after {timeout_s:g} s.") from None
        except OSError as exc:
            self._thread.join()
            self._thread = None
            raise CaptureError(f"The capture proxy cannot listen on {self._host}:{self._port}: {exc}") from exc

    def _stop_late(self, started: concurrent.futures.Future[None]) -> None:
        """Stop after all where the caller of `listen` did not wait long enough; this runs in the server's thread."""
        if started.exception() is None:
            threading.Thread(target=self.stop, daemon=True).start()

    def stop(self) -> None:
        """End all calls, write them down, and stop listening."""
        if self._thread is None or self._loop is None:
            return
        self.run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._thread = None

    @property
    def url(self) -> str:
        """Return the address for agents that reach TCP, without `/v1`."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::", "") else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def port(self) -> int:
        """Return the TCP port."""
        return self._port

    @property
    def socket(self) -> Path:
        """Return the unix socket: it has the agents' routes only."""
        if self._folder is None:
            raise CaptureError("The capture server does not run.")
        return self._folder / SOCKET_NAME

    # the thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop from another thread, and wait for it."""
        return self._submit(work).result()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._thread is None or self._loop is None or self._loop.is_closed():
            work.close()
            raise CaptureError("The capture server does not run.")
        if threading.current_thread() is self._thread:
            work.close()
            raise CaptureError("This would wait for itself: call it from another thread.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def schedule(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine on the server's loop, without waiting for it; a server whose loop has ended drops it."""
        if self._loop is None or self._loop.is_closed():
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let an ASGI server's loop be the server's; a server that listens has its own."""
        if self._thread is None:
            self._loop = loop

    @property
    def is_listening(self) -> bool:
        """Return whether agents can reach the server's addresses."""
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
    except ImportError:  # not there on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# The agents' unix socket has a folder of its own, whose path is short enough for a socket: the kernel takes little more
# than 100 bytes. The folder of a proxy that was killed is removed by the next one that starts.

FOLDER_PREFIX = "openenv-capture-"
SOCKET_NAME = "agents.sock"
_PATH_LIMIT = 100


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
    # A socket that is bound and does not listen yet looks like one whose proxy was killed, and another proxy that
    # starts at this moment would remove its folder. So it gets its usual name only when it listens.
    draft = folder / "draft.sock"
    listening.bind(str(draft))
    listening.listen(1024)
    listening.setblocking(False)
    os.chmod(draft, 0o666)  # agents run as other users; the folder and the key decide who gets through
    draft.rename(folder / SOCKET_NAME)
    return listening


def _is_abandoned(path: Path) -> bool:
    """Say whether a socket has no listener any more."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not path.is_socket():
            return False
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
