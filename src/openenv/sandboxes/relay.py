"""How `expose` works: connections to a port inside a sandbox reach a unix socket of the host. Two ways:

1. `Relay`, where a socket that listens inside can be held outside (passed by PID 1 of a local sandbox, or opened with
   `listen_in`). One thread serves any number of listeners; nothing of ours runs inside.

       client inside ──> listener (in the sandbox's network) ──accept──> Relay ──> unix socket of the host

2. `StdioTunnel`, where the network cannot be entered: `stdio_relay` runs inside, as a command, and carries connections
   as frames over its standard streams. Needs `python3` inside and no network between the two.

       client inside ──> stdio_relay ══stdout/stdin of a command══> StdioTunnel ──> unix socket of the host

Both pass bytes on as they come, close one half of a connection when the other half's sender is done, and let a slow
reader slow down its writer.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from openenv.sandboxes import stdio_relay
from openenv.sandboxes.base import Stream
from openenv.sandboxes.stdio_relay import CUT, DATA, END, HEAD, OPEN, READY

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_CHUNK = 64 * 1024
_MAX_CONNECTIONS = 512
"""Per listener; further ones wait in its backlog."""
_CONNECT_S = 5.0
_MAX_PATH = 100
_RETRY_S = 0.005
_CLONE_NEWNET = 0x40000000
_BACKLOG = 128
_TUNNEL_CHUNK = 1 << 15
_TUNNEL_BATCH = 1 << 18
_TUNNEL_CONNECT_S = 10.0


def _connect(far: socket.socket, path: str) -> None:
    """Connect to a unix socket, also where its path is longer than sockaddr_un can hold."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        far.connect(path)
        return
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        far.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


class Relay:
    """Passes bytes on in a thread, which runs while there is a listener."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may close an exposure at any point
        self._loop: _RelayLoop | None = None
        self._listeners: set[Exposure] = set()

    def add(self, listener: socket.socket, target: Path) -> Exposure:
        """Pass what connects to `listener` on to the unix socket `target`, until the exposure is closed."""
        listener.setblocking(False)
        exposure = Exposure(listener, str(target), self)
        with self._lock:
            self._listeners.add(exposure)
            if self._loop is None:
                self._loop = _RelayLoop()
                threading.Thread(target=self._loop.run, name="openenv-relay", daemon=True).start()
            self._loop.call(lambda loop: loop.listen(exposure))
        return exposure

    def remove(self, exposure: Exposure) -> None:
        """Close a listener and its connections."""
        with self._lock:
            if exposure not in self._listeners or self._loop is None:
                return
            self._listeners.discard(exposure)
            self._loop.call(lambda loop: loop.forget(exposure))
            if not self._listeners:
                loop, self._loop = self._loop, None
                loop.call(_RelayLoop.stop)


@dataclass(eq=False, slots=True)
class Exposure:
    """A listening socket and where its connections go."""

    listener: socket.socket
    target: str
    relay: Relay
    connections: set[_RelayedConnection] = field(default_factory=set)
    paused: bool = False

    def close(self) -> None:
        """Stop listening and close what is connected."""
        self.relay.remove(self)


@dataclass(eq=False, slots=True)
class _ConnectionEnd:
    """One end of a connection; `waiting` has still to be written to it."""

    socket: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """Its sender is done: nothing more will be read from it."""
    events: int = 0


@dataclass(eq=False, slots=True)
class _RelayedConnection:
    exposure: Exposure
    near: _ConnectionEnd
    far: _ConnectionEnd | None = None
    give_up: float = 0.0


class _RelayLoop:
    """The selector and what it watches. Only `call` may be used from other threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: list[Callable[[_RelayLoop], None]] = []
        self._lock = threading.RLock()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._connecting: list[_RelayedConnection] = []
        self._running = True
        self._ended = False

    def call(self, function: Callable[[_RelayLoop], None]) -> None:
        """Run a function in the loop's thread."""
        with self._lock:
            self._calls.append(function)
            if self._ended:
                return  # `stop` came first, and closed everything
            try:
                self._wake.send(b"!")
            except BlockingIOError:
                pass  # it is awake

    def run(self) -> None:
        """Serve until `stop`."""
        while self._running:
            timeout = _RETRY_S if self._connecting else None
            for key, _ in self._selector.select(timeout):
                self._safely(self._handle, key)
            for connection in list(self._connecting):
                self._safely(self._connect, connection)
            with self._lock:
                calls, self._calls = self._calls, []
            for function in calls:
                self._safely(function, self)
        with self._lock:
            self._ended = True
            self._selector.close()
            self._woken.close()
            self._wake.close()

    def _safely(self, work: Callable[[_T], None], argument: _T) -> None:
        try:
            work(argument)
        except Exception:  # the failure of one connection must not end the others
            _log.exception("relay")

    def stop(self) -> None:
        """End the thread."""
        self._running = False

    def listen(self, exposure: Exposure) -> None:
        """Start to accept."""
        self._selector.register(exposure.listener, selectors.EVENT_READ, exposure)

    def forget(self, exposure: Exposure) -> None:
        """Close a listener and its connections."""
        if not exposure.paused:
            self._selector.unregister(exposure.listener)
        exposure.listener.close()
        exposure.paused = True
        for connection in list(exposure.connections):
            self._close(connection)

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            try:
                self._woken.recv(4096)
            except BlockingIOError:
                pass
        elif isinstance(key.data, Exposure):
            self._accept(key.data)
        else:
            self._move(*key.data)

    def _accept(self, exposure: Exposure) -> None:
        try:
            accepted, _ = exposure.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_RETRY_S)  # out of descriptors, and the selector is level triggered: do not spin
            return
        accepted.setblocking(False)
        if accepted.family == socket.AF_INET:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _RelayedConnection(exposure, _ConnectionEnd(accepted), give_up=time.monotonic() + _CONNECT_S)
        exposure.connections.add(connection)
        if len(exposure.connections) >= _MAX_CONNECTIONS:
            self._selector.unregister(exposure.listener)
            exposure.paused = True
        self._connecting.append(connection)
        self._connect(connection)

    def _connect(self, connection: _RelayedConnection) -> None:
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        far.setblocking(False)
        try:
            _connect(far, connection.exposure.target)
        except OSError as error:
            far.close()
            busy = error.errno in (errno.EAGAIN, errno.EINPROGRESS)
            if not busy or time.monotonic() > connection.give_up:
                self._close(connection)
            return
        self._connecting.remove(connection)
        connection.far = _ConnectionEnd(far)
        self._watch(connection)

    def _move(self, connection: _RelayedConnection, side: _ConnectionEnd, other: _ConnectionEnd) -> None:
        try:
            if side.waiting:
                self._flush(side, other)
            if not side.ended and not other.waiting:
                self._pass_on(side, other)
        except OSError:
            self._close(connection)
            return
        if side.ended and other.ended and not side.waiting and not other.waiting:
            self._close(connection)
        else:
            self._watch(connection)

    def _flush(self, side: _ConnectionEnd, other: _ConnectionEnd) -> None:
        try:
            del side.waiting[: side.socket.send(side.waiting)]
        except BlockingIOError:
            return
        if not side.waiting and other.ended:
            side.socket.shutdown(socket.SHUT_WR)

    def _pass_on(self, side: _ConnectionEnd, other: _ConnectionEnd) -> None:
        try:
            data = side.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not data:
            side.ended = True
            other.socket.shutdown(socket.SHUT_WR)
            return
        try:
            sent = other.socket.send(data)
        except BlockingIOError:
            sent = 0
        other.waiting += data[sent:]

    def _watch(self, connection: _RelayedConnection) -> None:
        near, far = connection.near, connection.far
        if far is None:
            return
        for side, other in ((near, far), (far, near)):
            events = selectors.EVENT_WRITE if side.waiting else 0
            if not side.ended and not other.waiting:
                events |= selectors.EVENT_READ
            if events == side.events:
                continue
            if side.events == 0:
                self._selector.register(side.socket, events, (connection, side, other))
            elif events == 0:
                self._selector.unregister(side.socket)
            else:
                self._selector.modify(side.socket, events, (connection, side, other))
            side.events = events

    def _close(self, connection: _RelayedConnection) -> None:
        exposure = connection.exposure
        if connection not in exposure.connections:
            return
        exposure.connections.discard(connection)
        if connection in self._connecting:
            self._connecting.remove(connection)
        for side in (connection.near, connection.far):
            if side is not None:
                if side.events:
                    self._selector.unregister(side.socket)
                    side.events = 0
                side.socket.close()
        if exposure.paused and exposure.listener.fileno() >= 0:
            exposure.paused = False
            self.listen(exposure)


def listen_in(namespace: Path, *, host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens inside a network namespace such as `/proc/PID/ns/net`.

    Raises:
        OSError: no such namespace, no right to enter it (it takes root), or the port is taken.
    """
    # setns changes the namespace of one thread: a thread that ends right after keeps the rest of the process outside.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="netns") as executor:
        return executor.submit(_listen, namespace, host, port).result()


def _listen(namespace: Path, host: str, port: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "setns"):
        raise OSError("this system has no network namespaces")
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def relay_source() -> str:
    """Return the program that runs inside."""
    return Path(stdio_relay.__file__).read_text()


class StdioTunnel:
    """The host's end of a tunnel: `received` takes the output of `stdio_relay`, `frames` yields its input."""

    def __init__(self, target: Path) -> None:
        self.ready = threading.Event()
        self._target = target
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(maxsize=256)
        self._buffer = bytearray()
        self._ends: dict[int, socket.socket] = {}
        self._closed = False

    def frames(self) -> Iterator[bytes]:
        """Yield the input of the relay, batched, until the tunnel is closed."""
        frame = self._outgoing.get()
        while frame is not None:
            batch = bytearray(frame)
            try:
                while len(batch) < _TUNNEL_BATCH and (frame := self._outgoing.get_nowait()) is not None:
                    batch += frame
            except queue.Empty:
                pass
            yield bytes(batch)
            if frame is not None:
                frame = self._outgoing.get()

    def received(self, stream: Stream, data: bytes) -> None:
        """Take output of the relay."""
        if stream == "stderr" or self._closed:
            return
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            kind, number, size = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                return
            body = bytes(self._buffer[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            self._handle(kind, number, body)

    def close(self) -> None:
        """Cut every connection and end the relay's input."""
        self._closed = True
        for end in list(self._ends.values()):
            _cut(end)
        while True:
            try:
                self._outgoing.put_nowait(None)
                return
            except queue.Full:  # its reader is gone: make room for the end
                self._outgoing.get()

    def _handle(self, kind: int, number: int, body: bytes) -> None:
        if kind == READY:
            self.ready.set()
        elif kind == OPEN:
            self._open(number)
        end = self._ends.get(number)
        if end is None:
            return
        try:
            if kind == DATA:
                end.sendall(body)
            elif kind == END:
                end.shutdown(socket.SHUT_WR)
        except OSError:
            _cut(end)  # its reader thread then tells the other side

    def _open(self, number: int) -> None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(_TUNNEL_CONNECT_S)
            end.connect(str(self._target))
            end.settimeout(None)
        except OSError:  # no listener there: the client inside sees its connection close
            end.close()
            self._put(CUT, number)
            return
        self._ends[number] = end
        threading.Thread(target=self._follow, args=(number, end), name="tunnel", daemon=True).start()

    def _follow(self, number: int, end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(_TUNNEL_CHUNK):
                    self._put(DATA, number, data)
                self._put(END, number)
            except OSError:
                self._put(CUT, number)
            self._ends.pop(number, None)

    def _put(self, kind: int, number: int, body: bytes = b"") -> None:
        frame = HEAD.pack(kind, number, len(body)) + body
        while not self._closed:
            try:
                self._outgoing.put(frame, timeout=1)
            except queue.Full:
                continue
            return


def _cut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
