"""Keepalive: pings are answered and sent while no request runs, dead peers are noticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from openenv.client.driver import KeepaliveThread
from openenv.client.network import ConnectionOptions, parse_ws_url
from openenv.client.websocket import AsyncConnection, BlockingConnection
from openenv.errors import SessionLost
from servers import Serve
from waiting import wait_until, wait_until_async


class Client:
    def __init__(self) -> None:
        self.calls = 0

    def keep_alive(self) -> None:
        self.calls += 1


def test_clients_are_kept_alive_and_the_thread_ends_with_the_last() -> None:
    thread, first, second = KeepaliveThread(period_s=0.01), Client(), Client()
    thread.add(first)
    thread.add(second)
    wait_until(lambda: first.calls > 2 and second.calls > 2)
    thread.discard(first)
    thread.discard(second)
    wait_until(lambda: thread._thread is None)
    thread.add(first)
    before = first.calls
    wait_until(lambda: first.calls > before)
    thread.discard(first)


def test_a_client_that_is_garbage_collected_is_not_kept() -> None:
    thread = KeepaliveThread(period_s=0.01)
    thread.add(Client())
    wait_until(lambda: thread._thread is None)


def silent_server(serve: Callable[..., Any]) -> tuple[Any, threading.Event]:
    """Accepts, then is busy: pings are seen by the protocol, messages never answered."""
    done = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        done.set()

    return serve(app, lifespan="off"), done


def options(**kwargs: Any) -> ConnectionOptions:
    return ConnectionOptions(connect_timeout_s=30, message_timeout_s=30, **kwargs)


def test_a_blocking_connection_pings_a_quiet_server_and_reads_its_pong(serve: Serve) -> None:
    server, _ = silent_server(serve)
    connection = BlockingConnection(
        parse_ws_url(f"ws://127.0.0.1:{server.port}/"), options(ping_interval_s=0.02, ping_timeout_s=20)
    )
    connection.open()
    for _ in range(3):
        before = connection.websocket.last_read_at
        wait_until(lambda before=before: connection.keep_alive() or connection.websocket.last_read_at > before)  # type: ignore[misc]
    assert connection.is_open
    connection.close()


class SilentServer:
    """Shakes hands and then sends nothing more."""

    def __init__(self) -> None:
        self.port = 0

    async def __aenter__(self) -> SilentServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import base64
        import hashlib
        import re

        head = await reader.readuntil(b"\r\n\r\n")
        key = re.search(rb"Sec-WebSocket-Key: (\S+)", head)
        assert key is not None
        digest = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        writer.write(b"HTTP/1.1 101 OK\r\nSec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n")
        while await reader.read(1000):
            pass
        writer.close()


@pytest.mark.anyio
async def test_a_server_that_does_not_answer_pings_is_given_up() -> None:
    async with SilentServer() as server:
        address = parse_ws_url(f"ws://127.0.0.1:{server.port}/")
        awaited = AsyncConnection(address, options(ping_interval_s=0.03, ping_timeout_s=0.06))
        await awaited.open()
        blocking = BlockingConnection(address, options(ping_interval_s=0.03, ping_timeout_s=0.06))
        await asyncio.to_thread(blocking.open)
        with pytest.raises(SessionLost, match="does not answer pings"):
            await awaited.exchange(b"{}", 30)
        await wait_until_async(lambda: blocking.keep_alive() or not blocking.is_open)
        assert "does not answer pings" in blocking.lost_reason
        with pytest.raises(SessionLost):
            blocking.exchange(b"{}", 1)


@pytest.mark.anyio
async def test_an_awaited_connection_stays_open_while_pongs_come(serve: Serve) -> None:
    server, done = silent_server(serve)
    connection = AsyncConnection(
        parse_ws_url(f"ws://127.0.0.1:{server.port}/"), options(ping_interval_s=0.03, ping_timeout_s=20)
    )
    await connection.open()
    for _ in range(5):
        before = connection.websocket.last_read_at
        await asyncio.to_thread(wait_until, lambda before=before: connection.websocket.last_read_at > before)
    assert connection.is_open
    connection.close()
    assert await asyncio.to_thread(done.wait, 30)
    assert connection.lost_reason == "closed by the client"
