"""The page's routes: files, description, reset, step, state, errors; in every mode and on every runner."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import http_calls
from environments import Idle
from openenv.server.app import create_app
from openenv.types import Action, EnvironmentMetadata, Observation, State
from servers import Serve

ROOT = Path(__file__).resolve().parents[3]


def test_the_root_leads_to_the_page_also_behind_a_prefix(street: Any, visit: Callable[..., Any]) -> None:
    with http_calls.Client(base_url=street.url, trust_env=False) as client:
        proxied = {"X-Forwarded-For": "10.0.0.7"}
        for path, headers, place in (("/", {}, "/web/"), ("/", proxied, "web/"), ("/web", {}, "web/")):
            answer = client.get(path, headers=headers)
            assert (answer.status_code, answer.headers["location"]) == (307, place)
        assert client.get("/", follow_redirects=True).url.path == "/web/"


def test_the_page_works_under_a_prefix(serve: Serve, visit: Callable[..., Any], make_app: Any) -> None:
    browser = visit(serve(make_app(), root_path="/envs/street").url)
    assert browser.get("/web/").status_code == 200
    assert browser.get("/web/static/favicon.svg").status_code == 200
    assert "/envs/street" in browser.get("/web/page").json()["quick_start"]["text"]
    with browser.live() as live:
        live.until("hello")
        assert browser.post("/web/reset").status_code == 200
        assert live.until("reset")["observation"]["text"] == "hello"


def test_the_page_has_a_cookie_for_new_browsers_and_a_strict_policy(street: Any) -> None:
    with http_calls.Client(base_url=street.url, trust_env=False) as client:
        first = client.get("/web/")
        cookie = first.headers["set-cookie"]
        assert cookie.startswith("openenv_visitor=")
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert len(client.cookies["openenv_visitor"]) >= 22
        assert "set-cookie" not in client.get("/web/").headers
        policy = first.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "script-src" not in policy  # so 'self' counts for scripts
        assert first.headers["x-content-type-options"] == "nosniff"


def test_files_are_revalidated_and_only_those_of_the_page_are_served(street: Any) -> None:
    with http_calls.Client(base_url=street.url, trust_env=False) as client:
        page = client.get("/web/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        icon = client.get("/web/static/favicon.svg")
        assert (icon.status_code, icon.headers["cache-control"]) == (200, "no-cache")
        again = client.get("/web/static/favicon.svg", headers={"If-None-Match": icon.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = client.head("/web/static/favicon.svg")
        assert (head.status_code, head.content) == (200, b"")
        for name in ("..%2fattach.py", "%2e%2e%2fattach.py", "nothing.js", ".hidden", "%00", "x%5c..%5cy"):
            assert client.get(f"/web/static/{name}").status_code == 404, name


def test_the_description_has_all_that_the_page_shows(street: Any, visit: Callable[..., Any]) -> None:
    page = visit(street.url).get("/web/page").json()
    assert page["title"] == "OpenEnv Agentic Environment: Street"
    assert (page["name"], page["mode"], page["role"], page["asks_for_token"]) == (
        "Street",
        "simulation",
        "orchestrator",
        False,
    )
    assert page["action"]["schema"]["properties"]["direction"]["enum"] == ["left", "right"]
    assert [field["name"] for field in page["action"]["fields"]] == ["direction", "paces"]
    reset = page["reset"]["schema"]
    assert list(reset["properties"]) == ["seed", "episode_id", "start", "greeting"]
    assert reset["properties"]["start"] == {"type": "integer", "title": "Start", "default": 0}
    assert (page["tools"], page["custom_tab"], page["is_chat"], page["max_sessions"]) == (None, None, False, 64)


def test_an_episode_is_played_over_the_page(street: Any, visit: Callable[..., Any]) -> None:
    browser = visit(street.url)
    began = browser.post("/web/reset", {"seed": 1, "episode_id": "mine", "start": 1, "unknown": 1})
    assert began.json() == {"observation": {"metadata": {}, "place": 1, "text": "hello"}, "reward": None, "done": False}
    went = browser.step(paces=2).json()
    assert (went["observation"]["place"], went["reward"], went["done"]) == (3, 3.0, True)
    assert browser.get("/web/state").json() == {"episode_id": "mine", "step_count": 1, "place": 3}
    assert browser.get("/web/metadata").json()["name"] == "Street"


def test_a_step_before_any_reset_opens_the_session(street: Any, visit: Callable[..., Any]) -> None:
    assert visit(street.url).step().json()["observation"]["place"] == 1


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"action": {"direction": "up"}}, ["direction"]),
        ({"action": {"direction": "left", "paces": 9}}, ["paces"]),
        ({"action": {}}, ["direction"]),
        ({}, ["direction"]),
        ({"action": 5}, []),
        ([1], []),
        ({"message": "hello"}, None),
    ],
)
def test_an_action_that_does_not_fit_is_a_mistake_of_the_request(
    street: Any, visit: Callable[..., Any], body: Any, loc: list[str] | None
) -> None:
    answer = visit(street.url).post("/web/step", body)
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_ERROR")
    assert isinstance(answer.json()["detail"], str)
    if loc is not None:
        assert answer.json()["errors"][0]["loc"] == loc
    assert answer.json()["errors"][0]["msg"]


def test_bodies_that_are_no_json_or_too_large_are_refused(
    serve: Serve, visit: Callable[..., Any], make_app: Any
) -> None:
    browser = visit(serve(make_app(max_message_bytes=1000)).url)
    assert browser.client.post("/web/step", content=b"{").json()["code"] == "VALIDATION_ERROR"
    assert browser.client.post("/web/reset", content=b"").status_code == 200
    large = browser.post("/web/reset", {"greeting": "x" * 2000})
    assert (large.status_code, large.json()["code"], large.json()["limit_bytes"]) == (413, "BODY_TOO_LARGE", 1000)


def test_a_failure_of_the_environment_is_reported_and_the_episode_goes_on(
    street: Any, visit: Callable[..., Any]
) -> None:
    browser = visit(street.url)
    browser.post("/web/reset")
    failed = browser.step("left", paces=5)
    assert (failed.status_code, failed.json()["code"]) == (500, "EXECUTION_ERROR")
    assert "secret-map" in failed.json()["detail"]
    assert browser.step(paces=5).json()["observation"]["place"] == 0


def test_redacted_errors_are_redacted_here_too(serve: Serve, visit: Callable[..., Any], make_app: Any) -> None:
    browser = visit(serve(make_app(redact_errors=True)).url)
    with browser.live() as live:
        failed = browser.step("left", paces=5)
        frame = live.until("error")
    for body in (failed.json(), frame):
        assert "secret-map" not in str(body)
        assert "log" in body["detail"]
    assert failed.json()["error_id"]


class Shy(Idle):
    """Has no state before its first reset, and cannot always be built."""

    may_be_built = True

    def __init__(self) -> None:
        super().__init__()
        if not self.may_be_built:
            raise OSError("no display")
        self._state: State | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State()
        return Observation()

    @property
    def state(self) -> State:
        if self._state is None:
            raise RuntimeError("reset me first")
        return self._state


def with_page(*args: Any, **kwargs: Any) -> Any:
    from openenv.server.web.web_page import add_page

    app = create_app(*args, **kwargs)
    add_page(app)
    return app


def test_a_state_that_is_not_there_yet_is_a_conflict(serve: Serve, visit: Callable[..., Any]) -> None:
    browser = visit(serve(with_page(Shy, Action, Observation)).url)
    missing = browser.get("/web/state")
    assert (missing.status_code, missing.json()["detail"]) == (409, "reset me first")
    assert browser.post("/web/step", {"action": {}}).status_code == 200  # a state that fails does not fail the step
    assert browser.post("/web/reset").status_code == 200
    assert browser.get("/web/state").status_code == 200


def test_an_environment_that_cannot_be_built_has_a_page_all_the_same(
    serve: Serve, visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = visit(serve(with_page(Shy, Action, Observation, env_name="shy")).url)
    monkeypatch.setattr(Shy, "may_be_built", False)
    assert browser.get("/web/page").json()["name"] == "shy"
    described = "Has no state before its first reset, and cannot always be built."
    assert browser.get("/web/metadata").json()["description"] == described
    failed = browser.post("/web/reset")
    assert (failed.status_code, failed.json()["code"]) == (500, "FACTORY_ERROR")
    assert "no display" in failed.json()["detail"]
    monkeypatch.setattr(Shy, "may_be_built", True)
    assert browser.post("/web/reset").status_code == 200
    assert browser.get("/web/page").json()["tools"] is None


class Talk(Action):
    """Something to say."""

    message: str


class Parrot(Idle):
    def step(self, action: Talk, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"said": action.message})


class Polite(Parrot):
    def message_to_action(self, message: str) -> Talk:
        return Talk(message=f"please, {message}")


@pytest.mark.parametrize(("env", "said"), [(Parrot, "go"), (Polite, "please, go")])
def test_a_message_is_an_action(serve: Serve, visit: Callable[..., Any], env: type[Any], said: str) -> None:
    browser = visit(serve(with_page(env, Talk, Observation)).url)
    assert browser.post("/web/step", {"message": "go"}).json()["metadata"] == {"said": said}


@pytest.mark.parametrize("runner", ["thread", "inline", "process"])
def test_the_page_plays_on_every_runner(serve: Serve, visit: Callable[..., Any], make_app: Any, runner: str) -> None:
    server = serve(make_app(runner=runner))
    browser = visit(server.url)
    with browser.live() as live:
        live.until("hello")
        assert browser.post("/web/reset", {"start": 1}).json()["observation"]["place"] == 1
        assert "1 None False" in live.until("reset")["render"]["html"]
        assert browser.step().json()["observation"]["place"] == 2
        assert browser.get("/web/state").json()["place"] == 2
        assert browser.step().json()["done"] is True
        assert live.until("step")["entry"]["observation"]["place"] == 2
        assert browser.step("left", paces=5).json()["observation"]["place"] == -2


def test_asynchronous_environments_are_played_on_the_loop_and_drawn_beside_it(
    serve: Serve, visit: Callable[..., Any], make_app: Any, envs: dict[str, Any]
) -> None:
    browser = visit(serve(make_app(envs["AsyncStreet"])).url)
    with browser.live() as live:
        browser.post("/web/reset")
        drawn_in = live.until("reset")["render"]["html"]
    assert drawn_in != "test-server"  # the name of the loop's thread in tests
    assert browser.step().json()["observation"]["place"] == 1


def test_production_has_no_reset_step_or_state(serve: Serve, visit: Callable[..., Any], make_app: Any) -> None:
    browser = visit(serve(make_app(mode="production")).url)
    assert browser.get("/web/page").json()["mode"] == "production"
    assert browser.post("/web/reset").status_code == 404
    assert browser.step().status_code == 404
    assert browser.get("/web/state").status_code == 404
    paths = browser.get("/openapi.json").json()["paths"]
    assert "/web/metadata" in paths
    assert not {"/web/reset", "/web/step", "/web/state", "/reset"} & set(paths)


def test_the_document_lists_the_routes_of_the_contract(street: Any, visit: Callable[..., Any]) -> None:
    paths = visit(street.url).get("/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith("/web")} == {
        "/web/metadata",
        "/web/reset",
        "/web/step",
        "/web/state",
    }


def test_the_quick_start_runs_as_it_is_shown(street: Any, visit: Callable[..., Any]) -> None:
    text = visit(street.url).get("/web/page").json()["quick_start"]["text"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(text, "quick_start", "exec"), {})
    assert "place" in said.getvalue()


@pytest.mark.parametrize(("setting", "has_page"), [("true", True), ("1", True), ("YES", True), ("false", False)])
def test_a_setting_turns_the_page_on(
    monkeypatch: pytest.MonkeyPatch, setting: str, has_page: bool, envs: dict[str, Any]
) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", setting)
    app = create_app(envs["Street"], envs["Walk"], envs["View"])
    assert any(getattr(route, "path", "") == "/web/" for route in app.routes) is has_page


def test_a_server_without_the_page_loads_none_of_it() -> None:
    code = (
        "import sys\nimport openenv.server.app\nimport openenv.server.run\n"
        "print([name for name in sys.modules if name.startswith(('openenv.server.web', 'gradio', 'markdown_it'))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]"


def test_an_application_keeps_its_own_root_and_its_own_page(envs: dict[str, Any]) -> None:
    from openenv.server.web.web_page import attach_web

    app = create_app(envs["Street"], envs["Walk"], envs["View"])

    @app.get("/")
    def own() -> str:
        return "mine"

    assert attach_web(app) is not None
    assert attach_web(app) is None
    assert [getattr(route, "path", "") for route in app.routes].count("/") == 1


class Proud(Parrot):
    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="Proud one", description="Says so", version="3", readme_content="# I am *it*")


def test_an_environment_that_describes_itself_is_shown_as_it_says(serve: Serve, visit: Callable[..., Any]) -> None:
    browser = visit(serve(with_page(Proud, Talk, Observation, env_name="proud_env")).url)
    page = browser.get("/web/page").json()
    assert (page["name"], page["description"], page["version"]) == ("Proud one", "Says so", "3")
    assert page["readme_html"] == "<h1>I am <em>it</em></h1>\n"
    assert browser.get("/web/metadata").json()["readme_content"] == "# I am *it*"
