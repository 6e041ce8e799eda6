"""Models that decide themselves what is sent, as published environments have them, in both protocols."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from openenv.protocol.binary_values import observation_message, state_message
from servers import Serve


class Riddle(Observation):
    """Dumps less than its fields."""

    answer: Any = "secret"
    picture: bytes = b"ab"

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        fields = super().model_dump(**kwargs)
        if fields.pop("answer") == "broken":
            raise ValueError("cannot be dumped")
        return fields


class RiddleState(State):
    """Dumps one field."""

    answer: str = "secret"

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        return {"step_count": self.step_count}


class Riddles(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Riddle()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Riddle(reward=1.5, **action.metadata)

    @property
    def state(self) -> State:
        return RiddleState(step_count=3)


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_only_what_a_model_dumps_is_sent(serve: Serve, protocol: Any) -> None:
    server = serve(create_app(Riddles, Action, Riddle, max_concurrent_envs=4))
    with GenericEnvClient(server.url, protocol=protocol).sync() as client:
        results = [client.reset(), client.step({}), client.step({"metadata": {"metadata": {"a": 1}}})]
        assert [result.observation for result in results] == [
            {"metadata": {}, "picture": "YWI="},
            {"metadata": {}, "picture": "YWI="},
            {"metadata": {"a": 1}, "picture": "YWI="},
        ]
        assert [result.reward for result in results] == [None, 1.5, 1.5]
        assert client.state() == {"step_count": 3}


def test_what_a_model_hides_is_not_sent_because_it_fails(serve: Serve) -> None:
    server = serve(create_app(Riddles, Action, Riddle, max_concurrent_envs=4))
    with GenericEnvClient(server.url).sync() as client:
        client.reset()
        with pytest.raises(RuntimeError, match="cannot be dumped"):
            client.step({"metadata": {"answer": "broken"}})
        assert client.step({}).reward == 1.5


def test_packed_messages_hold_what_the_model_dumps() -> None:
    assert observation_message(Riddle(reward=1.0))["observation"] == {"metadata": {}, "picture": b"ab"}
    assert state_message(RiddleState(step_count=3)) == {"step_count": 3}


class Derived(BaseModel):
    """A plain model whose reward and end are no fields."""

    count: int = 0
    metadata: dict[str, Any] = {}

    @property
    def reward(self) -> float:
        return self.count / 2

    @property
    def done(self) -> bool:
        return self.count > 1


class Loose(BaseModel):
    """A plain model that takes any field."""

    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize(
    ("observation", "reward", "done"),
    [
        (Derived(count=1), 0.5, False),
        (Derived(count=2, metadata={"a": 1}), 1.0, True),
        (Loose(count=2, reward=2.5, done=True), 2.5, True),
        (Loose(count=2), None, False),
    ],
)
def test_reward_and_end_of_a_plain_model_need_not_be_fields(observation: Any, reward: Any, done: bool) -> None:
    for message in (serialize_observation(observation), observation_message(observation)):
        assert (message["reward"], message["done"]) == (reward, done)
        assert message["observation"]["count"] == observation.count
        assert not {"reward", "done"} & set(message["observation"])
