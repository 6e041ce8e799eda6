"""Tool calls of MCP clients as steps of an episode: counted, rewarded, and the reward kept from the agent; and
production mode, where there are no episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import http_calls
from environments import Idle
from openenv.core.env_server.http_server import create_app
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.types import Observation
from servers import Serve

STEP = {"type": "call_tool", "tool_name": "count", "arguments": {}}


@pytest.fixture(params=["handshake", "modern"])
def agent(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Connect a client of either era."""
    connect: Callable[[str], Any] = request.getfixturevalue(request.param)
    return connect


def test_tool_calls_are_steps_of_the_episode(server: Any, agent: Any) -> None:
    client = agent(server.url)
    for _ in range(2):
        client.call("count")
    assert server.watch.steps == 2
    assert server.session.env.state.step_count == 2
    assert server.session.step_count == 2


def test_lists_and_prompts_are_no_steps(server: Any, agent: Any) -> None:
    client = agent(server.url)
    client.request("tools/list")
    client.request("prompts/list")
    client.request("resources/read", {"uri": "note://today"})
    assert server.watch.steps == 0


def test_reward_and_end_are_kept_for_the_orchestrator(server: Any, agent: Any) -> None:
    client = agent(server.url)
    answers = [client.call("echo", {"message": "a"}) for _ in range(3)]
    for answer in answers:
        written = json.dumps(answer.messages)
        assert "reward" not in written
        assert "done" not in written
    episode = server.session.episode
    assert (episode.steps, episode.reward, episode.total_reward, episode.done) == (3, 0.5, 1.5, True)


def test_a_failing_tool_is_a_step_too(server: Any, agent: Any) -> None:
    client = agent(server.url)
    assert client.call("boom").result["isError"] is True
    assert (server.session.episode.steps, server.watch.steps) == (1, 1)


def test_an_orchestrator_sees_what_its_agent_earned(server: Any, uninitialized: Any) -> None:
    headers = {"x-openenv-session": "new"}
    reset = http_calls.post(f"{server.url}/reset", json={"seed": 7}, headers=headers, trust_env=False)
    name = reset.headers["x-openenv-session"]
    client = uninitialized(server.url)
    client.initialize(headers={"X-OpenEnv-Session": name})
    assert client.call("count").text == "8"
    assert server.manager.find(name).episode.total_reward == 0.5
    step = {"action": {"type": "call_tool", "tool_name": "count", "arguments": {}}}
    stepped = http_calls.post(
        f"{server.url}/step", json=step, headers={"x-openenv-session": name}, trust_env=False
    ).json()
    assert (stepped["reward"], stepped["observation"]["result"]["data"]) == (0.5, 9)


def test_a_failed_reset_is_reported_and_leaves_no_session(serve: Serve, uninitialized: Any, modern: Any) -> None:
    running = serve(create_app(Broken, CallToolAction, CallToolObservation))
    answer = uninitialized(running.url).initialize()
    assert (answer.status, answer.error["code"]) == (200, -32603)
    assert "out of order" in answer.error["message"]
    answer = modern(running.url).call("any")
    assert (answer.status, answer.error["code"]) == (200, -32603)
    running.wait_for(lambda: running.manager.active == 0)


class Broken(Idle):
    """An environment whose episodes cannot begin."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        raise RuntimeError("out of order")


# -- production ---------------------------------------------------------------------------------------------------


def test_production_has_its_own_tools(desk: Any, agent: Any) -> None:
    client = agent(desk(mode="production").url)
    names = [tool["name"] for tool in client.request("tools/list").result["tools"]]
    assert "ship" in names
    assert "peek" not in names
    assert client.call("ship").text == "shipped"
    assert client.call("peek").error["code"] == -32602


def test_production_has_no_episodes(desk: Any, agent: Any) -> None:
    server = desk(mode="production")
    client = agent(server.url)
    assert [client.call("count").text for _ in range(4)] == ["1", "2", "3", "4"]
    assert (server.watch.resets, server.watch.steps, server.session.episode.steps) == (0, 0, 0)


@pytest.mark.parametrize(("method", "path"), [("POST", "/reset"), ("POST", "/step"), ("GET", "/state")])
def test_production_has_no_gym_routes(desk: Any, method: str, path: str) -> None:
    response = http_calls.request(method, desk(mode="production").url + path, json={}, trust_env=False)
    assert response.status_code == 404


@pytest.mark.parametrize("frame", [{"type": "reset"}, {"type": "state"}, {"type": "step", "data": STEP}])
def test_production_takes_gym_frames_and_the_connection_goes_on(desk: Any, open_socket: Any, frame: Any) -> None:
    socket = open_socket(desk(mode="production").url, "/ws")
    socket.socket.send(json.dumps(frame))
    assert json.loads(socket.socket.recv(10))["type"] in ("observation", "state")
    assert socket.own("tools/call", {"name": "ship"})["result"]["data"] == "shipped"


def test_own_methods_work_in_production(desk: Any, wire: Any) -> None:
    client = wire(desk(mode="production").url)
    names = [tool["name"] for tool in client.own("tools/list")["result"]["tools"]]
    assert "ship" in names
    assert "peek" not in names
    name = client.own("openenv/session/create")["result"]["session_id"]
    calls = [client.own("tools/call", {"name": "count", "session_id": name})["result"]["data"] for _ in range(2)]
    assert calls == [1, 2]
    assert client.own("tools/call", {"name": "peek", "session_id": name})["error"]["code"] == -32603
