"""How `expose` works: connections to a port inside a sandbox reach a unix socket of the host. Two ways:

1. `Relay`, if a socket that listens inside can be held outside (passed by PID 1 of a local sandbox, or opened with
   `host.listen_in`). One thread serves any number of listeners; no process of ours runs inside.

       client inside ──> listener (in the sandbox's network) ──accept──> Relay ──> unix socket of the host

2. `StdioTunnel`, if the network cannot be entered: `exposed_ports_inside` runs inside as a command, and carries
   connections as frames over its standard streams. It needs `python3` inside, and no network between the two.

       client inside ──> exposed_ports_inside ══stdout/stdin of a command══> StdioTunnel ──> unix socket of the host

Both pass bytes on as they come, close one half of a connection when the other half's sender is done, and let a slow
reader slow down its writer. Both limit the connections of a sandbox (`ConnectionQuota`), because each uses descriptors
of the host. Connections beyond the limit are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

from openenv.sandboxes import exposed_ports_inside
from openenv.sandboxes.base import Stream
from openenv.sandboxes.exposed_ports_inside import CUT, HEAD, OPEN, READY, FrameTunnel
from openenv.sandboxes.host import ConnectionQuota

log = logging.getLogger("openenv.sandboxes")

_CHUNK = 64 * 1024
_CONNECT_S = 5.0
_PLACE_S = 5.0
"""The time that a connection beyond the quota waits for another connection to end."""
_LOOK_S = 0.02
_RATE, _BURST = 100.0, 256.0
"""New connections of one listener: per second, and at once. Each costs the host more than the sandbox."""
_MAX_PATH = 100
_RETRY_S = 0.005
_TUNNEL_BATCH = 1 << 18
_TUNNEL_CONNECT_S = 10.0


class Relay:
    """Passes bytes on, in a thread with an event loop that runs while there is a listener."""

    def __init__(self, quota: ConnectionQuota | None = None) -> None:
        self.quota = quota or ConnectionQuota()
        """The common quota of the listeners."""
        self._lock = threading.RLock()  # reentrant: the garbage collector may close an exposure at any point
        self._loop: asyncio.SelectorEventLoop | None = None
        self._exposures: set[Exposure] = set()

    def add(self, listener: socket.socket, target: Path) -> Exposure:
        """Pass what connects to `listener` on to the unix socket `target`, until the exposure is closed."""
        listener.setblocking(False)
        exposure = Exposure(self, listener, str(target))
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.SelectorEventLoop()
                threading.Thread(target=_run, args=(self._loop,), name="openenv-relay", daemon=True).start()
            self._exposures.add(exposure)
            self._loop.call_soon_threadsafe(exposure.start)
        return exposure

    def remove(self, exposure: Exposure) -> None:
        """Close a listener and its connections."""
        with self._lock:
            if exposure not in self._exposures or self._loop is None:
                return
            self._exposures.discard(exposure)
            self._loop.call_soon_threadsafe(exposure.stop)
            if not self._exposures:
                # The last call of this loop: the next listener starts a new loop and a new thread.
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _run(loop: asyncio.SelectorEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_settle())  # the cancelled tasks still have to close their sockets
    loop.close()


async def _settle() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks)


class _Pace:
    """Limits how fast the connections of one listener come."""

    def __init__(self) -> None:
        self._credit, self._at = _BURST, time.monotonic()

    def allows(self) -> bool:
        """Return whether another connection may be made now."""
        now = time.monotonic()
        self._credit, self._at = min(_BURST, self._credit + (now - self._at) * _RATE), now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


class Exposure:
    """A listening socket; its connections go to a unix socket of the host."""

    _serving: asyncio.Task[None]

    def __init__(self, relay: Relay, listener: socket.socket, target: str) -> None:
        self._relay = relay
        self._listener = listener
        self._target = target
        self._is_full = False
        self._pace = _Pace()
        self._buffer = bytearray(_CHUNK)  # one for all: the loop reads one connection at a time, and `write` copies

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._relay.remove(self)

    def start(self) -> None:
        """Begin to accept; the relay's loop calls it."""
        self._serving = _task(self._serve(), self._listener)

    def stop(self) -> None:
        """Close the listener and its connections; the relay's loop calls it."""
        self._serving.cancel()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        quota = self._relay.quota
        connections: set[asyncio.Task[None]] = set()
        try:
            while True:
                if not self._pace.allows():
                    await asyncio.sleep(1 / _RATE)  # new connections wait in the backlog, inside
                    continue
                try:
                    near, _ = await loop.sock_accept(self._listener)
                except OSError:  # the client is gone again, or the host is out of descriptors: do not spin
                    await asyncio.sleep(_RETRY_S)
                    continue
                try:
                    has_place = await self._place()
                except BaseException:
                    near.close()
                    raise
                if not has_place:
                    near.close()
                    continue
                task = _task(self._carry(near), near)
                connections.add(task)
                task.add_done_callback(connections.discard)
                task.add_done_callback(lambda _: quota.release(self))
        finally:
            for task in connections:
                task.cancel()

    async def _place(self) -> bool:
        """Take a place for a connection; return False if all are taken.

        After one connection has waited in vain, those behind it have, too: they are refused until a place is free.
        """
        give_up = time.monotonic() + (0.0 if self._is_full else _PLACE_S)
        while not self._relay.quota.take(self):
            if time.monotonic() >= give_up:
                if not self._is_full:
                    held = self._relay.quota.held(self)
                    log.warning("a sandbox has %d connections open, all that it may have: more are refused", held)
                self._is_full = True
                return False
            await asyncio.sleep(_LOOK_S)
        self._is_full = False
        return True

    async def _carry(self, near: socket.socket) -> None:
        """Carry one connection until both halves of it have ended, or one end broke."""
        loop = asyncio.get_running_loop()
        near_end, far_end = _ConnectionEnd(self._buffer), _ConnectionEnd(self._buffer)
        near_end.other, far_end.other = far_end, near_end
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far:
            far.setblocking(False)
            _name(far, self)
            if near.family == socket.AF_INET:  # asyncio does so only if the socket object knows its protocol
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._connect(far)
            # Together: both transports are made in one turn of the loop, before either of them can receive anything.
            await asyncio.gather(
                loop.connect_accepted_socket(lambda: near_end, near), loop.connect_accepted_socket(lambda: far_end, far)
            )
            try:
                await near_end.closed.wait()
                await far_end.closed.wait()
            finally:
                # Leaves the selector at once; the sockets may close after that, and not before: the next socket of this
                # process may get the number of a closed one.
                near_end.transport.abort()
                far_end.transport.abort()

    async def _connect(self, far: socket.socket) -> None:
        give_up = time.monotonic() + _CONNECT_S
        while True:
            try:
                _connect_unix(far, self._target)
                return
            except BlockingIOError:
                # EAGAIN: the server's backlog is full. Unlike with TCP, no event follows it: `loop.sock_connect` would
                # take the socket for connected.
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(_RETRY_S)


def _task(work: Coroutine[Any, Any, None], owned: socket.socket) -> asyncio.Task[None]:
    """Start a task that owns a socket: it closes it in the end, also if it is cancelled before its first step."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda _: owned.close())
    return task


class _ConnectionEnd(asyncio.BufferedProtocol):
    """One end of a connection; received bytes are written to the other end.

    open ──EOF here──> half closed ──EOF at the other end──> closed, after the buffer was written
      └──── an error at either end ────────────────────────> closed at once
    """

    other: _ConnectionEnd
    transport: asyncio.Transport

    def __init__(self, buffer: bytearray) -> None:
        self.closed = asyncio.Event()
        self.at_eof = False
        self._buffer = buffer  # `asyncio.Protocol` would make one of 256 KB for every part

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer to receive into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Write to the other end at once: a model's tokens come in small parts."""
        self.other.transport.write(self._buffer[:nbytes])

    def pause_writing(self) -> None:
        """Read no more from the other end: a slow reader slows down its writer."""
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read from the other end again."""
        self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        """End this half of the other connection, too; the other half stays open until its own end."""
        self.at_eof = True
        self.other.transport.write_eof()
        if self.other.at_eof:
            self.transport.close()
            self.other.transport.close()
        return True  # else asyncio would close the whole connection

    def connection_lost(self, error: Exception | None) -> None:
        """Break off the other end if this end broke."""
        self.closed.set()
        if error is not None:
            self.other.transport.abort()


def _name(far: socket.socket, origin: object) -> None:
    """Name our end of a connection, so that the server can see which connections come from the same sandbox.

    The name is abstract (`unix(7)`), so it is in no folder. Only its last part differs within a sandbox.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            far.bind(f"\0openenv-relay/{os.getpid()}/{id(origin)}/{secrets.token_hex(8)}")


def _connect_unix(far: socket.socket, path: str) -> None:
    """Connect to a unix socket, even if its path is longer than sockaddr_un can hold."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        far.connect(path)
        return
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        far.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def relay_source() -> str:
    """Return the program that runs inside."""
    return Path(exposed_ports_inside.__file__).read_text()


class StdioTunnel(FrameTunnel):
    """The host's end of a tunnel: `received` takes the output of `exposed_ports_inside`, `frames` yields its input.

    The other end runs as the sandbox's user, so code in the sandbox can forge frames. Never trust a frame.
    """

    def __init__(self, target: Path, quota: ConnectionQuota | None = None) -> None:
        super().__init__()
        self._quota = quota or ConnectionQuota()
        self._pace = _Pace()
        self.ready = threading.Event()
        self._target = str(target)
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(maxsize=256)
        self._closed = False

    def frames(self) -> Iterator[bytes]:
        """Yield the input of the relay, batched, until the tunnel is closed."""
        frame = self._outgoing.get()
        while frame is not None:
            batch = bytearray(frame)
            # One write of the batch instead of one for each frame: every write may be a request to a remote engine.
            try:
                while len(batch) < _TUNNEL_BATCH and (frame := self._outgoing.get_nowait()) is not None:
                    batch += frame
            except queue.Empty:
                pass
            yield bytes(batch)
            if frame is not None:
                frame = self._outgoing.get()

    def received(self, stream: Stream, data: bytes) -> None:
        """Take output of the relay; cut off a relay that breaks the protocol."""
        if stream == "stdout" and not self._closed:
            try:
                self.feed(data)
            except ValueError as error:
                log.warning("the relay in a sandbox is cut off: %s", error)
                self.close()

    def close(self) -> None:
        """Cut every connection and end the relay's input."""
        self._closed = True
        self.cut_all()
        while True:
            try:
                self._outgoing.put_nowait(None)
                return
            except queue.Full:  # its reader is gone: make room for the end
                self._outgoing.get()

    def take(self, kind: int, number: int, body: bytes) -> None:
        """Handle a frame of the relay."""
        if kind == READY:
            self.ready.set()
        elif kind == OPEN:
            self._open(number)
        else:
            super().take(kind, number, body)

    def _open(self, number: int) -> None:
        if number in self._sockets:
            raise ValueError(f"connection {number} was opened twice")
        # Each takes a descriptor and a thread of the host until both sides are done.
        if not self._pace.allows() or not self._quota.take(self):
            self.send(CUT, number)
            return
        end = None
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            end.settimeout(_TUNNEL_CONNECT_S)
            _name(end, self)
            _connect_unix(end, self._target)
            end.settimeout(None)
        except OSError:  # nobody listens: the client inside sees its connection close
            if end is not None:
                end.close()
            self._quota.release(self)
            self.send(CUT, number)
            return
        self.add(number, end)

    def closed(self, number: int) -> None:
        """Give back the place of a connection."""
        self._quota.release(self)

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        """Queue a frame; waits while the relay is slow to read."""
        frame = HEAD.pack(kind, number, len(body)) + body
        while not self._closed:
            try:
                self._outgoing.put(frame, timeout=1)
            except queue.Full:
                continue
            return
