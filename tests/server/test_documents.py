"""The pages about a server's routes, in a browser, on a server that asks for tokens."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

import http_calls
from environments import Idle
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve

TOKEN = "it's+a&token/?"  # all that an address or a script might stumble over


@pytest.fixture
def guarded(serve: Serve) -> Iterator[httpx2.Client]:
    """A server that asks for a token, as an address bar sees it: without headers."""
    app = create_app(Idle, Action, Observation, access=AccessPolicy(orchestrator=TOKEN, agent="agent-token"))
    with http_calls.Client(base_url=serve(app).url, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_a_page_is_opened_with_a_token_in_its_address_and_loads_the_document_with_it(
    guarded: httpx2.Client, path: str
) -> None:
    page = guarded.get(path, params={"token": TOKEN})
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["referrer-policy"] == "no-referrer"
    address = "/openapi.json?token=it%27s%2Ba%26token%2F%3F"
    assert address in page.text
    assert TOKEN not in page.text
    assert guarded.get(address).json()["openapi"].startswith("3")


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_without_a_token_a_page_says_how_to_give_one(guarded: httpx2.Client, path: str) -> None:
    for query in ({}, {"token": "wrong"}):
        refused = guarded.get(path, params=query)
        assert refused.status_code == 401
        assert "?token=TOKEN" in refused.json()["detail"]


def test_the_document_says_which_routes_ask_for_a_token(guarded: httpx2.Client) -> None:
    document = guarded.get("/openapi.json", params={"token": "agent-token"}).json()
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    asking = {path for path, operations in document["paths"].items() if "security" in str(operations)}
    assert {"/step", "/reset", "/state", "/mcp", "/metrics"} <= asking
    assert not {"/health", "/ready"} & asking
    assert document["paths"]["/step"]["post"]["security"] == [{"bearer": []}]


def test_what_the_page_then_sends_is_admitted(guarded: httpx2.Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Origin": str(guarded.base_url).rstrip("/")}
    assert guarded.post("/reset", headers=headers).status_code == 200


def test_tokens_in_an_address_are_for_pages_and_tools_only(guarded: httpx2.Client) -> None:
    assert guarded.get("/schema", params={"token": TOKEN}).status_code == 401
    assert guarded.post("/reset", params={"token": TOKEN}).status_code == 401


def test_a_server_without_tokens_documents_none(serve: Serve) -> None:
    app = create_app(Idle, Action, Observation)
    url = serve(app).url
    document = http_calls.get(f"{url}/openapi.json", trust_env=False).json()
    assert "security" not in str(document).lower()
    assert "'/openapi.json'" in http_calls.get(f"{url}/docs", trust_env=False).text


def test_tokens_that_come_later_are_documented_too(serve: Serve) -> None:
    app = create_app(Idle, Action, Observation)
    assert "components" in app.openapi()
    app.state.openenv_server.reconfigure(access=AccessPolicy(orchestrator="later"))
    assert "bearer" in app.openapi()["components"]["securitySchemes"]
