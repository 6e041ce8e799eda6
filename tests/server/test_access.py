"""Who reaches what: every route and every kind of frame, for each role, with and without tokens; limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from fastmcp import Client
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from environments import Shelf
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.access import AccessPolicy, Area, Role, may
from openenv.server.app import HTTPEnvServer, create_app
from openenv.server.web.web_page import add_page
from openenv.types import Action, Observation
from servers import Serve

TOKENS = {"orchestrator": "orch.token", "agent": "agent-token", "observer": "obs_token~"}
CALLERS = ["nobody", "stranger", "agent", "observer", "orchestrator"]
POLICY = AccessPolicy(**TOKENS)
EVERY_CALLER = {*CALLERS}
ANY_ROLE = {"agent", "observer", "orchestrator"}
LOOKING = {"observer", "orchestrator"}
TOOLS = {"agent", "orchestrator"}
CONTROL = {"orchestrator"}
TABLE: dict[tuple[str, str], set[str]] = {
    ("GET", "/health"): EVERY_CALLER,
    ("GET", "/ready"): EVERY_CALLER,
    ("GET", "/openapi.json"): ANY_ROLE,
    ("GET", "/docs"): ANY_ROLE,
    ("GET", "/docs/oauth2-redirect"): ANY_ROLE,
    ("GET", "/redoc"): ANY_ROLE,
    ("GET", "/metadata"): LOOKING,
    ("GET", "/schema"): LOOKING,
    ("GET", "/metrics"): LOOKING,
    ("GET", "/state"): LOOKING,
    ("GET", "/sessions/{session_id}"): LOOKING,
    ("POST", "/mcp"): TOOLS,
    ("GET", "/mcp"): TOOLS,
    ("DELETE", "/mcp"): TOOLS,
    ("PUT", "/mcp"): TOOLS,
    ("PATCH", "/mcp"): TOOLS,
    ("OPTIONS", "/mcp"): TOOLS,
    ("WS", "/mcp"): TOOLS,
    ("WS", "/ws"): TOOLS,
    ("POST", "/reset"): CONTROL,
    ("POST", "/step"): CONTROL,
    ("POST", "/sessions"): CONTROL,
    ("DELETE", "/sessions/{session_id}"): CONTROL,
    ("POST", "/sessions/{session_id}/fork"): CONTROL,
    ("POST", "/sessions/{session_id}/restore"): CONTROL,
    ("GET", "/list_environments"): CONTROL,
    ("GET", "/{env_name}/splits"): CONTROL,
    ("POST", "/{env_name}/tasks"): CONTROL,
    ("POST", "/{env_name}/num_tasks"): CONTROL,
    ("POST", "/{env_name}/task"): CONTROL,
    ("POST", "/{env_name}/task_range"): CONTROL,
    ("GET", "/"): EVERY_CALLER,
    ("GET", "/web"): EVERY_CALLER,
    ("GET", "/web/"): EVERY_CALLER,
    ("GET", "/web/static/{file}"): EVERY_CALLER,
    ("POST", "/web/logout"): EVERY_CALLER,
    ("GET", "/web/page"): LOOKING,
    ("GET", "/web/metadata"): LOOKING,
    ("GET", "/web/state"): LOOKING,
    ("GET", "/web/sessions"): LOOKING,
    ("GET", "/web/episodes"): CONTROL,
    ("GET", "/web/episodes/{episode_id}"): CONTROL,
    ("GET", "/web/episodes/{episode_id}/download"): CONTROL,
    ("GET", "/web/sessions/{session_id}/watch"): CONTROL,
    ("WS", "/ws/ui"): LOOKING,
    ("POST", "/web/reset"): CONTROL,
    ("POST", "/web/step"): CONTROL,
    ("POST", "/web/close"): CONTROL,
    ("POST", "/web/cancel"): CONTROL,
    ("POST", "/web/call"): CONTROL,
    ("DELETE", "/web/sessions/{session_id}"): CONTROL,
}
# Open to every caller; it requires a token itself.
ASKS_ITSELF = {("POST", "/web/login")}
BODIES: dict[str, Any] = {
    "/step": {"action": {"tool_name": "put", "arguments": {"item": "x"}}},
    "/{env_name}/tasks": {"split": "train"},
    "/{env_name}/num_tasks": {"split": "train"},
    "/{env_name}/task": {"split": "train", "index": 0},
    "/{env_name}/task_range": {"split": "train", "start": 0, "stop": 1},
}
WAYS: dict[str, dict[str, Any]] = {
    "serve": {},
    "plain uvicorn": {"ws": "websockets-sansio", "http": "auto"},
    "behind a middleware": {},
}


def shelf_app(access: AccessPolicy | None = POLICY, **kwargs: Any) -> FastAPI:
    app = create_app(Shelf, CallToolAction, CallToolObservation, max_concurrent_envs=64, access=access, **kwargs)
    add_page(app)
    return app


def bearer(caller: str) -> dict[str, str]:
    token = TOKENS.get(caller, "no-such-token")
    return {} if caller == "nobody" else {"Authorization": f"Bearer {token}"}


def http(url: str, caller: str = "nobody", **headers: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, headers={**bearer(caller), **headers}, trust_env=False, verify=False, timeout=20)


@contextmanager
def socket(url: str, path: str, caller: str, **kwargs: Any) -> Iterator[Callable[[Any], Any]]:
    """Connect; gives a function that asks a question and returns the answer."""
    address = f"ws{url.removeprefix('http')}{path}"
    with connect(address, proxy=None, additional_headers=bearer(caller), **kwargs) as connection:

        def ask(frame: Any) -> Any:
            connection.send(json.dumps(frame))
            return json.loads(connection.recv(timeout=10))

        yield ask


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for route in app.routes:
        if isinstance(route, WebSocketRoute):
            found.add(("WS", route.path))
        else:
            assert isinstance(route, Route), f"{route} is of a kind that this test does not know"
            found |= {(method, route.path) for method in (route.methods or set()) - {"HEAD"}}
    return found


# -- every route, every role ------------------------------------------------------------------------------------------


def test_the_table_knows_every_route() -> None:
    assert routes_of(shelf_app()) == set(TABLE) | ASKS_ITSELF
    assert routes_of(shelf_app(mode="production")) < set(TABLE) | ASKS_ITSELF


@pytest.fixture(scope="module")
def ways(serve_once: Serve) -> dict[str, str]:
    """The same application behind three ways into a server."""
    urls = {}
    for name, settings in WAYS.items():
        app = shelf_app()
        if name == "behind a middleware":

            @app.middleware("http")
            async def pass_on(request: Request, call_next: Any) -> Any:
                return await call_next(request)

        urls[name] = serve_once(app, **settings).url
    return urls


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("method", "path"), sorted(TABLE), ids=lambda part: part)
def test_a_role_reaches_exactly_its_routes(ways: dict[str, str], way: str, method: str, path: str) -> None:
    for caller in CALLERS:
        status, headers, body = (
            shake_hands(ways[way], path, caller) if method == "WS" else send(ways[way], method, path, caller)
        )
        if caller in TABLE[method, path]:
            assert status not in (401, 403), (caller, body)
        elif caller in ("nobody", "stranger"):
            challenge = "Bearer" if caller == "nobody" else 'Bearer error="invalid_token"'
            assert (status, headers["www-authenticate"], refused_with(body)) == (401, challenge, "UNAUTHORIZED"), caller
        else:
            assert (status, refused_with(body)) == (403, "FORBIDDEN"), caller
            assert caller in body


def send(url: str, method: str, path: str, caller: str) -> tuple[int, Any, str]:
    spelled = path.replace("{session_id}", "none").replace("{env_name}", "Shelf")
    with http(url, caller) as client:
        answer = client.request(method, spelled, json=BODIES.get(path, {}) if method == "POST" else None)
        return answer.status_code, answer.headers, answer.text


def shake_hands(url: str, path: str, caller: str) -> tuple[int, Any, str]:
    try:
        with socket(url, path, caller):
            return 101, {}, ""
    except InvalidStatus as exc:
        return exc.response.status_code, exc.response.headers, bytes(exc.response.body or b"").decode()


def refused_with(body: str) -> str:
    found = json.loads(body)
    return str(found["error"]["data"]["code"] if "jsonrpc" in found else found["code"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["/reset", "/step", "/state"])
def test_naming_a_session_is_no_way_around_the_token(ways: dict[str, str], way: str, path: str) -> None:
    """Requests that name a session take the short way, and are asked for a token there as well."""
    with http(ways[way], "orchestrator") as own:
        session = own.post("/reset", json={}, headers={"X-OpenEnv-Session": "new"}).headers["X-OpenEnv-Session"]
    method = "GET" if path == "/state" else "POST"
    named = {"X-OpenEnv-Session": session}
    for caller, status in [("nobody", 401), ("stranger", 401), ("agent", 403), ("orchestrator", 200)]:
        with http(ways[way], caller) as client:
            answer = client.request(
                method, path, json=BODIES.get(path, {}) if method == "POST" else None, headers=named
            )
            assert answer.status_code == status, (caller, answer.text)
    with http(ways[way], "orchestrator") as own:
        own.delete(f"/sessions/{session}")


def test_documentation_at_other_addresses_is_guarded_and_other_routes_are_the_applications_own(
    serve: Serve,
) -> None:
    app = FastAPI(docs_url="/manual", openapi_url="/manual.json", redoc_url=None)

    @app.get("/before")
    def before() -> str:
        return "hello"

    HTTPEnvServer(Shelf, Action, Observation, access=POLICY).register_routes(app)

    @app.get("/after")
    def after() -> str:
        return "hello"

    url = serve(app).url
    for caller, status in [("nobody", 401), ("agent", 200), ("observer", 200)]:
        with http(url, caller) as client:
            paths = ("/before", "/after", "/manual", "/manual.json")
            assert [client.get(path).status_code for path in paths] == [200, 200, status, status]


def test_without_tokens_everything_is_open(serve: Serve) -> None:
    url = serve(shelf_app(access=None)).url
    with http(url) as client, http(url, "stranger") as other:
        assert client.post("/reset", json={}).status_code == 200
        assert other.get("/metadata").status_code == 200
    with socket(url, "/ws", "nobody") as ask:
        assert ask({"type": "reset"})["type"] == "observation"


def test_settings_and_arguments_bring_tokens(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "first, second")
    plain, opened = serve(shelf_app(access=None)).url, serve(shelf_app(access=AccessPolicy())).url
    for token, status in [("first", 200), ("second", 200), ("first, second", 401), ("third", 401)]:
        with http(plain, Authorization=f"Bearer {token}") as client:
            assert client.get("/schema").status_code == status, token
    with http(opened) as client:
        assert client.get("/schema").status_code == 200


# -- frames -----------------------------------------------------------------------------------------------------------


def test_an_agent_on_the_socket_of_the_environment_may_only_call_tools(ways: dict[str, str]) -> None:
    with socket(ways["serve"], "/ws", "agent") as ask:
        for frame in (
            {"type": "reset"},
            {"type": "state"},
            {"type": "step", "data": {"tool_name": "put", "arguments": {"item": "x"}}},
            {"type": "step", "data": {"nonsense": 1}},
        ):
            refused = ask(frame)["data"]
            assert (refused["code"], refused["role"]) == ("FORBIDDEN", "agent")
        called = ask({"type": "mcp", "data": rpc("tools/call", name="put", arguments={"item": "x"})})
        assert called["data"]["result"]["data"] == 1
        assert ask({"type": "dance"})["data"]["code"] == "UNKNOWN_TYPE"


def test_an_agent_may_only_call_tools_over_protocol_v2_as_well(ways: dict[str, str]) -> None:
    with socket(ways["serve"], "/ws", "agent", subprotocols=["openenv.v2.json"]) as ask:
        assert ask({"type": "open", "id": 1})["type"] == "opened"
        for request in (
            {"type": "reset", "id": 2, "data": {}},
            {"type": "state", "id": 3},
            {"type": "step", "id": 4, "data": {"tool_name": "put", "arguments": {"item": "x"}}},
        ):
            refused = ask(request)["data"]
            assert (refused["code"], refused["role"]) == ("FORBIDDEN", "agent")
        inner = {"type": "state", "id": 5}
        assert ask({"type": "batch", "id": 6, "requests": [inner]})["replies"][0]["data"]["code"] == "FORBIDDEN"
        called = ask({"type": "mcp", "id": 7, "data": rpc("tools/call", name="put", arguments={"item": "x"})})
        assert called["data"]["result"]["data"] == 1


def test_an_agent_cannot_take_over_a_session_with_its_token(ways: dict[str, str]) -> None:
    url, v2 = ways["serve"], {"subprotocols": ["openenv.v2.json"]}
    with socket(url, "/ws", "orchestrator", **v2) as own, socket(url, "/ws", "agent", **v2) as agent:
        token = own({"type": "open", "id": 1})["token"]
        assert agent({"type": "open", "id": 1, "resume": token})["data"]["code"] == "FORBIDDEN"
        assert own({"type": "state", "id": 1})["type"] == "state"
        agents_own = agent({"type": "open", "id": 2})["token"]
        assert agent({"type": "open", "id": 3, "resume": agents_own})["resumed"]


@pytest.mark.parametrize("request_type", ["open", "reset", "step", "state", "mcp", "close", "batch", "cancel", "ping"])
def test_what_each_role_may_send(request_type: str) -> None:
    assert may(Role.ORCHESTRATOR, request_type)
    assert may(Role.AGENT, request_type) is (request_type not in ("reset", "step", "state"))
    assert may(Role.OBSERVER, request_type) is (request_type in ("state", "ping"))


def test_an_agent_works_in_a_session_whose_name_it_was_given_and_cannot_end_it(ways: dict[str, str]) -> None:
    url = ways["serve"]
    with http(url, "orchestrator") as own, http(url, "agent") as agent:
        session = own.post("/reset", json={}, headers={"X-OpenEnv-Session": "new"}).headers["X-OpenEnv-Session"]
        put = rpc("tools/call", name="put", arguments={"item": "x"}, session_id=session)
        assert agent.post("/mcp", json=put).json()["result"]["data"] == 1
        with socket(url, f"/ws?session_id={session}", "agent") as ask:
            assert ask({"type": "mcp", "data": put})["data"]["result"]["data"] == 2
            assert ask({"type": "state"})["data"]["code"] == "FORBIDDEN"
        refused = agent.post("/mcp", json=rpc("openenv/session/close", session_id=session)).json()
        assert "agents have opened" in refused["error"]["message"]
        assert own.get("/state", headers={"X-OpenEnv-Session": session}).json()["step_count"] == 2
        assert own.post("/mcp", json=rpc("openenv/session/close", session_id=session)).json()["result"]["closed"]
        made = agent.post("/mcp", json=rpc("openenv/session/create")).json()["result"]["session_id"]
        assert agent.post("/mcp", json=rpc("openenv/session/close", session_id=made)).json()["result"]["closed"]


# -- tokens in addresses ----------------------------------------------------------------------------------------------


def test_a_token_in_the_address_counts_where_clients_cannot_set_headers(ways: dict[str, str]) -> None:
    for url in ways.values():
        token = TOKENS["orchestrator"]
        with http(url) as client:
            assert client.post(f"/mcp?token={token}", json=rpc("tools/list")).status_code == 200
            assert client.post(f"/mcp?token={token}x", json=rpc("tools/list")).status_code == 401
            assert client.get(f"/state?token={token}").status_code == 401
        with socket(url, f"/ws?token={token}", "nobody") as ask:
            assert ask({"type": "reset"})["type"] == "observation"
        with socket(url, f"/ws?x=1&token={TOKENS['agent']}", "nobody") as ask:
            assert ask({"type": "reset"})["data"]["code"] == "FORBIDDEN"
        assert shake_hands(url, f"/ws?token={TOKENS['observer']}", "nobody")[0] == 403


@pytest.mark.parametrize("way", ["serve", "plain uvicorn"])
def test_a_token_in_the_address_is_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture, way: str) -> None:
    url = serve(shelf_app(), **WAYS[way], access_log=True, log_config=None, log_level="info").url
    caplog.set_level(logging.INFO)
    token = TOKENS["orchestrator"]
    with http(url) as client:
        assert client.post(f"/mcp?a=1&token={token}", json=rpc("tools/list")).status_code == 200
        assert client.post(f"/mcp?token={token}s", json=rpc("tools/list")).status_code == 401
    with socket(url, f"/ws?token={token}", "nobody") as ask:
        assert ask({"type": "reset"})["type"] == "observation"
    logged = [record.getMessage() for record in caplog.records if record.name.startswith(("uvicorn", "openenv"))]
    assert any("/mcp?a=1" in line for line in logged)
    assert [line for line in logged if token in line] == []


# -- the policy itself ------------------------------------------------------------------------------------------------


def test_a_policy_knows_its_tokens_and_does_not_show_them() -> None:
    policy = AccessPolicy(orchestrator=["one", "two"], agent="three")
    assert [policy.role(token) for token in ("one", "two", "three", "tw", "twoo", "", "ü")] == [
        *[Role.ORCHESTRATOR] * 2,
        Role.AGENT,
        *[None] * 4,
    ]
    assert (policy.has(Role.AGENT), policy.has(Role.OBSERVER), policy.is_open) == (True, False, False)
    assert repr(policy) == "<AccessPolicy with tokens for orchestrator, agent>"
    assert AccessPolicy().is_open


@pytest.mark.parametrize(
    "tokens",
    [{"orchestrator": ""}, {"agent": ["a b"]}, {"agent": "a,b"}, {"observer": "ü"}, {"agent": "x", "observer": "x"}],
)
def test_tokens_that_cannot_be_are_refused_and_not_repeated(tokens: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="token") as caught:
        AccessPolicy(**tokens)
    assert "a b" not in str(caught.value)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_the_largest_message_is_set_by_an_argument_or_a_setting(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MAX_MESSAGE_MB", "0.01")
    for app, limit in [(shelf_app(None), 10485), (shelf_app(None, max_message_bytes=2000), 2000)]:
        url = serve(app).url
        with http(url) as client, socket(url, "/ws", "nobody") as ask:
            for size, fits in [(limit - 200, True), (limit + 1, False)]:
                padding = "x" * size
                assert client.post("/reset", json={"text": padding}).status_code == (200 if fits else 413)
                answer = client.post("/mcp", json=rpc("tools/list", text=padding)).json()
                assert ("result" in answer) is fits
                assert ask({"type": "reset", "data": {"text": padding}})["type"] == ("observation" if fits else "error")
                tasks = client.post("/Shelf/tasks", json={"split": padding})
                assert tasks.status_code == (501 if fits else 413)
    with pytest.raises(ValueError, match="must be positive"):
        shelf_app(max_message_bytes=0)


# -- real MCP clients -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_real_mcp_client_calls_tools_with_an_agents_token_and_not_without(ways: dict[str, str]) -> None:
    address = f"{ways['serve']}/mcp"
    for client in (Client(address, auth=TOKENS["agent"]), Client(f"{address}?token={TOKENS['agent']}")):
        async with client:
            assert (await client.call_tool("put", {"item": "x"})).data == 1
    for refused in (Client(address), Client(address, auth=TOKENS["observer"])):
        with pytest.raises(Exception, match=r"401|403|Unauthorized|Forbidden|token"):
            async with refused:
                await refused.list_tools()


@pytest.mark.parametrize("is_allowed", [False, True])
def test_recorded_episodes_are_for_orchestrators_and_for_observers_if_the_policy_says_so(
    serve: Serve, is_allowed: bool
) -> None:
    server = serve(shelf_app(AccessPolicy(**TOKENS, observers_see_episodes=is_allowed)))
    readers = {"orchestrator", "observer"} if is_allowed else {"orchestrator"}
    for caller in CALLERS:
        for path in ("/web/episodes", "/web/episodes/none", "/web/episodes/none/download"):
            answer = httpx2.get(
                server.url + path, headers=bearer(caller) if caller != "nobody" else {}, trust_env=False
            )
            expected = {200, 404} if caller in readers else {401, 403}
            assert answer.status_code in expected, (caller, path, answer.status_code)


def test_the_setting_lets_observers_read_recorded_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_allowed in (("", False), ("0", False), ("1", True), ("true", True)):
        monkeypatch.setenv("OPENENV_OBSERVER_EPISODES", value)
        assert AccessPolicy.from_settings().admits(Role.OBSERVER, Area.RECORDINGS) is is_allowed
    assert not AccessPolicy.from_settings().admits(Role.AGENT, Area.RECORDINGS)
