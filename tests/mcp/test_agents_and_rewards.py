"""No reward, end or metadata of a step reaches a client with the role `agent`, whatever it asks and wherever.

The environments answer with values that occur nowhere else, so that every byte an agent gets can be searched for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from starlette.routing import Route
from websockets.sync.client import connect

from environments import Idle, Tools
from openenv.protocol.tool_messages import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.web.web_page import add_page
from openenv.types import Action, Observation
from servers import RunningServer, Serve

REWARD = 0.4321987
SECRET = "the-answer-is-42"
TRAINER = {"authorization": "Bearer trainer-token"}
AGENT = {"authorization": "Bearer agent-token"}
MCP_AGENT = {**AGENT, "accept": "application/json, text/event-stream"}
POLICY = AccessPolicy(orchestrator="trainer-token", agent="agent-token")
FORBIDDEN = (str(REWARD), SECRET, '"reward"', '"done"', '"terminated"', '"truncated"', '"metadata"')


def scored(observation: Observation) -> Observation:
    """Add what only the orchestrator may see."""
    observation.reward, observation.done, observation.terminated = REWARD, True, True
    observation.metadata = {"solution": SECRET}
    return observation


class ByStep(Idle):
    """Has tools only as actions of `step`; `nested` returns an observation inside the observation."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if isinstance(action, ListToolsAction):
            return scored(ListToolsObservation(tools=[Tool(name="knock", description="", input_schema={})]))
        result = scored(Observation()) if action.tool_name == "nested" else f"heard {action.tool_name}"
        return scored(CallToolObservation(tool_name=action.tool_name, result=result))


class ByServer(Tools):
    """Has a FastMCP server, and steps that are worth something."""

    TOOLS = ("knock", "nested")

    def knock(self) -> str:
        return "heard knock"

    def nested(self) -> str:
        return "heard nested"

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return scored(super().step(action, timeout_s=timeout_s, **kwargs))


class OwnAction(CallToolAction):
    """A tool action of the environment's own class."""


def check(text: str) -> str:
    """Fail for a text that an agent must not see."""
    assert not [word for word in FORBIDDEN if word in text], text
    return text


@pytest.fixture(params=["by step", "by its own action class", "by server"])
def server(request: pytest.FixtureRequest, serve: Serve) -> RunningServer:
    env_cls = ByServer if request.param == "by server" else ByStep
    action_cls = OwnAction if request.param == "by its own action class" else CallToolAction
    app = create_app(env_cls, action_cls, CallToolObservation, max_concurrent_envs=32, access=POLICY)
    add_page(app)
    return serve(app)


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
def lent(http: httpx2.Client) -> str:
    """A session that the orchestrator has opened, begun, and lent to an agent."""
    name: str = http.post("/sessions", headers=TRAINER).json()["session_id"]
    assert http.post("/reset", headers={**TRAINER, "X-OpenEnv-Session": name}, json={}).status_code == 200
    return name


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


def calls(**more: Any) -> list[dict[str, Any]]:
    return [rpc("tools/list", **more), *(rpc("tools/call", name=name, **more) for name in ("knock", "nested", "none"))]


@contextmanager
def socket(server: Any, path: str, **kwargs: Any) -> Iterator[Callable[[Any], str]]:
    """Connect as an agent; gives a function that sends a message and returns the reply's text."""
    address = f"ws://127.0.0.1:{server.port}{path}"
    with connect(address, additional_headers=AGENT, proxy=None, **kwargs) as connection:

        def ask(message: Any) -> str:
            connection.send(json.dumps(message))
            reply = connection.recv(20)
            return reply if isinstance(reply, str) else reply.decode()

        yield ask


def episode(http: httpx2.Client, name: str) -> dict[str, Any]:
    """What the orchestrator sees of an episode."""
    shown: dict[str, Any] = http.get(f"/sessions/{name}", headers=TRAINER).json()["episode"]
    return shown


def test_own_json_rpc_over_http_shows_the_result_alone(http: httpx2.Client, lent: str) -> None:
    for named in ({}, {"session_id": lent}):
        texts = [check(http.post("/mcp", json=body, headers=AGENT).text) for body in calls(**named)]
        assert "heard knock" in texts[1]
    assert episode(http, lent)["total_reward"] == pytest.approx(3 * REWARD), "the orchestrator has all"


@pytest.mark.parametrize("path", ["/mcp", "/ws"])
def test_sockets_show_the_result_alone(server: RunningServer, lent: str, path: str) -> None:
    for address in (path, f"{path}?session_id={lent}"):
        with socket(server, address) as ask:
            for body in calls():
                check(ask(body if path == "/mcp" else {"type": "mcp", "data": body}))
            for kind in ("step", "reset", "state"):
                check(ask({"type": kind, "data": {}}))


def test_protocol_v2_shows_the_result_alone(server: RunningServer) -> None:
    with socket(server, "/ws", subprotocols=["openenv.v2.json"]) as ask:
        opened = json.loads(check(ask({"type": "open", "id": 1})))
        for number, body in enumerate(calls(), 2):
            check(ask({"type": "mcp", "id": number, "session": opened["session"], "data": body}))
        frames = [{"type": "mcp", "id": 10 + i, "data": body} for i, body in enumerate(calls())]
        check(ask({"type": "batch", "id": 9, "requests": frames}))
        for kind in ("step", "reset", "state", "ping", "close"):
            check(ask({"type": kind, "id": 90, "data": {}}))


def test_standard_mcp_shows_the_result_alone(http: httpx2.Client, lent: str) -> None:
    hello = rpc("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "x", "version": "1"})
    for lending in ({}, {"X-OpenEnv-Session": lent}):
        begun = http.post("/mcp", json=hello, headers={**MCP_AGENT, **lending})
        check(begun.text)
        named = {**MCP_AGENT, "mcp-session-id": begun.headers["mcp-session-id"]}
        for body in [*calls(), rpc("resources/list"), rpc("prompts/list"), rpc("ping")]:
            check(http.post("/mcp", json=body, headers=named).text)
        check(http.delete("/mcp", headers=named).text)
    version = "2026-07-28"
    meta = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientCapabilities": {},
        "openenv/session": lent,
    }
    for body in calls(_meta=meta):
        name = {"mcp-name": body["params"]["name"]} if "name" in body["params"] else {}
        headers = {**MCP_AGENT, "mcp-protocol-version": version, "mcp-method": body["method"], **name}
        check(http.post("/mcp", json=body, headers=headers).text)
    assert episode(http, lent)["total_reward"] >= 2 * REWARD


def test_no_route_shows_it(server: RunningServer, http: httpx2.Client, lent: str) -> None:
    assert episode(http, lent) == {"steps": 0, "reward": None, "total_reward": 0.0, "done": False}
    action = {"type": "call_tool", "tool_name": "knock", "arguments": {}}
    stepped = http.post("/step", json={"action": action}, headers={**TRAINER, "X-OpenEnv-Session": lent})
    assert str(REWARD) in stepped.text
    http.post("/web/login", json={"token": "agent-token"})  # a cookie that the page would take
    for route in server.app.routes:
        if not isinstance(route, Route) or route.path in ("/openapi.json", "/docs", "/redoc"):
            continue  # which name the fields of models, and hold no values
        path = route.path.format(
            session_id=lent, episode_id=lent, env_name="x", file="page.js", **{"file:path": "page.js"}
        )
        for method in route.methods or ():
            if path.startswith("/web/static"):
                continue
            reply = http.request(method, path, headers={**AGENT, "X-OpenEnv-Session": lent}, json={"action": action})
            assert str(REWARD) not in reply.text, (method, path)
            assert SECRET not in reply.text, (method, path)


def test_a_reply_that_is_kept_for_the_orchestrator_is_not_repeated_for_an_agent(http: httpx2.Client, lent: str) -> None:
    body = rpc("tools/call", name="knock", session_id=lent)
    keyed = {"idempotency-key": "step-1"}
    first = http.post("/mcp", json=body, headers={**TRAINER, **keyed})
    check(http.post("/mcp", json=body, headers={**AGENT, **keyed}).text)
    again = http.post("/mcp", json=body, headers={**TRAINER, **keyed})
    assert again.text == first.text


def test_the_orchestrator_still_gets_the_whole_observation(serve: Serve) -> None:
    app = create_app(ByStep, CallToolAction, CallToolObservation, max_concurrent_envs=4, access=POLICY)
    reply = httpx2.post(f"{serve(app).url}/mcp", json=rpc("tools/call", name="knock"), headers=TRAINER, trust_env=False)
    result = reply.json()["result"]
    assert (result["reward"], result["done"], result["metadata"]) == (REWARD, True, {"solution": SECRET})


class Counting(Tools):
    """Ends after two steps, which only `step` counts."""

    TOOLS = ("take",)

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None

    def take(self) -> str:
        return "taken"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.left = 2
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        assert self.left is not None, "not reset"
        if not self.left:
            raise ValueError("the episode is over")
        self.left -= 1
        return super().step(action, timeout_s=timeout_s, **kwargs)


@pytest.mark.parametrize("surface", ["HTTP", "WS /mcp", "/ws"])
def test_an_agent_cannot_call_tools_past_the_environments_own_step(serve: Serve, surface: str) -> None:
    """The limit of steps holds on OpenEnv's JSON-RPC too, and an agent's own session begins with a reset."""
    app = create_app(Counting, CallToolAction, CallToolObservation, max_concurrent_envs=4, access=POLICY)
    server = serve(app)
    take = rpc("tools/call", name="take")
    with httpx2.Client(base_url=server.url, headers=AGENT, trust_env=False) as http:
        if surface == "HTTP":
            name = http.post("/mcp", json=rpc("openenv/session/create")).json()["result"]["session_id"]
            body = rpc("tools/call", name="take", session_id=name)
            replies = [http.post("/mcp", json=body).text for _ in range(3)]
        else:
            path = surface.removeprefix("WS ")
            with socket(server, path) as ask:
                message = {"type": "mcp", "data": take} if path == "/ws" else take
                replies = [ask(message) for _ in range(3)]
    assert ["taken" in reply for reply in replies] == [True, True, False]
    assert "the episode is over" in replies[2]
