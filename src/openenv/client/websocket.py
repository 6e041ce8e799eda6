"""The client's WebSocket (RFC 6455): the protocol sans IO, and the two connections that move its bytes.

`WebSocket` is handshake, frames, pings and the close message; `BlockingConnection` runs it on a plain socket,
`AsyncConnection` on an event loop. Must not know what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, cast
from weakref import WeakKeyDictionary

from websockets.utils import accept_key, generate_key

from openenv.errors import AccessDenied, ConnectFailed, Forbidden, RequestTimeout, SessionLost
from openenv.protocol.frames import (
    FrameError,
    FrameReader,
    Opcode,
    WebSocketMessage,
    close_payload,
    masked_control_frame,
    masked_frame,
)
from openenv.protocol.json_values import decode

from .network import (
    READ_BYTES,
    Address,
    ConnectionOptions,
    closed_in_handshake,
    connecting,
    open_plain_socket,
    open_socket,
    proxy_for,
)

_SENT_AT_ONCE = 65_536
_HEAD_LIMIT = 65_536  # another kind of server may send bytes forever and never an empty line
_TRANSIENT = frozenset({"502", "503", "504"})  # what proxies answer for a server that is still starting
_NOT_LOADED = "NOT_LOADED"  # the server runs, but its environment does not import: waiting does not help


class Handshake:
    """The opening handshake (section 4.1): writes the request and checks the response.

    Args:
        address: The server's address.
        headers: Further headers.
        subprotocols: The offered subprotocols, the preferred one first; `subprotocol` is the server's choice.
    """

    def __init__(
        self, address: Address, headers: Mapping[str, str] | None = None, subprotocols: Sequence[str] = ()
    ) -> None:
        self.subprotocol: str | None = None
        self.workers = 1
        self.has_short_steps = False
        self._subprotocols = subprotocols
        self._shows_token = any(name.lower() == "authorization" for name in headers or {})
        self._key = generate_key()
        lines = [
            f"GET {address.target} HTTP/1.1",
            f"Host: {address.authority}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {self._key}",
            "Sec-WebSocket-Version: 13",
        ]
        if subprotocols:
            lines.append(f"Sec-WebSocket-Protocol: {', '.join(subprotocols)}")
        for name, value in (headers or {}).items():
            if any(char in name + value for char in "\r\n"):  # it would begin another header
                raise ValueError(f"header {name!r} contains a line break")
            lines.append(f"{name}: {value}")
        self.request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._head = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Take in bytes of the response; return what follows its head once that is complete, else None.

        Raises:
            ConnectFailed: The server refused, or does not speak WebSocket.
            AccessDenied: The server requires another token.
        """
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _HEAD_LIMIT:
                raise ConnectFailed("the server's answer has an endless head")
            return None
        head, rest = bytes(self._head[:end]).decode("latin-1"), bytes(self._head[end + 4 :])
        self._check(head, rest)
        return rest

    def _check(self, head: str, rest: bytes) -> None:
        status_line, *lines = head.split("\r\n")
        parts = status_line.split(" ", 2)
        status = parts[1] if len(parts) > 1 else "?"
        if status != "101":
            if (denied := _denied(status, rest, shows_token=self._shows_token)) is not None:
                raise denied
            body = _object(rest)
            detail = body.get("detail") or rest[:200].decode("utf-8", "replace").strip()
            raise ConnectFailed(
                f"the server answered {status_line!r} to the WebSocket handshake. {detail}".strip(),
                is_transient=status in _TRANSIENT and body.get("code") != _NOT_LOADED,
            )
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("sec-websocket-accept") != accept_key(self._key):  # 4.1, the fourth check of the response
            raise ConnectFailed("the server's WebSocket handshake is wrong (Sec-WebSocket-Accept)")
        chosen = headers.get("sec-websocket-protocol")
        if self._subprotocols and chosen is not None and chosen not in self._subprotocols:
            raise ConnectFailed(f"the server chose the subprotocol {chosen!r}, which was not offered")
        self.subprotocol = chosen
        workers = headers.get("x-openenv-workers", "")
        self.workers = int(workers) if workers.isascii() and workers.isdigit() and len(workers) < 4 else 1
        self.has_short_steps = headers.get("x-openenv-steps") == "short"


def _denied(status: str, body: bytes, *, shows_token: bool) -> AccessDenied | None:
    """Return the error for a refused token and its remedy; None if access is not the problem.

    A server without the route answers 403 as well, but with an empty body.
    """
    if status not in ("401", "403"):
        return None
    data = _object(body)
    if status == "403" and not data:
        return None
    detail = data.get("detail") or body[:200].decode("utf-8", "replace").strip()
    if isinstance(role := data.get("role"), str):
        return Forbidden(role, f"{detail} Connect with a token of another role: token=, or OPENENV_TOKEN.")
    advice = ""
    if status == "401":
        advice = "Check token= and OPENENV_TOKEN." if shows_token else "Pass token=, or set OPENENV_TOKEN."
    return AccessDenied(f"the server refused the connection with status {status}. {detail} {advice}".strip())


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = decode(body)
    except ValueError:  # cut short, or a proxy's HTML page
        return {}
    return content if isinstance(content, dict) else {}


class WebSocket:
    """One WebSocket connection of a client, sans IO: bytes in; messages, and bytes to send, out.

    Both connections below drive it in the same way:

        start() -> CONNECTING --- feed(b"HTTP/1.1 101 ...") ---> OPEN --- close frame, broken framing, lose() ---> LOST
                       |                                           |                                                ^
                       +-- feed() raises ConnectFailed             +------ check(): no pong in time ---------------+

    In LOST, `lost` says why, and `messages` may still hold what arrived before: the server usually says why it hangs
    up. The connection closes its socket as soon as it sees `lost`.

    Args:
        options: Limits, headers and ping times.
        clock: Returns the time in seconds.
    """

    __slots__ = (
        "_clock",
        "_handshake",
        "_keys",
        "_options",
        "_pinged_at",
        "_reader",
        "close_message",
        "has_short_steps",
        "is_fatal",
        "last_read_at",
        "lost",
        "messages",
        "subprotocol",
        "workers",
    )

    def __init__(self, options: ConnectionOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._handshake: Handshake | None = None
        self._reader = FrameReader(options.max_message_bytes, masked=False)  # 5.1: only clients mask
        self._keys = _mask_keys()
        self._pinged_at: float | None = None
        self.subprotocol: str | None = None
        self.workers = 1  # how many processes the server spreads sessions over, a connection's to one of them
        self.has_short_steps = False  # so short that a connection for each of them costs more than it saves
        self.messages: deque[WebSocketMessage] = deque()
        self.last_read_at = clock()
        self.lost: str | None = None
        # Whether a new connection would break in the same way: a reply over the limit is as long the next time.
        self.is_fatal = False
        # Sent when the client hangs up, even if the garbage collector closes it. A v2 session outlives its
        # connection: without this message it would keep its slot for the whole grace period.
        self.close_message: bytes | None = None

    def start(self, address: Address) -> bytes:
        """Begin the handshake and return its request."""
        self._handshake = Handshake(address, self._options.headers, self._options.subprotocols)
        return self._handshake.request

    @property
    def is_connecting(self) -> bool:
        """Whether the handshake is not complete yet."""
        return self._handshake is not None

    @property
    def lost_reason(self) -> str:
        """Why the connection is of no use any more."""
        return self.lost or "connection closed"

    def lose(self, reason: str) -> None:
        """Record why the connection is of no use any more; the first reason counts."""
        self.lost = self.lost or reason

    def feed(self, data: bytes) -> bytes:
        """Take in bytes from the server (none means that it closed the connection); return bytes to send back.

        Raises:
            ConnectFailed: The handshake failed.
            AccessDenied: The server requires another token.
        """
        if not data:
            self.lose("the server closed the connection")
            return b""
        self.last_read_at = self._clock()
        if self._handshake is not None:
            rest = self._handshake.feed(data)
            if rest is None:
                return b""
            self.subprotocol, self.workers = self._handshake.subprotocol, self._handshake.workers
            self.has_short_steps = self._handshake.has_short_steps
            self._handshake = None
            if not rest:
                return b""
            data = rest  # a server may send its first message in the segment of the handshake
        payload = self._reader.whole(data)
        if payload is not None:  # nearly every read is one short message
            self.messages.append(WebSocketMessage(data[0] & 0x0F, payload))
            return b""
        replies = b""
        try:
            for message in self._reader.feed(data):
                opcode = message.opcode
                if opcode == Opcode.TEXT or opcode == Opcode.BINARY:
                    self.messages.append(message)
                elif opcode == Opcode.PING:  # 5.5.3: the pong repeats the ping's payload
                    replies += masked_control_frame(Opcode.PONG, message.payload, next(self._keys))
                elif opcode == Opcode.CLOSE:
                    self.lose(closed_reason(message.payload))
                elif opcode == Opcode.OVERSIZE:
                    self.is_fatal = True
                    limit = self._options.max_message_bytes / (1024 * 1024)
                    self.lose(
                        f"connection lost: a reply of {message.size} bytes is over the limit "
                        f"(max_message_size_mb={limit:g})"
                    )
                    break
        except FrameError as exc:  # 7.1.7: fail the connection, because the start of the next frame is unknown
            self.lose(f"connection lost: {exc}")
        return replies

    def text(self, payload: bytes) -> bytes:
        """Return a text frame."""
        return masked_frame(0x81, payload, next(self._keys))

    def binary(self, payload: bytes) -> bytes:
        """Return a binary frame."""
        return masked_frame(0x82, payload, next(self._keys))

    def check(self, quiet_s: float) -> bytes:
        """Return a ping to send if the server was silent for that long; lose it if it left the last ping unanswered."""
        # Example, quiet_s and ping_timeout_s of 20: last read at 0, ping at 20; a pong, or any other byte, that is read
        # before 40 counts as life, and the next ping is due 20 s after it; at 40 the server is lost.
        now = self._clock()
        if self._pinged_at is not None and self._pinged_at >= self.last_read_at:
            limit = self._options.ping_timeout_s
            if limit is not None and now - self._pinged_at >= limit:
                self.lose("the server does not answer pings")
        elif now - self.last_read_at >= quiet_s:
            self._pinged_at = now
            return masked_control_frame(Opcode.PING, b"", next(self._keys))
        return b""

    def goodbye(self, last_message: bytes | None = None) -> bytes:
        """Return the frames of a hang-up: a last message, the close message, and the close frame (5.5.1)."""
        texts, self.close_message = (last_message, self.close_message), None
        frames = [self.text(text) for text in texts if text is not None]
        frames.append(masked_control_frame(Opcode.CLOSE, close_payload(1000), next(self._keys)))
        return b"".join(frames)


def _mask_keys() -> Iterator[bytes]:
    """Yield random mask keys (5.3), fetched from the system many at a time: one system call per frame would be felt."""
    while True:
        pool = os.urandom(1024)
        for at in range(0, len(pool), 4):
            yield pool[at : at + 4]


def closed_reason(payload: bytes) -> str:
    """Return the reason in a close frame; 1005 stands for a frame without a code (7.1.5)."""
    code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
    text = payload[2:].decode("utf-8", "replace")
    return f"the server closed the connection with code {code}" + (f": {text}" if text else "")


# -- connections: the same WebSocket on a socket and on an event loop -------------------------------------------------


class UnexpectedMessage(Exception):
    """A message was there before the request; nothing has been sent."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("a message came before the request")
        self.payload = payload


class _Connection:
    """What both connections share."""

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self.address = address
        self._options = options
        self.websocket = WebSocket(options)

    @property
    def lost_reason(self) -> str:
        """Why the connection is closed."""
        return self.websocket.lost_reason

    def _early_message(self, payload: bytes | None) -> bytes:
        """Return a message that came before the wait for it; raise it if a request is to be sent.

        After v1's progress notifications the reply is often there already. But before a request, any message is
        unexpected: v1 has no ids, so it would be taken for the reply to that request.
        """
        message = self.websocket.messages.popleft().payload
        if payload is not None:
            raise UnexpectedMessage(message)
        return message


class BlockingConnection(_Connection):
    """A WebSocket on a plain socket, for one thread at a time; the caller holds a lock.

    Args:
        address: The server's address.
        options: How to connect.
        read_bytes: How much to read at once.
    """

    def __init__(self, address: Address, options: ConnectionOptions, *, read_bytes: int = READ_BYTES) -> None:
        super().__init__(address, options)
        self._socket: socket.socket | None = None
        self._timeout_s: float | None = -1.0  # none that a socket can have: the first one is always set
        # How long one read may wait: a v2 connection can be replaced, so it is checked while a request waits.
        self._longest_wait_s: float | None = None
        # Whether the frame that is being sent may be half out. Bytes sent after it would be read as the rest of it.
        self._is_torn = False
        self._read_bytes = read_bytes
        self._buffer = memoryview(b"")

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._socket is not None

    def open(self, limit_s: float = inf) -> None:
        """Connect and shake hands, within the options' limit and this one.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: The server requires another token.
        """
        timeout_s = min(self._options.connect_timeout_s, limit_s)
        with connecting(self.address, timeout_s):
            try:
                self._open(timeout_s)
            except BaseException:
                self.drop("not connected")
                raise

    def _open(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._socket = sock = open_socket(self.address, timeout_s)
        # A reused buffer: a fresh one for each read costs more than the read.
        self._buffer = memoryview(bytearray(self._read_bytes))
        sock.sendall(self.websocket.start(self.address))
        while self.websocket.is_connecting:
            if self.websocket.lost is not None:
                raise closed_in_handshake()
            self._set_timeout(sock, max(0.001, deadline - time.monotonic()))
            self._read(sock)
        interval, timeout = self._options.ping_interval_s, self._options.ping_timeout_s
        if self.websocket.subprotocol is not None and interval is not None:
            self._longest_wait_s = interval if timeout is None else min(interval, timeout)

    def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send a message, unless it is None, and wait for the next one.

        Raises:
            RequestTimeout: No message came in time; the connection is dropped.
            SessionLost: The connection broke.
            UnexpectedMessage: A message was there before this request; nothing was sent.
        """
        messages = self.websocket.messages
        if messages:
            return self._early_message(payload)
        sock = self._socket
        if sock is None:
            raise SessionLost(self.lost_reason)
        try:
            self._exchange(sock, payload, timeout_s)
            return messages.popleft().payload
        except TimeoutError:
            self._give_up("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except SessionLost:
            raise
        except OSError as exc:
            self.drop(f"connection lost: {exc}")
            raise SessionLost(self.lost_reason) from exc
        except BaseException:  # an interrupt between request and reply: the next reply would be that of another request
            self._give_up("a request was interrupted")
            raise

    def _exchange(self, sock: socket.socket, payload: bytes | None, timeout_s: float | None) -> None:
        websocket = self.websocket
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        longest_s = self._longest_wait_s
        wait_s = timeout_s if longest_s is None or (timeout_s is not None and timeout_s < longest_s) else longest_s
        if payload is not None:
            # A payload that fits into the system's buffers is sent at once and needs no separate timeout.
            self._set_timeout(sock, wait_s if len(payload) < _SENT_AT_ONCE else timeout_s)
            self._is_torn = True
            sock.sendall(websocket.text(payload))
            self._is_torn = False
        while True:
            if wait_s != self._timeout_s:
                self._set_timeout(sock, wait_s)
            try:
                self._read(sock)
            except TimeoutError:
                if websocket.subprotocol is None or (deadline is not None and time.monotonic() >= deadline):
                    raise
                self._check(sock)
            if websocket.messages:
                return
            if self._socket is None:
                raise SessionLost(self.lost_reason)
            if deadline is not None:
                left_s = max(0.001, deadline - time.monotonic())
                wait_s = left_s if longest_s is None else min(left_s, longest_s)

    def _set_timeout(self, sock: socket.socket, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:  # saves a system call per request
            sock.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _read(self, sock: socket.socket) -> int:
        """Read once; return how many bytes came."""
        size = sock.recv_into(self._buffer)
        replies = self.websocket.feed(bytes(self._buffer[:size]))
        if replies:
            sock.sendall(replies)
        if self.websocket.lost is not None:
            self.drop(self.websocket.lost)
        return size

    def keep_alive(self) -> None:
        """Answer pings and send our own while no request runs; never blocks."""
        sock = self._socket
        if sock is None:
            return
        try:
            self._set_timeout(sock, 0)
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                self._read(sock)
            self._check(sock)
        except OSError as exc:
            self.drop(f"connection lost: {exc}")

    def _check(self, sock: socket.socket) -> None:
        """Ping a server that has been silent for long; drop one that did not answer."""
        interval = self._options.ping_interval_s
        if self._socket is None or interval is None:
            return
        ping = self.websocket.check(interval)
        if ping:
            sock.sendall(ping)
        elif self.websocket.lost is not None:
            self.drop(self.websocket.lost)

    def close(self, last_message: bytes | None = None) -> None:
        """Send a last message, the close message and a close frame; never raises."""
        self._say_goodbye(1.0, last_message)
        self.drop("closed by the client")

    def release(self, reason: str) -> None:
        """Hang up for a client that was garbage collected: send the close message if that needs no waiting."""
        if self.websocket.close_message is not None:
            self._say_goodbye(0.0, None)
        self.drop(reason)

    def _say_goodbye(self, timeout_s: float, last_message: bytes | None) -> None:
        sock = self._socket
        if sock is not None and not self._is_torn:
            with contextlib.suppress(OSError):  # the server may be gone; it is the end in either case
                sock.settimeout(timeout_s)
                sock.sendall(self.websocket.goodbye(last_message))

    def _give_up(self, reason: str) -> None:
        """Drop the connection, unless there is a close message to send, which `close` does."""
        if self.websocket.close_message is None or self._is_torn:
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """Close this process's end without a message; a process that it was forked from may go on with it."""
        self.websocket.lose(reason)
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()


_READ_BUFFERS: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def _read_buffer(loop: asyncio.AbstractEventLoop) -> memoryview:
    """Return a buffer to read into. Loops that read and deliver in one go share one among their connections."""
    # A proactor (Windows) fills the buffer while other connections' reads are delivered.
    if hasattr(loop, "_proactor"):
        return memoryview(bytearray(READ_BYTES))
    buffer = _READ_BUFFERS.get(loop)
    if buffer is None:
        buffer = _READ_BUFFERS[loop] = memoryview(bytearray(READ_BYTES))
    return buffer


class AsyncConnection(_Connection, asyncio.BufferedProtocol):
    """A WebSocket on an event loop. One exchange at a time; the caller holds a lock."""

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        super().__init__(address, options)
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_opening = True
        self._waiter: asyncio.Future[None] | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._buffer = _read_buffer(self.loop)

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used, as far as is known."""
        return self._transport is not None

    async def open(self, limit_s: float = inf) -> None:
        """Connect and shake hands, within the options' limit and this one.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: The server requires another token.
        """
        timeout_s = min(self._options.connect_timeout_s, limit_s)
        with connecting(self.address, timeout_s):
            try:
                await asyncio.wait_for(self._open(timeout_s), timeout_s)
            except BaseException:
                self.drop("not connected")
                raise

    async def _open(self, timeout_s: float) -> None:
        address, loop = self.address, self.loop
        request = self.websocket.start(address)
        context = ssl.create_default_context() if address.secure else None
        hostname = address.host if address.secure else None
        if proxy_for(address) is None:
            await loop.create_connection(
                lambda: self, address.host, address.port, ssl=context, server_hostname=hostname
            )
        else:
            # The tunnel is opened in a thread: it is rare, and short.
            sock = await loop.run_in_executor(None, open_plain_socket, address, timeout_s)
            sock.setblocking(False)
            await loop.create_connection(lambda: self, sock=sock, ssl=context, server_hostname=hostname)
        assert self._transport is not None  # set by connection_made
        self._transport.write(request)
        while self.websocket.is_connecting:
            await self._change()
        self._is_opening = False
        self._schedule_ping()

    async def exchange(self, payload: bytes | None, timeout_s: float | None) -> bytes:
        """Send a message, unless it is None, and wait for the next one.

        Raises:
            RequestTimeout: No message came in time; the connection is dropped.
            SessionLost: The connection broke.
            UnexpectedMessage: A message was there before this request; nothing was sent.
        """
        websocket = self.websocket
        messages = websocket.messages
        if messages:
            return self._early_message(payload)
        if self._transport is None:
            raise SessionLost(self.lost_reason)
        if payload is not None:
            self._transport.write(websocket.text(payload))
        if timeout_s is not None:
            self._set_deadline(self.loop.time() + timeout_s)
        try:
            while not messages:
                if websocket.lost is not None:
                    raise SessionLost(websocket.lost)
                await self._change()
        except TimeoutError:
            self._give_up("a request timed out")
            raise RequestTimeout(f"No reply within {timeout_s} s; the episode is lost") from None
        except asyncio.CancelledError:  # the next reply would belong to this request
            self._give_up("a request was cancelled")
            raise
        finally:
            self._deadline = None
        return messages.popleft().payload

    def _change(self) -> asyncio.Future[None]:
        """Return a future for the next thing that happens on the connection."""
        waiter = self._waiter = self.loop.create_future()
        return waiter

    def _set_deadline(self, deadline: float) -> None:
        """Note until when a reply may come. One timer serves many requests: it is moved only when it fires."""
        self._deadline = deadline
        timer = self._deadline_timer
        if timer is None or timer.when() > deadline:
            if timer is not None:
                timer.cancel()
            self._deadline_timer = self.loop.call_at(deadline, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._deadline_timer = None
        if self._deadline is None:
            return
        if self.loop.time() < self._deadline:
            self._set_deadline(self._deadline)
        else:
            self._wake(TimeoutError())

    def _wake(self, error: BaseException | None = None) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _schedule_ping(self) -> None:
        interval = self._options.ping_interval_s
        if interval is not None and self.is_open:
            self._ping_timer = self.loop.call_later(interval, self._check, interval)

    def _check(self, interval: float) -> None:
        # Half of the interval: a server that was silent since shortly after the last check is not left for another one.
        ping = self.websocket.check(interval / 2)
        if self.websocket.lost is not None:
            self.drop(self.websocket.lost)
            return
        if ping and self._transport is not None:
            self._transport.write(ping)
        self._schedule_ping()

    def close(self, last_message: bytes | None = None, reason: str = "closed by the client") -> None:
        """Send a last message, the close message and a close frame, from the loop's own thread; never raises."""
        transport, self._transport = self._transport, None
        if transport is not None and not transport.is_closing() and not self.loop.is_closed():
            transport.write(self.websocket.goodbye(last_message))
            transport.close()  # sends the written bytes first; `drop` aborts
        self.drop(reason)

    def _give_up(self, reason: str) -> None:
        """Drop the connection, unless there is a close message to send, which `close` does."""
        if self.websocket.close_message is None:
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """Close the connection without a message, from the loop's own thread."""
        self.websocket.lose(reason)
        for timer in (self._ping_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()  # a server that does not read must not keep us waiting for our last bytes
        self._wake()

    # What asyncio calls. A BufferedProtocol: the transport reads into our buffer instead of a new one for each read.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of asyncio's
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take in the bytes that asyncio has put into the buffer."""
        websocket = self.websocket
        try:
            replies = websocket.feed(bytes(self._buffer[:nbytes]))
        except (AccessDenied, ConnectFailed) as exc:
            self._wake(exc)
            return
        if replies and self._transport is not None:
            self._transport.write(replies)
        if websocket.lost is not None:
            self.drop(websocket.lost)
        elif websocket.messages or self._is_opening:  # not for each piece of a long message
            self._wake()

    def eof_received(self) -> bool:
        """Close the transport: a server that has shut its side is gone."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the request or the handshake that waits."""
        if self.websocket.is_connecting:
            self._wake(closed_in_handshake())
        self.drop("the server closed the connection" if exc is None else f"connection lost: {exc}")
