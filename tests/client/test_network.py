"""Addresses, and proxies: a small CONNECT proxy leads clients to a server under a name that exists nowhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.client.network import (
    Address,
    HttpProxy,
    convert_to_ws_url,
    hf_space_subdomain,
    parse_ws_url,
    proxy_for,
    tunnel_request,
)
from openenv.errors import ConnectFailed

NAME = "environment.test"


class ConnectProxy:
    """Tunnels every CONNECT to one port, or refuses it."""

    def __init__(self, target_port: int | None) -> None:
        self._target = target_port
        self.heads: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(4096)
        self.heads.append(head.decode())
        if self._target is None:
            sock.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            sock.close()
            return
        upstream = socket.create_connection(("127.0.0.1", self._target))
        self._open.append(upstream)
        sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        threading.Thread(target=self._pump, args=(upstream, sock), daemon=True).start()
        self._pump(sock, upstream)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listener, *self._open):
            sock.close()


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.fixture
def proxy(parrot: Any) -> Iterator[ConnectProxy]:
    server = ConnectProxy(parrot.port)
    yield server
    server.close()


@pytest.fixture
def refusing() -> Iterator[ConnectProxy]:
    server = ConnectProxy(None)
    yield server
    server.close()


def test_a_blocking_client_goes_through_the_proxy(environ: pytest.MonkeyPatch, proxy: ConnectProxy) -> None:
    environ.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
    with GenericEnvClient(f"http://{NAME}:7777").sync() as client:
        assert client.reset(seed=1).observation["text"] == "seed 1"
    credentials = base64.b64encode(b"user:p@ss").decode()
    assert proxy.heads[0].startswith(f"CONNECT {NAME}:7777 HTTP/1.1\r\n")
    assert f"Proxy-Authorization: Basic {credentials}\r\n" in proxy.heads[0]


@pytest.mark.anyio
async def test_an_awaited_client_goes_through_the_proxy(environ: pytest.MonkeyPatch, proxy: ConnectProxy) -> None:
    environ.setenv("http_proxy", f"127.0.0.1:{proxy.port}")
    async with GenericEnvClient(f"http://{NAME}:7777") as client:
        assert (await client.reset(seed=1)).observation["text"] == "seed 1"
    assert len(proxy.heads) == 1


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "awaited"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_refuses_is_named(
    environ: pytest.MonkeyPatch, refusing: ConnectProxy, scheme: str, blocking: bool
) -> None:
    environ.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{refusing.port}")
    client = GenericEnvClient(f"{scheme}://{NAME}:7777")

    async def reset() -> None:
        await client.reset()

    with pytest.raises(ConnectFailed, match=r"the proxy .* refused"):
        client.sync().reset() if blocking else asyncio.run(reset())
    assert len(refusing.heads) == 1


def test_local_addresses_never_use_a_proxy(environ: pytest.MonkeyPatch, parrot: Any, refusing: ConnectProxy) -> None:
    environ.setenv("http_proxy", f"http://127.0.0.1:{refusing.port}")
    with GenericEnvClient(parrot.url).sync() as client:
        client.reset()
    assert refusing.heads == []


@pytest.mark.parametrize(
    ("variables", "address", "expected"),
    [
        ({}, Address(NAME, 80, "/", False), None),
        ({"http_proxy": "http://p:3128"}, Address(NAME, 80, "/", False), HttpProxy("p", 3128, None)),
        ({"http_proxy": "p"}, Address(NAME, 80, "/", False), HttpProxy("p", 80, None)),
        ({"http_proxy": "http://p:3128"}, Address(NAME, 443, "/", True), None),
        ({"https_proxy": "http://p:3128"}, Address(NAME, 443, "/", True), HttpProxy("p", 3128, None)),
        ({"http_proxy": "http://p:1", "no_proxy": "test"}, Address(NAME, 80, "/", False), None),
        ({"http_proxy": "socks5://p:1"}, Address(NAME, 80, "/", False), None),
        ({"http_proxy": "http://p:1"}, Address("localhost", 80, "/", False), None),
    ],
)
def test_the_usual_variables_decide(
    environ: pytest.MonkeyPatch, variables: dict[str, str], address: Address, expected: HttpProxy | None
) -> None:
    for name, value in variables.items():
        environ.setenv(name, value)
    assert proxy_for(address) == expected


def test_an_ipv6_address_is_asked_for_in_brackets() -> None:
    request = tunnel_request(Address("2001:db8::1", 80, "/", False), HttpProxy("p", 1, None))
    assert request.startswith(b"CONNECT [2001:db8::1]:80 HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://host:8000", "ws://host:8000"),
        ("https://host/", "wss://host"),
        ("HTTPS://host//", "wss://host"),
        ("ws://host/base/", "ws://host/base"),
        ("wss://host", "wss://host"),
        ("host:8000", "ws://host:8000"),
        (" localhost ", "ws://localhost"),
        ("ftp://host", "ftp://host"),
    ],
)
def test_every_form_becomes_a_websocket_url(text: str, expected: str) -> None:
    assert convert_to_ws_url(text) == expected


@pytest.mark.parametrize(
    ("url", "expected", "authority"),
    [
        ("ws://host/ws", Address("host", 80, "/ws", False), "host"),
        ("wss://host/ws", Address("host", 443, "/ws", True), "host"),
        ("ws://host:443/ws?a=1", Address("host", 443, "/ws?a=1", False), "host:443"),
        ("wss://host:8443", Address("host", 8443, "/", True), "host:8443"),
        ("ws://[::1]:9/ws", Address("::1", 9, "/ws", False), "[::1]:9"),
    ],
)
def test_a_websocket_url_is_split(url: str, expected: Address, authority: str) -> None:
    assert parse_ws_url(url) == expected
    assert parse_ws_url(url).authority == authority


@pytest.mark.parametrize("url", ["http://host", "ws://", "host", "ftp://host/ws", "ws://host:port/"])
def test_what_is_no_websocket_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_ws_url(url)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("env.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("example.com", False),
        ("localhost.example.com", False),
    ],
)
def test_local_addresses_are_known(host: str, local: bool) -> None:
    assert Address(host, 80, "/", False).is_local is local


@pytest.mark.parametrize(
    ("repo", "subdomain"),
    [("Org/My_Space", "org-my-space"), ("a/b.c--d", "a-b-c-d"), ("-x-/-y-", "x-y"), ("Ü/z", "z")],
)
def test_a_space_has_its_subdomain(repo: str, subdomain: str) -> None:
    assert hf_space_subdomain(repo) == subdomain
