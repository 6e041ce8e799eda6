"""Web pages of another origin cannot drive a server; its own pages, listed ones and programs can."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import http_calls
from environments import Idle
from openenv.server.access import OriginPolicy
from openenv.server.app import create_app
from openenv.settings import allowed_origins
from openenv.types import Action, Observation
from servers import Serve

CALLS = [
    ("POST", "/reset", {}),
    ("POST", "/step", {"action": {}}),
    ("POST", "/mcp", {}),
    ("DELETE", "/sessions/x", None),
]


def test_a_foreign_page_is_refused_on_everything_that_acts(serve: Serve) -> None:
    server = serve(create_app(Idle, Action, Observation))
    foreign = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        for method, path, body in CALLS:
            refused = client.request(method, path, json=body, headers=foreign)
            assert (refused.status_code, refused.json()["code"]) == (403, "FOREIGN_ORIGIN")
            for allowed in ({}, {"Origin": server.url}):
                assert client.request(method, path, json=body, headers=allowed).status_code != 403
    address = f"ws://127.0.0.1:{server.port}/ws"
    with pytest.raises(InvalidStatus) as caught:
        connect(address, proxy=None, origin="http://evil.example").__enter__()  # type: ignore[arg-type]
    assert caught.value.response.status_code == 403
    with connect(address, proxy=None, origin=server.url) as connection:
        connection.send('{"type": "reset"}')
        assert "observation" in str(connection.recv(timeout=10))


def test_a_setting_allows_further_origins(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_ALLOWED_ORIGINS", "https://lab.example, http://localhost:3000/")
    server = serve(create_app(Idle, Action, Observation))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        for origin, status in [("https://lab.example", 200), ("http://localhost:3000", 200), ("http://x.example", 403)]:
            assert client.post("/reset", json={}, headers={"Origin": origin}).status_code == status


@pytest.mark.parametrize(
    ("origin", "host", "refused"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", False),
        ("http://LOCALHOST:8000", "localhost:8000", False),
        ("http://[::1]:8000", "[::1]:8000", False),
        ("https://envs.example", "envs.example", False),
        ("https://envs.example", "envs.example:443", False),
        ("http://localhost:3000", "localhost:8000", True),
        ("http://localhost:8000", "127.0.0.1:8000", True),
        ("http://evil.example", "127.0.0.1:8000", True),
        ("null", "127.0.0.1:8000", True),
        ("file://", "127.0.0.1:8000", True),
        ("http://127.0.0.1:port", "127.0.0.1:8000", True),
        ("http://", "", True),
    ],
)
def test_an_origin_is_foreign_unless_host_and_port_are_those_of_the_request(
    origin: str, host: str, refused: bool
) -> None:
    scope = {"headers": [(b"host", host.encode()), (b"origin", origin.encode())]}
    assert OriginPolicy().refuses(scope) is refused
    assert OriginPolicy(["*"]).refuses(scope) is False


def test_the_setting_is_a_list_separated_by_commas() -> None:
    assert allowed_origins({}) == frozenset()
    assert allowed_origins({"OPENENV_ALLOWED_ORIGINS": " a , ,b"}) == {"a", "b"}


def test_a_page_whose_name_was_made_to_point_at_loopback_is_refused(serve: Serve) -> None:
    server = serve(create_app(Idle, Action, Observation))
    rebound = {"Host": f"evil.example:{server.port}", "Origin": f"http://evil.example:{server.port}"}
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        assert client.post("/reset", headers=rebound).status_code == 403
        by_name = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
        assert client.post("/reset", headers=by_name).status_code == 200
        assert client.post("/reset", headers={"Host": "gateway.internal"}).status_code == 200  # a program, no page


BROWSER = {"Accept-Language": "en", "User-Agent": "Mozilla/5.0"}


@pytest.fixture(scope="module")
def still(serve_once: Serve) -> Any:
    """A server that several tests share."""
    return serve_once(create_app(Idle, Action, Observation))


@pytest.mark.parametrize("path", ["/state", "/metadata", "/schema", "/metrics", "/sessions/x", "/list_environments"])
def test_a_page_whose_name_was_made_to_point_at_loopback_cannot_look_either(still: Any, path: str) -> None:
    """A browser sends no origin with a GET to the name that the page has; it does tell its languages."""
    server = still
    foreign = {"Host": f"evil.example:{server.port}"}
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        refused = client.get(path, headers={**BROWSER, **foreign})
        assert (refused.status_code, refused.json()["code"]) == (403, "FOREIGN_ORIGIN")
        assert "evil.example" in refused.json()["detail"]
        for known in (
            BROWSER,
            {**BROWSER, "Host": f"localhost:{server.port}"},
            {**BROWSER, "Host": "192.0.2.7:8000"},  # an address points nowhere else
            {**BROWSER, "Host": "lab.example", "Sec-Fetch-Site": "same-origin"},  # behind a proxy that ends TLS
            foreign,  # a program behind a proxy on this machine
        ):
            assert client.get(path, headers=known).status_code != 403, known


def test_a_name_that_a_setting_lists_may_look(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_ALLOWED_ORIGINS", "http://lab.example")
    server = serve(create_app(Idle, Action, Observation))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        for host, status in [("lab.example", 200), ("lab.example:8000", 403), ("other.example", 403)]:
            assert client.get("/state", headers={**BROWSER, "Host": host}).status_code == status
