"""A reward is a finite number or absent: the error on v2, MCP and vectors, the published null, the counter, the log."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict

import http_calls
from environments import Idle, Tools
from openenv import Action, GenericEnvClient, VectorEnv, create_app
from openenv.errors import NonFiniteReward, SlotsFailed
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.access import AccessPolicy
from servers import RunningServer, Serve

BROKEN: list[Any] = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), np.array(math.nan), 10**400]


class Pay(Action):
    what: int = -1
    """An index of BROKEN; -1 pays 0.5."""


class Paid(BaseModel):
    """An observation whose reward may be anything."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    reward: Any = None
    done: bool = False
    steps: int = 0


class Payer(Idle):
    """Pays what its action says."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.steps = 0
        return Paid(reward=math.nan if seed == 13 else None)

    def step(self, action: Pay, timeout_s: float | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.steps += 1
        return Paid(reward=0.5 if action.what < 0 else BROKEN[action.what], steps=self.steps)


@pytest.fixture(params=["thread", "process"])
def server(request: pytest.FixtureRequest, serve: Serve) -> RunningServer:
    """A server that runs environments in threads, and one that runs them in worker processes."""
    options = {"env_processes": 1} if request.param == "process" else {}
    return serve(create_app(Payer, Pay, Paid, max_concurrent_envs=8, runner=request.param, **options))


def counted(server: Any, code: str = "NON_FINITE_REWARD") -> float:
    text = http_calls.get(f"{server.url}/metrics", trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    of_code = [one.value for one in samples if one.name == "openenv_errors_total" and one.labels.get("code") == code]
    return sum(of_code)


@pytest.mark.slow_but_for("thread-v1", "thread-v2", "process-v2")
@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_every_broken_reward_is_counted_and_each_session_logs_it_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture, protocol: Any
) -> None:
    caplog.set_level(logging.WARNING)
    with GenericEnvClient(server.url, protocol=protocol).sync() as client:
        client.reset()
        for index in range(len(BROKEN)):
            if protocol == "v1":
                result = client.step({"what": index})
                assert (result.reward, result.observation["steps"]) == (None, index + 1)
                assert result.metadata is not None
                assert "nonfinite_reward" in result.metadata
            else:
                with pytest.raises(NonFiniteReward, match="finite number"):
                    client.step({"what": index})
        assert client.step({"what": -1}).observation["steps"] == len(BROKEN) + 1  # the steps have run
    assert counted(server) == len(BROKEN)
    lines = [record for record in caplog.records if "finite number" in record.getMessage()]
    assert len([record for record in lines if record.name == "openenv.server.sessions.manager"]) == 1


@pytest.mark.slow_but_for("thread")
def test_a_broken_reward_of_reset_begins_the_episode_all_the_same(server: RunningServer) -> None:
    with GenericEnvClient(server.url, protocol="v2").sync() as client:
        with pytest.raises(NonFiniteReward):
            client.reset(seed=13)
        assert client.step({"what": -1}).reward == 0.5
        assert client.reset().reward is None


@pytest.mark.slow_but_for("thread")
def test_plain_http_publishes_null_and_counts_it(server: RunningServer) -> None:
    headers = {"X-OpenEnv-Session": "new"}
    first = http_calls.post(f"{server.url}/reset", json={}, headers=headers, trust_env=False)
    named = {"X-OpenEnv-Session": first.headers["X-OpenEnv-Session"]}
    body = {"action": {"what": 0}}
    answer = http_calls.post(f"{server.url}/step", json=body, headers=named, trust_env=False)
    assert (answer.status_code, answer.json()["reward"]) == (200, None)
    assert answer.json()["metadata"] == {"nonfinite_reward": "nan"}
    assert counted(server) == 1


@pytest.mark.slow_but_for("thread-v1", "thread-v2")
@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_slot_of_a_vector_fails_and_the_others_step_on(server: RunningServer, protocol: Any) -> None:
    with VectorEnv(server.url, 3, protocol=protocol) as env:
        env.reset()
        with pytest.raises(SlotsFailed) as caught:
            env.step([{"what": -1}, {"what": 0}, {"what": -1}])
        assert isinstance(caught.value.errors[1], NonFiniteReward)
        assert list(caught.value.errors) == [1]
        assert [one.reward for one in caught.value.result.by_slot if one.error is None] == [0.5, 0.5]
        again = env.step([{"what": -1}] * 3)
        assert list(again.rewards) == [0.5] * 3
        assert [one["steps"] for one in again.observations] == [2, 2, 2]


class Shop(Tools):
    """Each call of its tool pays what its argument says."""

    TOOLS = ("pay",)

    def __init__(self) -> None:
        super().__init__()
        self.paid = 0.0

    def pay(self, amount: str) -> str:
        self.paid = float(amount)
        return amount

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        observation.reward = self.paid
        return observation

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = self.paid
        return observation


def test_an_agent_gets_the_code_and_the_orchestrator_sees_that_the_episode_is_worthless(
    serve: Serve,
) -> None:
    policy = AccessPolicy(orchestrator="trainer-token", agent="agent-token")
    server = serve(create_app(Shop, CallToolAction, CallToolObservation, access=policy, max_concurrent_envs=4))
    agent, trainer = ({"Authorization": f"Bearer {name}-token"} for name in ("agent", "trainer"))

    def rpc(method: str, **params: Any) -> Any:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return http_calls.post(f"{server.url}/mcp", json=message, headers=agent, trust_env=False).json()

    name = rpc("openenv/session/create")["result"]["session_id"]
    for amount in ("0.25", "nan"):
        answer = rpc("tools/call", session_id=name, name="pay", arguments={"amount": amount})
    assert answer["error"]["data"]["code"] == "NON_FINITE_REWARD"
    shown = http_calls.get(f"{server.url}/sessions/{name}", headers=trainer, trust_env=False).json()["episode"]
    assert (shown["steps"], shown["reward"], shown["error"]) == (2, None, "NON_FINITE_REWARD")
    assert "result" in rpc("tools/call", session_id=name, name="pay", arguments={"amount": "1"})
