"""The HTTP surface of a real server: Gym routes with and without a session, information, schemas, modes."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx2
import pytest
from pydantic import Field, field_validator

import http_calls
from openenv.env.environment import Environment
from openenv.server.app import HTTPEnvServer, create_app, parse_mode
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.session import SessionState
from openenv.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, ServerMode, State
from servers import Serve

SESSION = "X-OpenEnv-Session"


class Say(Action):
    message: str

    @field_validator("message")
    @classmethod
    def _polite(cls, value: str) -> str:
        if value == "rude":
            raise ValueError("be polite")
        return value


class Heard(Observation):
    text: str = ""
    seen: dict[str, Any] = Field(default_factory=dict)


class Memory(State):
    words: list[str] = Field(default_factory=list)


class Parrot(Environment[Say, Heard, Memory]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    threads: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.threads.add(threading.get_ident())
        self.words = []
        if kwargs.get("fail"):
            raise RuntimeError("reset failed")
        return Heard(text="hello", seen={"seed": seed, "episode_id": episode_id, **kwargs})

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        if action.message == "boom":
            raise RuntimeError("it broke")
        self.words.append(action.message)
        reward = {"true": True, "one": 1, "nan": float("nan")}.get(action.message)
        return Heard(text=action.message, reward=reward, seen={"timeout_s": timeout_s, **kwargs})

    @property
    def state(self) -> Memory:
        return Memory(step_count=len(self.words), words=self.words)

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="Parrot", description="Repeats", author="me")


@pytest.fixture
def http(serve: Serve) -> Iterator[httpx2.Client]:
    server = serve(create_app(Parrot, Say, Heard, max_concurrent_envs=3))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        client.server = server  # type: ignore[attr-defined]
        yield client


def bare(client: httpx2.Client) -> httpx2.Client:
    client.cookies.clear()
    return client


def test_a_plain_reset_and_step_have_the_shapes_of_the_contract(http: httpx2.Client) -> None:
    body = http.post("/reset", json={"seed": 3, "level": 2}).json()
    assert body["observation"]["seen"] == {"seed": 3, "episode_id": None, "level": 2}
    assert (body["reward"], body["done"], body["metadata"]) == (None, False, None)
    assert set(body) == {"observation", "reward", "done", "metadata"}
    stepped = bare(http).post("/step", json={"action": {"message": "true"}, "timeout_s": 2, "request_id": "r"}).json()
    assert stepped["reward"] == 1.0
    assert isinstance(stepped["reward"], float)
    assert stepped["observation"]["seen"] == {"timeout_s": 2, "request_id": "r"}


def test_a_reset_needs_no_body(http: httpx2.Client) -> None:
    assert http.post("/reset").status_code == 200
    assert http.post("/reset", content=b"  ").status_code == 200


def test_keys_that_were_not_sent_are_not_passed(http: httpx2.Client) -> None:
    assert http.post("/step", json={"action": {"message": "a"}}).json()["observation"]["seen"] == {"timeout_s": None}


def test_a_broken_reward_is_null_over_http_too(http: httpx2.Client) -> None:
    body = http.post("/step", json={"action": {"message": "nan"}}).json()
    assert body["reward"] is None
    assert body["metadata"] == {"nonfinite_reward": "nan"}


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"seed": -1}, ["body", "seed"]),
        ({"seed": "x"}, ["body", "seed"]),
        ({"episode_id": "x" * 256}, ["body", "episode_id"]),
        ([], ["body"]),
    ],
)
def test_a_bad_reset_is_unprocessable(http: httpx2.Client, body: Any, loc: list[str]) -> None:
    answer = http.post("/reset", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == loc


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({}, ["body", "action"]),
        ({"action": 7}, ["body", "action"]),
        ({"action": {"message": "a"}, "timeout_s": 0}, ["body", "timeout_s"]),
        ({"action": {}}, ["message"]),
        ({"action": {"message": 7}}, ["message"]),
        ({"action": {"message": "rude"}}, ["message"]),
    ],
)
def test_a_bad_step_is_unprocessable_and_action_errors_are_relative_to_the_action(
    http: httpx2.Client, body: Any, loc: list[str]
) -> None:
    answer = http.post("/step", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == loc


def test_a_body_that_is_not_json_is_unprocessable(http: httpx2.Client) -> None:
    for path in ("/reset", "/step"):
        assert http.post(path, content=b"{nonsense").status_code == 422


def test_an_environment_that_raises_is_a_plain_internal_error(http: httpx2.Client) -> None:
    answer = http.post("/step", json={"action": {"message": "boom"}})
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")


def test_an_episode_runs_over_a_named_session(http: httpx2.Client) -> None:
    opened = http.post("/reset", json={}, headers={SESSION: "new"})
    name = {SESSION: opened.headers[SESSION]}
    for word in ("a", "b"):
        assert http.post("/step", json={"action": {"message": word}}, headers=name).headers[SESSION] == name[SESSION]
    state = http.get("/state", headers=name).json()
    assert (state["step_count"], state["words"]) == (2, ["a", "b"])
    http.post("/reset", json={}, headers=name)
    assert http.get("/state", headers=name).json()["step_count"] == 0
    assert http.server.manager.active == 1  # type: ignore[attr-defined]


def test_a_named_session_survives_a_failure_and_says_what_happened(http: httpx2.Client) -> None:
    name = {SESSION: http.post("/reset", headers={SESSION: "new"}).headers[SESSION]}
    failed = http.post("/step", json={"action": {"message": "boom"}}, headers=name)
    assert failed.status_code == 500
    body = failed.json()
    assert (body["detail"], body["code"], body["exception"]) == ("it broke", "EXECUTION_ERROR", "RuntimeError")
    assert body["place"].endswith(", in step")
    assert http.post("/step", json={"action": {"message": "a"}}, headers=name).status_code == 200


def test_names_that_are_unknown_or_gone_are_refused(http: httpx2.Client) -> None:
    unknown = http.post("/step", json={"action": {"message": "a"}}, headers={SESSION: "nobody"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "SESSION_NOT_FOUND")
    wrong = http.post("/step", json={"action": {"message": "a"}}, headers={SESSION: "new"})
    assert wrong.status_code == 404
    name = http.post("/reset", headers={SESSION: "new"}).headers[SESSION]
    assert http.delete(f"/sessions/{name}").json() == {"session_id": name, "closed": True}
    gone = http.get("/state", headers={SESSION: name})
    assert (gone.status_code, gone.json()["code"]) == (410, "SESSION_LOST")
    assert http.delete(f"/sessions/{name}").status_code == 410
    assert http.delete("/sessions/nobody").status_code == 404


def test_at_capacity_a_new_session_is_refused_and_plain_calls_still_work(http: httpx2.Client) -> None:
    for _ in range(3):
        assert http.post("/reset", headers={SESSION: "new"}).status_code == 200
    full = http.post("/reset", headers={SESSION: "new"})
    assert full.status_code == 503
    assert full.headers["retry-after"] == "1"
    assert {**full.json(), "detail": ""} == {
        "detail": "",
        "code": "CAPACITY_REACHED",
        "active_sessions": 3,
        "max_sessions": 3,
    }
    assert bare(http).post("/reset", json={}).status_code == 200
    assert "set-cookie" not in http.post("/reset", json={}).headers


def test_a_client_that_keeps_cookies_continues_its_episode(http: httpx2.Client) -> None:
    http.post("/reset", json={})
    http.post("/step", json={"action": {"message": "a"}})
    http.post("/step", json={"action": {"message": "b"}})
    assert http.get("/state").json()["words"] == ["a", "b"]


def test_a_cookie_of_an_evicted_session_is_an_error_until_reset(http: httpx2.Client) -> None:
    http.post("/reset", json={})
    for _ in range(3):
        http.post("/reset", headers={SESSION: "new"})
    lost = http.post("/step", json={"action": {"message": "a"}}, headers={"cookie": _cookie_of(http)})
    assert (lost.status_code, lost.json()["code"]) == (410, "SESSION_LOST")
    assert "Max-Age=0" in lost.headers["set-cookie"]
    assert http.post("/reset", json={}).status_code == 200


def _cookie_of(http: httpx2.Client) -> str:
    return f"openenv_session={http.cookies['openenv_session']}"


def test_a_cookie_of_another_site_does_no_harm(http: httpx2.Client) -> None:
    headers = {"cookie": "a/b=1; openenv_session_x=2; other=openenv_session"}
    assert http.post("/reset", json={}, headers=headers).status_code == 200


def test_information_routes(http: httpx2.Client) -> None:
    assert http.get("/health").json() == {"status": "healthy"}
    assert http.get("/metadata").json() == {
        "name": "Parrot",
        "description": "Repeats",
        "readme_content": None,
        "version": None,
        "author": "me",
        "documentation_url": None,
    }
    schema = http.get("/schema").json()
    assert set(schema) == {"action", "observation", "state", "reset_observation"}
    assert "message" in schema["action"]["properties"]
    assert "words" in schema["state"]["properties"], "the state's own class, found without being named"
    assert schema["reset_observation"] == schema["observation"]


def test_the_openapi_document_names_routes_version_and_title(http: httpx2.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["info"]["version"] == "1.0.0"
    assert document["info"]["title"] == "OpenEnv Environment HTTP API"
    assert {"/reset", "/step", "/state", "/health", "/schema", "/metadata", "/mcp"} <= set(document["paths"])
    assert http.get("/docs").status_code == 200


def test_wrong_methods_are_405(http: httpx2.Client) -> None:
    assert http.get("/mcp").status_code == 405
    assert http.get("/reset").status_code == 405
    assert http.post("/state").status_code == 405


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"nonsense", -32700),
        (b"[]", -32700),
        (b'{"jsonrpc":"2.0"}', -32600),
        (b'{"jsonrpc":"2.0","method":"nonsense","id":1}', -32601),
        (b'{"jsonrpc":"2.0","method":"tools/call","id":1}', -32602),
        (b'{"jsonrpc":"2.0","method":"tools/list","id":1}', -32603),
    ],
)
def test_json_rpc_is_always_200_with_the_error_inside(http: httpx2.Client, body: bytes, code: int) -> None:
    answer = http.post("/mcp", content=body)
    assert answer.status_code == 200
    assert answer.json()["error"]["code"] == code
    assert answer.json()["jsonrpc"] == "2.0"


def test_environment_code_never_runs_on_the_servers_loop(http: httpx2.Client) -> None:
    Parrot.threads.clear()
    http.post("/reset", json={})
    server_threads = {t.ident for t in threading.enumerate() if t.name == "test-server"}
    assert server_threads
    assert not server_threads & Parrot.threads


def test_a_body_over_the_limit_is_413(serve: Serve) -> None:
    app = create_app(Parrot, Say, Heard)
    server = serve(app)
    service = app.state.openenv_server.service
    object.__setattr__(service.options, "max_message_bytes", 1000)
    answer = http_calls.post(f"{server.url}/step", json={"action": {"message": "x" * 2000}}, trust_env=False)
    assert answer.status_code == 413
    assert answer.json()["limit_bytes"] == 1000


@pytest.mark.parametrize("mode", ["production", "PRODUCTION", ServerMode.PRODUCTION])
def test_production_mode_has_no_gym_routes(serve: Serve, mode: Any) -> None:
    server = serve(create_app(Parrot, Say, Heard, mode=mode))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        assert client.post("/reset", json={}).status_code == 404
        assert client.post("/step", json={"action": {"message": "a"}}).status_code == 404
        assert client.get("/state").status_code == 404
        assert client.get("/health").status_code == 200
        assert client.get("/schema").status_code == 200
        paths = client.get("/openapi.json").json()["paths"]
    assert not {"/reset", "/step", "/state"} & set(paths)


def test_the_mode_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    app = create_app(Parrot, Say, Heard)
    assert "/reset" not in {getattr(route, "path", "") for route in app.routes}


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"mode.*simulation.*production"):
        parse_mode("fantasy")


def test_an_instance_instead_of_a_class_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="must be a callable"):
        create_app(Parrot(), Say, Heard)  # type: ignore[arg-type]


def test_only_one_way_to_give_the_limits() -> None:
    with pytest.raises(ValueError):
        HTTPEnvServer(Parrot, Say, Heard, 2, ConcurrencyConfig())
    with pytest.raises(ValueError):
        HTTPEnvServer(Parrot, Say, Heard, 2, limits=SessionLimits())


def test_the_server_object_tells_its_capacity() -> None:
    server = HTTPEnvServer(Parrot, Say, Heard, 5)
    status = server.get_capacity_status()
    assert (status.active_sessions, status.max_sessions, status.available_slots) == (0, 5, 5)
    assert server.is_concurrency_safe
    assert server.get_session_info("nobody") is None
    server.reconfigure(sessions=7, session_timeout_s=5, runner="inline")
    assert (server.max_concurrent_envs, server.manager.limits.idle_s) == (7, 5)


def test_limits_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MAX_SESSIONS", "9")
    monkeypatch.setenv("OPENENV_SESSION_TIMEOUT", "33")
    monkeypatch.setenv("OPENENV_RUNNER", "inline")
    server = HTTPEnvServer(Parrot, Say, Heard)
    assert (server.max_concurrent_envs, server.manager.limits.idle_s) == (9, 33)
    assert server.manager.runner.name == "inline"
    config = ConcurrencyConfig(max_concurrent_envs=4)  # says nothing of a timeout
    server = HTTPEnvServer(Parrot, Say, Heard, concurrency_config=config)
    assert (server.max_concurrent_envs, server.manager.limits.idle_s) == (4, 33)
    own = HTTPEnvServer(Parrot, Say, Heard, concurrency_config=ConcurrencyConfig(session_timeout=5))
    assert own.manager.limits.idle_s == 5


def test_an_unused_http_session_expires(serve: Serve) -> None:
    config = ConcurrencyConfig(max_concurrent_envs=1, session_timeout=0.2)
    server = serve(create_app(Parrot, Say, Heard, concurrency_config=config))
    opened = http_calls.post(f"{server.url}/reset", json={}, headers={SESSION: "new"}, trust_env=False)
    server.wait_for(lambda: server.manager.active == 0)
    gone = http_calls.get(f"{server.url}/state", headers={SESSION: opened.headers[SESSION]}, trust_env=False)
    assert gone.json()["reason"] == "expired"


class Fragile(Parrot):
    """Waits in the constructor or the first reset until a test opens its gate; fails with seed 7."""

    waits_in: ClassVar[str] = ""
    entered: ClassVar[threading.Event]
    go_on: ClassVar[threading.Event]

    def __init__(self) -> None:
        super().__init__()
        self._wait("constructor")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self._wait("reset")
        if seed == 7:
            raise ValueError("bad seed")
        return super().reset(seed, episode_id, **kwargs)

    def _wait(self, place: str) -> None:
        if self.waits_in == place:
            self.entered.set()
            self.go_on.wait(20)


@pytest.mark.parametrize("place", ["constructor", "reset"])
def test_a_client_that_leaves_before_its_new_session_is_ready_leaves_no_session_behind(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name, value in {"waits_in": place, "entered": threading.Event(), "go_on": threading.Event()}.items():
        monkeypatch.setattr(Fragile, name, value, raising=False)
    server = serve(create_app(Fragile, Say, Heard))
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        request = f"POST /reset HTTP/1.1\r\nHost: x\r\n{SESSION}: new\r\nContent-Length: 2\r\n\r\n{{}}"
        leaving.sendall(request.encode())
        assert Fragile.entered.wait(10)
    server.wait_for(lambda: [s.state for s in server.manager.sessions()] == [SessionState.CLOSING])
    Fragile.go_on.set()
    server.wait_for(lambda: server.manager.active == 0)
    Fragile.waits_in = ""
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        assert client.post("/reset", headers={SESSION: "new"}).status_code == 200


def test_a_first_reset_that_fails_opens_no_session(serve: Serve) -> None:
    server = serve(create_app(Fragile, Say, Heard))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        failed = client.post("/reset", json={"seed": 7}, headers={SESSION: "new"})
        assert (failed.status_code, failed.json()) == (500, {"detail": "bad seed", "code": "EXECUTION_ERROR"})
        assert SESSION not in failed.headers
        again = client.post("/reset", json={}, headers={SESSION: "new"})
        assert again.status_code == 200
        name = {SESSION: again.headers[SESSION]}
        assert client.post("/reset", json={"seed": 7}, headers=name).headers[SESSION] == name[SESSION]
        assert client.get("/state", headers=name).status_code == 200, "a later reset that fails ends nothing"


@pytest.mark.anyio
async def test_a_server_that_is_shutting_down_lends_no_environment() -> None:
    app = create_app(Parrot, Say, Heard, env_name="parrot")
    await app.state.openenv_server.manager.drain()
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        for answer in (await client.get("/metadata"), await client.get("/parrot/splits")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["code"] == "CAPACITY_REACHED"


def test_changing_one_limit_keeps_the_others() -> None:
    limits = SessionLimits(sessions=4, drain_s=60, closing_wait_s=0.1, soft_sessions=2)
    server = HTTPEnvServer(Parrot, Say, Heard, limits=limits)
    server.reconfigure(runner="inline")
    assert server.manager.limits == limits
    server.reconfigure(sessions=5, session_timeout_s=7)
    assert server.manager.limits == dataclasses.replace(limits, sessions=5, idle_s=7, soft_idle_s=7)
    server.reconfigure(session_grace_s=3, max_agent_sessions=2)
    assert (server.manager.limits.grace_s, server.manager.limits.agents) == (3, 2)
    assert server.manager.limits.idle_s == 7
    for wrong in ({"session_grace_s": -1}, {"session_grace_s": float("nan")}, {"max_agent_sessions": -1}):
        with pytest.raises(ValueError, match="must"):
            server.reconfigure(**wrong)
    assert server.service.options.limits == server.manager.limits
    assert server.service.options.runner == "inline"
    assert (server.concurrency_config.max_concurrent_envs, server.concurrency_config.session_timeout) == (5, 7)
