"""The protections of servers hold behind a gateway: origins, hosts, tokens, login, addresses, large heads."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from fastapi import Request
from typer.testing import CliRunner
from websockets.sync.client import connect

import http_calls
from gateways import RunningGateway, counting_app
from openenv import GenericEnvClient
from openenv.cli.__main__ import build
from openenv.errors import AccessDenied
from openenv.server.access import AccessPolicy, OriginPolicy
from openenv.server.gateway.guard import GatewayGuard, networks
from servers import RunningServer

Start = Callable[..., RunningGateway]
Serve = Callable[..., RunningServer]
TOKENS = AccessPolicy(orchestrator="trainer", agent="helper", observer="viewer")
HANDSHAKE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def reporting_app(name: str, **options: Any) -> Any:
    """Return an application with a route that reports the head of its request."""
    app = counting_app(name, **options)

    @app.get("/head")
    def head(request: Request) -> list[tuple[str, str]]:
        return request.headers.items()

    return app


def fields_of(http: httpx2.Client, **headers: str) -> dict[str, str]:
    answer = http.get("/head", headers=headers)
    assert answer.status_code == 200, answer.text
    fields = [(name, value) for name, value in answer.json()]
    assert len({name for name, _ in fields}) == len(fields)
    return dict(fields)


def play(url: str, **options: Any) -> str:
    """Play two steps; return the server's name."""
    with GenericEnvClient(url, **options).sync() as client:
        client.reset()
        assert [client.step({"by": 2}).observation["total"] for _ in range(2)] == [2, 4]
        return str(client.step({"by": 1}).observation["server"])


# -- origins and hosts ------------------------------------------------------------------------------------------------


def test_foreign_pages_and_rebound_hosts_are_refused_over_every_transport(serve: Serve, start: Start) -> None:
    gateway = start(serve(counting_app("red")).url)
    own = gateway.url
    rebound = f"evil.example:{gateway.port}"
    foreign = [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://{rebound}", "Host": rebound},  # DNS rebinding: the browser believes that it is one site
    ]
    for headers in foreign:
        for path in ("/reset", "/web/reset", "/mcp", "/sessions", "/counting/tasks"):
            refused = http_calls.post(f"{own}{path}", json={}, headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (403, "FOREIGN_ORIGIN"), path
        for path in ("/ws", "/mcp", "/ws/ui"):
            lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "x", **headers}.items())
            handshake = f"GET {path} HTTP/1.1\r\n{lines}{HANDSHAKE}\r\n".encode()
            assert exchange(gateway.port, handshake).startswith(b"HTTP/1.1 403 "), path
    reader = {"Host": rebound, "Accept-Language": "en"}
    for path in ("/web/sessions", "/metrics", "/web/page", "/schema", "/state"):  # of the gateway, and of servers
        refused = http_calls.get(f"{own}{path}", headers=reader)
        assert (refused.status_code, refused.json()["code"]) == (403, "FOREIGN_ORIGIN"), path
    assert http_calls.get(f"{own}/web/", headers=reader).status_code == 200  # as at a server: the page has no secrets
    assert http_calls.get(f"{own}/ready", headers={"Host": rebound}).status_code == 200
    assert http_calls.get(f"{own}/schema", headers={"Host": rebound}).status_code == 200  # a program


def test_the_page_of_the_gateway_plays(serve: Serve, start: Start) -> None:
    gateway = start(serve(counting_app("red")).url)
    browser = {"Origin": gateway.url, "Accept-Language": "en"}
    with http_calls.Client(base_url=gateway.url, headers=browser) as page:
        assert page.get("/web/").status_code == 200
        assert page.get("/web/page").status_code == 200
        assert page.post("/web/reset", json={}).status_code == 200
        assert page.post("/web/step", json={"action": {"by": 3}}).json()["observation"]["total"] == 3
        assert page.get("/web/sessions").status_code == 200
    with connect(f"{gateway.url.replace('http', 'ws')}/ws/ui", origin=gateway.url, proxy=None) as peer:  # type: ignore[arg-type]
        assert json.loads(peer.recv(timeout=60))["type"] == "state_update"


def test_the_page_works_under_a_public_name_although_its_server_listens_on_loopback(serve: Serve, start: Start) -> None:
    server = serve(counting_app("red"))
    guard = GatewayGuard(origins=OriginPolicy(["http://maze.example"]))
    gateway = start(server.url, guard=guard)
    browser = {"Origin": "http://maze.example", "Host": "maze.example", "Accept-Language": "en"}
    assert http_calls.post(f"{server.url}/web/reset", json={}, headers=browser).status_code == 403  # without a gateway
    assert http_calls.post(f"{gateway.url}/web/reset", json={}, headers=browser).status_code == 200
    assert "http://maze.example" in http_calls.get(f"{gateway.url}/web/page", headers=browser).text
    assert http_calls.get(f"{gateway.url}/web/sessions", headers=browser).status_code == 200
    browser["Host"] = "other.example"
    assert http_calls.post(f"{gateway.url}/web/reset", json={}, headers=browser).status_code == 403


# -- addresses --------------------------------------------------------------------------------------------------------


def test_servers_get_the_host_and_the_address_of_the_client(serve: Serve, start: Start) -> None:
    server = serve(reporting_app("red"))
    claims = {"X-Forwarded-For": "8.8.8.8", "Forwarded": "for=8.8.8.8", "X-Real-IP": "8.8.8.8"}
    with http_calls.Client(base_url=start(server.url).url) as http:
        fields = fields_of(http, Host="maze.example:81", **claims)
    assert fields["host"] == "maze.example:81"
    assert fields["x-forwarded-for"] == "127.0.0.1"  # the client's claims are gone
    assert not {"forwarded", "x-real-ip"} & fields.keys()
    assert fields["via"] == "1.1 openenv-gateway"
    trusting = start(server.url, guard=GatewayGuard(trusted_proxies=networks(["10.0.0.0/8", "127.0.0.1"])))
    with http_calls.Client(base_url=trusting.url) as http:
        fields = fields_of(http, **claims)
        assert fields["x-forwarded-for"] == "8.8.8.8, 127.0.0.1"
        assert fields["x-real-ip"] == "8.8.8.8"
        assert fields_of(http)["x-forwarded-for"] == "127.0.0.1"
    elsewhere = start(server.url, guard=GatewayGuard(trusted_proxies=networks(["10.0.0.0/8"])))
    with http_calls.Client(base_url=elsewhere.url) as http:
        assert fields_of(http, **claims)["x-forwarded-for"] == "127.0.0.1"


@pytest.mark.parametrize(
    "line",
    [b"X-Forwarded-For : 8.8.8.8", b" X-Forwarded-For: 8.8.8.8", b"A: b\nX-Forwarded-For: 8.8.8.8", b"Host: other"],
)
def test_lines_that_parsers_read_differently_are_refused(serve: Serve, start: Start, line: bytes) -> None:
    gateway = start(serve(counting_app("red")).url)
    answer = exchange(gateway.port, b"GET /schema HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_a_gateway_with_tokens_protects_servers_without(serve: Serve, start: Start) -> None:
    gateway = start(serve(counting_app("red")).url, guard=GatewayGuard(AccessPolicy(orchestrator="trainer")))
    for wrong in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/schema", "/metrics", "/web/sessions", "/web/page", "/docs"):
            refused = http_calls.get(f"{gateway.url}{path}", headers=wrong)
            assert (refused.status_code, refused.json()["code"]) == (401, "UNAUTHORIZED"), path
            assert refused.headers["www-authenticate"] == "Bearer"
        assert http_calls.post(f"{gateway.url}/reset", json={}, headers=wrong).status_code == 401
    for protocol in ("v1", "v2"):
        with pytest.raises(AccessDenied):
            play(gateway.url, protocol=protocol)
        assert play(gateway.url, protocol=protocol, token="trainer") == "red"
    assert http_calls.get(f"{gateway.url}/docs?token=trainer").status_code == 200
    assert http_calls.get(f"{gateway.url}/schema?token=trainer").status_code == 401
    for path in ("/health", "/ready", "/web/", "/web/static/main.js"):
        assert http_calls.get(f"{gateway.url}{path}").status_code == 200
    assert http_calls.post(f"{gateway.url}/web/", json={}).status_code == 401


def test_roles_are_those_of_the_servers_and_need_servers_that_check_them(serve: Serve, start: Start) -> None:
    guarded, unguarded = serve(counting_app("red", access=TOKENS)), serve(counting_app("blue"))
    gateway = start(guarded.url, guard=GatewayGuard(TOKENS))
    assert play(gateway.url, token="trainer") == "red"
    with pytest.raises((AccessDenied, PermissionError)):
        play(gateway.url, token="helper")  # an agent may not reset
    observer = {"Authorization": "Bearer viewer"}
    assert http_calls.get(f"{gateway.url}/metrics", headers=observer).status_code == 200
    assert http_calls.post(f"{gateway.url}/reset", json={}, headers=observer).status_code == 403
    agent = {"Authorization": "Bearer helper"}
    assert http_calls.get(f"{gateway.url}/metrics", headers=agent).status_code == 403
    mixed = start(guarded.url, unguarded.url, guard=GatewayGuard(TOKENS))
    for headers in (agent, observer):
        refused = http_calls.get(f"{mixed.url}/schema", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
        assert "do not check roles" in refused.text
    assert play(mixed.url, token="trainer") in ("red", "blue")


@pytest.mark.parametrize("server_asks", [True, False])
def test_the_login_of_the_page_is_valid_on_all_its_routes(serve: Serve, start: Start, server_asks: bool) -> None:
    tokens = AccessPolicy(orchestrator="trainer", observer="viewer")
    options = {"access": tokens} if server_asks else {}
    servers = [serve(counting_app(name, **options)) for name in ("red", "blue")]
    gateway = start(*(server.url for server in servers), guard=GatewayGuard(AccessPolicy(orchestrator="trainer")))
    with http_calls.Client(base_url=gateway.url, headers={"Origin": gateway.url}) as page:
        assert page.get("/web/").status_code == 200
        assert page.get("/web/page").status_code == 401
        assert page.post("/web/login", json={"token": "wrong"}).status_code == 401
        login = page.post("/web/login", json={"token": "trainer"})
        assert (login.status_code, login.json()) == (200, {"role": "orchestrator"})
        assert login.headers["set-cookie"].startswith(f"openenv_token_{gateway.port}=")
        for _ in range(3):  # whichever server
            assert page.get("/web/page").status_code == 200
            assert page.get("/web/sessions").status_code == 200  # merged from all servers
        assert page.post("/web/reset", json={}).status_code == 200
        assert page.post("/web/step", json={"action": {"by": 4}}).json()["observation"]["total"] == 4
        cookies = "; ".join(f"{name}={value}" for name, value in page.cookies.items())
        url = f"{gateway.url.replace('http', 'ws')}/ws/ui"
        with connect(url, additional_headers={"cookie": cookies}, origin=gateway.url, proxy=None) as peer:  # type: ignore[arg-type]
            assert json.loads(peer.recv(timeout=60))["episode_state"]["step_count"] == 1
        assert page.get("/schema").status_code == 401  # the cookie is for the page only
        assert page.post("/web/logout").status_code == 200
        assert page.get("/web/page").status_code == 401


def test_servers_with_tokens_behind_a_gateway_without(serve: Serve, start: Start) -> None:
    servers = [serve(counting_app(name, access=AccessPolicy(orchestrator="trainer"))) for name in ("red", "blue")]
    gateway = start(*(server.url for server in servers))
    with pytest.raises(AccessDenied):
        play(gateway.url)
    assert play(gateway.url, token="trainer") in ("red", "blue")
    with http_calls.Client(base_url=gateway.url) as page:
        assert page.post("/web/login", json={"token": "trainer"}).status_code == 200
        assert page.get("/web/sessions").status_code == 200
        assert page.get("/web/page").status_code == 200


@pytest.mark.parametrize(("body", "status"), [(b"{", 401), (b"", 401), (b'{"token": "' + b"x" * 20_000 + b'"}', 413)])
def test_a_login_that_cannot_be_read_is_refused(serve: Serve, start: Start, body: bytes, status: int) -> None:
    gateway = start(serve(counting_app("red")).url, guard=GatewayGuard(AccessPolicy(orchestrator="trainer")))
    assert http_calls.post(f"{gateway.url}/web/login", content=body).status_code == status


@pytest.mark.slow_but_for("made", "given", "without")
@pytest.mark.parametrize(
    ("arguments", "variables", "token"),
    [
        pytest.param(("--host", "0.0.0.0"), {}, "printed", id="made"),
        pytest.param(("--host", "0.0.0.0"), {"OPENENV_TOKEN": "chosen"}, "chosen", id="chosen"),
        pytest.param(("--host", "0.0.0.0", "--token", "given"), {"OPENENV_TOKEN": "chosen"}, "given", id="given"),
        pytest.param(("--host", "0.0.0.0", "--no-token"), {}, None, id="without"),
        pytest.param((), {}, None, id="loopback"),
    ],
)
def test_the_command_asks_for_a_token_on_an_open_address(
    serve: Serve, arguments: tuple[str, ...], variables: dict[str, str], token: str | None
) -> None:
    server = serve(counting_app("red"))
    command = [sys.executable, "-m", "openenv", "gateway", server.url, "--port", "0", *arguments]
    with subprocess.Popen(command, env=environ_with(variables), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            port = int(re.search(r"http://[\d.]+:(\d+)", line)[1])  # type: ignore[index]
            if token == "printed":
                token = process.stderr.readline().removeprefix("token: ").strip()
                assert len(token) > 20
            url = f"http://127.0.0.1:{port}"
            assert http_calls.get(f"{url}/schema").status_code == (200 if token is None else 401)
            if token is not None:
                headers = {"Authorization": f"Bearer {token}"}
                assert http_calls.get(f"{url}/schema", headers=headers).status_code == 200
        finally:
            process.terminate()


def environ_with(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a command with these variables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENENV_")}
    return {**kept, **variables}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("http://a:1", "--trusted-proxies", "10.0.0.0/99"), "write addresses such as"),
        (("http://a:1", "--no-token", "--token", "x"), "contradicts"),
        (("http://a:1", "--token", "x", "--agent-token", "x"), "cannot be both"),
    ],
)
def test_wrong_options_of_protection_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(build(("gateway",)), ["gateway", *arguments])
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split())


# -- large heads ------------------------------------------------------------------------------------------------------


def exchange(port: int, data: bytes) -> bytes:
    """Send bytes; return everything that comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        raw.sendall(data)
        received = b""
        while chunk := raw.recv(65536):
            received += chunk
        return received


@pytest.mark.parametrize("upgrade", [b"", b"Upgrade: websocket\r\nConnection: Upgrade\r\n"])
@pytest.mark.parametrize(
    "fields",
    [b"x-padding: " + b"x" * 66_000 + b"\r\n", b"x: y\r\n" * 300, b"cookie: " + b"a=b; " * 14_000 + b"\r\n"],
)
def test_large_heads_get_431(serve: Serve, start: Start, upgrade: bytes, fields: bytes) -> None:
    gateway = start(serve(counting_app("red")).url)
    answer = exchange(gateway.port, b"GET /ws HTTP/1.1\r\nHost: x\r\n" + upgrade + fields + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"HEAD_TOO_LARGE" in answer
    assert play(gateway.url) == "red"
