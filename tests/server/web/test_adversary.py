"""What goes wrong on purpose: environments that hang, crowds, servers that were started again, hooks that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.sync.client import connect

from openenv.errors import ExecutionError
from openenv.server.access import AccessPolicy
from openenv.server.web import visitors as visitors_module

Serve = Callable[..., Any]
Visit = Callable[..., Any]


@pytest.fixture
def apart() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that are not answered at once."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def hanging(envs: dict[str, type[Any]]) -> Iterator[type[Any]]:
    """An environment that hangs in each step until the test ends."""

    class Hanging(envs["Street"]):  # type: ignore[misc,name-defined]
        gate = threading.Event()

        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            self.gate.wait(60)
            return super().step(action)

    yield Hanging
    Hanging.gate.set()


def _mine(browser: Any) -> dict[str, Any] | None:
    sessions = browser.get("/web/sessions").json()["sessions"]
    return next((session for session in sessions if session["is_mine"]), None)


@pytest.mark.parametrize("who", ["the visitor", "an operator"])
def test_a_session_that_hangs_can_be_ended_and_replaced(
    serve: Serve, visit: Visit, make_app: Any, hanging: type[Any], apart: ThreadPoolExecutor, who: str
) -> None:
    server = serve(make_app(hanging))
    browser, other = visit(server.url), visit(server.url)
    browser.post("/web/reset")
    with browser.live() as live:
        stepping = apart.submit(browser.step)
        live.until("session", state="busy")
        if who == "the visitor":
            assert browser.post("/web/close").json() == {"closed": True}
        else:
            session = _mine(browser)
            assert session is not None
            assert other.client.delete(f"/web/sessions/{session['session_id']}").status_code == 200
        lost = stepping.result(timeout=30)
        assert (lost.status_code, lost.json()["code"]) == (410, "SESSION_LOST")
        assert browser.post("/web/reset", {"start": 1}).json()["observation"]["place"] == 1
        assert live.until("reset")["observation"]["place"] == 1


def test_a_visitor_learns_that_a_trainer_took_the_slot_of_a_hanging_session(
    serve: Serve, visit: Visit, make_app: Any, hanging: type[Any], apart: ThreadPoolExecutor
) -> None:
    server = serve(make_app(hanging, max_concurrent_envs=1))
    browser = visit(server.url)
    browser.post("/web/reset")
    with browser.live() as live:
        stepping = apart.submit(browser.step)
        live.until("session", state="busy")
        with connect(f"ws{server.url.removeprefix('http')}/ws", proxy=None) as trainer:
            trainer.send('{"type": "reset"}')
            assert "observation" in str(trainer.recv(timeout=30))
            assert stepping.result(timeout=30).json()["reason"] == "evicted"
            assert live.until("session", state="lost")["reason"] == "evicted"


def test_a_constructor_that_hangs_can_be_given_up(
    serve: Serve, visit: Visit, make_app: Any, envs: dict[str, type[Any]], apart: ThreadPoolExecutor
) -> None:
    gate = threading.Event()
    made: list[int] = []

    class Late(envs["Street"]):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            made.append(1)
            if len(made) == 1:
                gate.wait(60)
            super().__init__()

    server = serve(make_app(Late))
    browser = visit(server.url)
    try:
        resetting = apart.submit(browser.post, "/web/reset")
        server.wait_for(lambda: made)
        (session,) = browser.get("/web/sessions").json()["sessions"]
        assert session["kind"] == "page"
        assert browser.client.delete(f"/web/sessions/{session['session_id']}").status_code == 200
        assert resetting.result(timeout=30).json()["reason"] == "ended by an operator"
        assert browser.post("/web/reset").status_code == 200
    finally:
        gate.set()
    server.wait_for(lambda: server.manager.active == 1)
    assert browser.step().status_code == 200


def test_many_visitors_do_not_end_the_session_of_an_active_one(
    serve: Serve, visit: Visit, make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "_MAX_VISITORS", 3)
    server = serve(make_app(access=AccessPolicy(orchestrator="orc", observer="obs")))
    player, observer = visit(server.url, token="orc"), visit(server.url, token="obs", cookie=False)
    player.post("/web/reset", {"start": 1})
    for number in range(6):
        mask = {"Cookie": f"openenv_visitor=mask-{number}"}
        for path in ("/web/", "/web/sessions", "/web/state"):
            assert observer.get(path, headers=mask).status_code == 200
    assert player.step().json()["observation"]["place"] == 2
    assert len(server.app.state.openenv_web.visitors.all()) <= 5


def test_reading_without_loading_the_page_creates_no_visitor(serve: Serve, visit: Visit, make_app: Any) -> None:
    server = serve(make_app())
    stranger = visit(server.url, cookie=False)
    for number in range(5):
        for path in ("/web/sessions", "/web/state", "/web/page"):
            stranger.get(path, headers={"Cookie": f"openenv_visitor=mask-{number}"})
    assert len(server.app.state.openenv_web.visitors.all()) == 1


def test_a_step_of_a_visitor_whom_the_server_no_longer_knows_begins_nothing(
    serve: Serve, visit: Visit, make_app: Any
) -> None:
    old = serve(make_app())
    browser = visit(old.url)
    browser.post("/web/reset")
    new = serve(make_app())  # as if it were the same, started again
    later = visit(new.url, cookie=False)
    later.client.cookies = browser.client.cookies
    for path in ("/web/step", "/web/call"):
        lost = later.post(path, {"action": {"direction": "left"}, "name": "x"})
        assert (lost.status_code, lost.json()["reason"]) == (410, "unknown")
    assert new.manager.active == 0
    assert later.post("/web/reset").status_code == 200
    assert later.step().status_code == 200


def test_what_visitors_have_left_behind_is_thrown_away(
    serve: Serve, visit: Visit, make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "_MAX_ORPHANED_BYTES", 0)
    monkeypatch.setattr(visitors_module, "_KEEP_PERIOD_S", 0.05)
    server = serve(make_app())
    left, playing = visit(server.url), visit(server.url)
    for browser in (left, playing):
        browser.post("/web/reset")
        browser.step()
    session = _mine(left)
    assert session is not None
    playing.client.delete(f"/web/sessions/{session['session_id']}")
    visitors = server.app.state.openenv_web.visitors
    server.wait_for(lambda: sum(len(visitor.episode.entries) for visitor in visitors.all()) == 1)
    assert playing.step().json()["observation"]["place"] == 2
    assert left.step().json()["reason"] == "ended by an operator"


@pytest.mark.parametrize("hook", ["text that cannot be sent", "a label that cannot be sent", "an exit"])
def test_a_step_counts_even_if_its_rendering_fails(
    serve: Serve, visit: Visit, make_app: Any, envs: dict[str, type[Any]], hook: str
) -> None:
    class Painter(envs["Street"]):  # type: ignore[misc,name-defined]
        def render_web(self, observation: dict[str, Any]) -> str | None:
            if hook == "an exit":
                raise SystemExit(3)
            return "\ud800" if hook == "text that cannot be sent" else None

        def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
            return [("\ud800" if hook == "a label that cannot be sent" else "go", {"direction": "right"})]

    server = serve(make_app(Painter))
    browser = visit(server.url)
    assert browser.post("/web/reset").status_code == 200
    assert browser.step().json()["observation"]["place"] == 1
    with browser.live() as live:
        hello = live.until("hello")
        assert (len(hello["log"]), hello["render"]["html"]) == (1, None)


def test_a_step_counts_where_the_state_is_another_servers_and_cannot_be_had(
    serve: Serve, visit: Visit, make_app: Any, envs: dict[str, type[Any]]
) -> None:
    class Proxy(envs["Street"]):  # type: ignore[misc,name-defined]
        @property
        def state(self) -> Any:
            raise ExecutionError("the server behind has no state")

    server = serve(make_app(Proxy))
    browser = visit(server.url)
    browser.post("/web/reset")
    assert browser.step().json()["reward"] == 1.0
    with browser.live() as live:
        assert live.until("hello")["episode"]["step_count"] == 1


def test_a_host_that_is_none_gets_into_no_program(serve: Serve, visit: Visit, make_app: Any) -> None:
    server = serve(make_app())
    browser = visit(server.url)
    for host in ('x"+exit()+"', "x')", "a b"):
        shown = browser.get("/web/page", headers={"Host": host}).json()["quick_start"]["text"]
        assert host not in shown
        compile(shown, "quick start", "exec")
    assert "[::1]:80" in browser.get("/web/page", headers={"Host": "[::1]:80"}).json()["quick_start"]["text"]


def test_the_page_of_an_environment_that_hangs_is_shown(
    serve: Serve, visit: Visit, make_app: Any, envs: dict[str, type[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openenv.server.web import page_description as page_module

    gate = threading.Event()
    calls: list[int] = []

    class Silent(envs["Street"]):  # type: ignore[misc,name-defined]
        def get_metadata(self) -> Any:
            calls.append(1)
            gate.wait(60)
            described = super().get_metadata()
            return described.model_copy(update={"author": "the author"})

    monkeypatch.setattr(page_module, "_PATIENCE_S", 0.1)
    server = serve(make_app(Silent))
    browser = visit(server.url)
    try:
        for _ in range(3):
            assert browser.get("/web/page").json()["name"] == "Silent"
        assert len(calls) == 1
    finally:
        gate.set()
    server.wait_for(lambda: browser.get("/web/page").json()["author"] == "the author")


def test_a_description_that_cannot_be_sent_is_an_error_that_says_so(
    serve: Serve, visit: Visit, make_app: Any, envs: dict[str, type[Any]]
) -> None:
    class Broken(envs["Street"]):  # type: ignore[misc,name-defined]
        def get_metadata(self) -> Any:
            return super().get_metadata().model_copy(update={"description": "\ud800"})

    server = serve(make_app(Broken))
    browser = visit(server.url)
    for path in ("/web/page", "/web/metadata"):
        answer = browser.get(path)
        assert (answer.status_code, answer.json()["code"]) == (500, "EXECUTION_ERROR")


def test_the_cookie_of_a_login_does_not_reveal_the_token(serve: Serve, visit: Visit, make_app: Any) -> None:
    server = serve(make_app(access=AccessPolicy(orchestrator="orc-secret")))
    browser = visit(server.url)
    cookie = browser.post("/web/login", {"token": "orc-secret"}).headers["set-cookie"]
    assert "orc-secret" not in cookie
    assert browser.get("/web/page").json()["role"] == "orchestrator"
    kept = cookie.partition("=")[2].partition(";")[0]
    bare = visit(server.url, cookie=False)
    assert bare.get("/web/page", headers={"Authorization": f"Bearer {kept}"}).status_code == 401
    assert bare.get("/web/page", headers={"Cookie": f"openenv_token_{server.port}=orc-secret"}).status_code == 401
    assert bare.post("/reset", headers={"Cookie": f"openenv_token_{server.port}={kept}"}).status_code == 401
