"""Tokens and the page: who sees what, how a browser logs in, and where its cookie counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

import http_calls
from openenv.server.access import AccessPolicy
from servers import Serve

TOKENS = {"orchestrator": 'orch;=tok"en%20', "agent": "agent-token", "observer": "obs_token~"}
ACTING = [
    ("POST", "/web/reset"),
    ("POST", "/web/step"),
    ("POST", "/web/close"),
    ("POST", "/web/call"),
    ("DELETE", "/web/sessions/x"),
    ("POST", "/web/login"),
    ("POST", "/web/logout"),
]


@pytest.fixture(scope="module")
def guarded(serve_once: Serve, make_app: Callable[..., Any]) -> Any:
    """A server that asks for tokens."""
    return serve_once(make_app(access=AccessPolicy(**TOKENS), max_concurrent_envs=64))


@pytest.mark.parametrize("role", ["orchestrator", "observer"])
def test_a_token_is_given_once_for_a_cookie_that_scripts_cannot_read(
    guarded: Any, visit: Callable[..., Any], role: str
) -> None:
    browser = visit(guarded.url)
    refused = browser.get("/web/page")
    assert (refused.status_code, refused.json()["code"]) == (401, "UNAUTHORIZED")
    answer = browser.post("/web/login", {"token": f" {TOKENS[role]} "})
    assert answer.json() == {"role": role}
    cookie = answer.headers["set-cookie"]
    assert all(part in cookie for part in (f"openenv_token_{guarded.port}=", "HttpOnly", "SameSite=Strict", "Path=/"))
    assert "Secure" not in cookie
    page = browser.get("/web/page").json()
    assert (page["role"], page["asks_for_token"]) == (role, True)
    with browser.live() as live:
        assert live.next()["type"] == "hello"
    assert browser.post("/web/reset").status_code == (200 if role == "orchestrator" else 403)
    browser.post("/web/logout")
    assert browser.get("/web/page").status_code == 401


def test_the_cookie_is_marked_for_tls_where_the_browser_uses_it(guarded: Any, visit: Callable[..., Any]) -> None:
    browser = visit(guarded.url)
    answer = browser.post("/web/login", {"token": TOKENS["observer"]}, headers={"X-Forwarded-Proto": "https"})
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("body", [{"token": "wrong"}, {"token": 5}, {}, [], {"token": "x" * 100_000}])
def test_a_wrong_token_gets_no_cookie(guarded: Any, visit: Callable[..., Any], body: Any) -> None:
    answer = visit(guarded.url).post("/web/login", body)
    assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED")
    assert "set-cookie" not in answer.headers


def test_an_agent_cannot_log_in_nor_see_anything_but_the_bare_page(guarded: Any, visit: Callable[..., Any]) -> None:
    browser = visit(guarded.url)
    assert browser.post("/web/login", {"token": TOKENS["agent"]}).status_code == 403
    agent = visit(guarded.url, token=TOKENS["agent"])
    for path in ("/web/page", "/web/state", "/web/sessions", "/web/metadata"):
        assert agent.get(path).status_code == 403, path


def test_the_cookie_counts_for_the_page_and_nowhere_else(guarded: Any, visit: Callable[..., Any]) -> None:
    browser = visit(guarded.url)
    browser.post("/web/login", {"token": TOKENS["orchestrator"]})
    assert browser.post("/web/reset").status_code == 200
    assert browser.post("/reset").status_code == 401
    assert browser.get("/state").status_code == 401
    assert browser.post("/mcp").status_code == 401
    assert browser.get("/metadata").status_code == 401


def test_a_token_in_the_address_does_not_count_here(guarded: Any, visit: Callable[..., Any]) -> None:
    assert visit(guarded.url).get("/web/page", params={"token": TOKENS["orchestrator"]}).status_code == 401


def test_a_bearer_header_counts_and_comes_before_the_cookie(guarded: Any, visit: Callable[..., Any]) -> None:
    browser = visit(guarded.url)
    browser.post("/web/login", {"token": TOKENS["orchestrator"]})
    observer = {"Authorization": f"Bearer {TOKENS['observer']}"}
    assert browser.get("/web/page", headers=observer).json()["role"] == "observer"
    assert browser.get("/web/page", headers={"Authorization": "Bearer nonsense"}).status_code == 401


def test_a_socket_without_a_token_is_refused(guarded: Any, visit: Callable[..., Any]) -> None:
    with pytest.raises(InvalidStatus) as caught, visit(guarded.url).live():
        pass
    assert caught.value.response.status_code == 401


def test_an_observers_own_view_is_empty_and_shows_all_sessions(guarded: Any, visit: Callable[..., Any]) -> None:
    player, observer = visit(guarded.url), visit(guarded.url)
    player.post("/web/login", {"token": TOKENS["orchestrator"]})
    player.post("/web/reset", {"episode_id": "watched"})
    observer.post("/web/login", {"token": TOKENS["observer"]})
    with observer.live() as live:
        assert live.next()["log"] == []
    shown = observer.get("/web/sessions").json()["sessions"]
    assert "watched" in [session["episode_id"] for session in shown]
    assert not any("token" in key for session in shown for key in session)
    assert player.post("/web/close").json() == {"closed": True}


def test_without_tokens_every_visitor_is_an_orchestrator(street: Any, visit: Callable[..., Any]) -> None:
    answer = visit(street.url).post("/web/login", {"token": "anything"})
    assert answer.json() == {"role": "orchestrator"}
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(("method", "path"), ACTING)
def test_foreign_pages_cannot_act(street: Any, method: str, path: str) -> None:
    with http_calls.Client(base_url=street.url, trust_env=False) as client:
        refused = client.request(method, path, headers={"Origin": "http://evil.example"})
        assert (refused.status_code, refused.json()["code"]) == (403, "FOREIGN_ORIGIN")
        own = client.request(method, path, headers={"Origin": street.url})
        assert own.status_code != 403


@pytest.mark.parametrize("path", ["/web/page", "/web/state", "/web/sessions", "/web/metadata"])
def test_a_page_under_a_name_that_was_made_to_point_here_cannot_look(street: Any, path: str) -> None:
    with http_calls.Client(base_url=street.url, trust_env=False) as client:
        refused = client.get(path, headers={"Host": "evil.example", "Accept-Language": "en"})
        assert (refused.status_code, refused.json()["code"]) == (403, "FOREIGN_ORIGIN")


def test_servers_on_two_ports_of_one_host_do_not_log_each_other_out(
    guarded: Any, serve: Serve, visit: Callable[..., Any], make_app: Callable[..., Any]
) -> None:
    other = serve(make_app(access=AccessPolicy(orchestrator="other")))
    browser = visit(guarded.url)
    browser.post("/web/login", {"token": TOKENS["orchestrator"]})
    browser.post(f"{other.url}/web/login", {"token": "other"})
    assert browser.get("/web/page").status_code == 200
    assert browser.get(f"{other.url}/web/page").status_code == 200
