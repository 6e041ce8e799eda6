"""Models as the first release had them, dataclasses: an environment that decorates its own plays on a current server.

The environment, its client and its application are written as they were for `openenv-core` 0.1.0.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

import http_calls
import openenv.core.env_server.types as current
from servers import Serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from openenv_core.client_types import StepResult

    import openenv_core
    from openenv_core.env_server import Action, Environment, Observation, State, Transform, create_app, types
    from openenv_core.http_env_client import HTTPEnvClient


@dataclass(kw_only=True)
class MoveAction(Action):
    direction: str
    steps: int = 1
    tags: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class MoveObservation(Observation):
    position: int
    board: list[list[int]] = field(default_factory=list)


@dataclass
class MoveState(State):
    position: int = 0
    path: list[str] = field(default_factory=list)


@dataclass
class Command(Action):
    text: str
    loud: bool = False

    def __post_init__(self) -> None:
        if self.loud:
            self.text = self.text.upper()


class PlainAction(Action):
    direction: str


class HalfAPoint(Transform):
    def __call__(self, observation: Observation) -> Observation:
        observation.reward = 0.5
        return observation


class MoveEnvironment(Environment):
    def __init__(self) -> None:
        super().__init__(transform=HalfAPoint())
        self._state = MoveState()

    def reset(self) -> MoveObservation:
        self._state = MoveState(episode_id="e", step_count=0)
        return MoveObservation(position=0, done=False, reward=0.0)

    def step(self, action: MoveAction) -> Observation:
        self._state.step_count += 1
        self._state.position += action.steps
        self._state.path.append(action.direction)
        observation = MoveObservation(position=self._state.position, board=[[1], [2]], done=self._state.position > 3)
        return self._apply_transform(observation)

    @property
    def state(self) -> MoveState:
        return self._state


class MoveEnv(HTTPEnvClient[MoveAction, MoveObservation]):
    def _step_payload(self, action: MoveAction) -> dict[str, Any]:
        return dataclasses.asdict(action)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[MoveObservation]:
        observation = MoveObservation(**payload["observation"], reward=payload["reward"], done=payload["done"])
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> MoveState:
        return MoveState(**payload)


@pytest.mark.filterwarnings("ignore:.*keeps no sessions")
@pytest.mark.parametrize("env", [MoveEnvironment, MoveEnvironment()], ids=["class", "instance"])
def test_an_environment_of_dataclasses_plays(serve: Serve, env: Any) -> None:
    with MoveEnv(base_url=serve(create_app(env, MoveAction, MoveObservation)).url) as client:
        assert client.reset().observation == MoveObservation(position=0, reward=0.0)
        first = client.step(MoveAction(direction="up", steps=2, tags=["a"]))
        assert (first.observation.position, first.observation.board, first.reward) == (2, [[1], [2]], 0.5)
        assert client.step(MoveAction(direction="left", steps=2)).done
        assert client.state() == MoveState("e", 2, position=4, path=["up", "left"])


def test_a_refused_action_is_unprocessable_and_the_schema_is_there(serve: Serve) -> None:
    url = serve(create_app(MoveEnvironment(), MoveAction, MoveObservation)).url
    assert http_calls.post(url + "/step", json={"action": {"steps": 2}}, trust_env=False).status_code == 422
    schema = http_calls.get(url + "/schema", trust_env=False).json()
    assert schema["action"]["required"] == ["direction"]
    assert set(schema["observation"]["properties"]) >= {"position", "board", "done", "reward", "metadata"}
    assert set(schema["state"]["properties"]) >= {"position", "path", "episode_id"}


def test_a_decorated_model_is_a_dataclass_and_a_current_model() -> None:
    action = MoveAction(direction="up", metadata={"k": 1})
    assert isinstance(action, current.Action)
    assert dataclasses.asdict(action) == {"metadata": {"k": 1}, "direction": "up", "steps": 1, "tags": []}
    assert dataclasses.replace(action, steps=5).steps == 5
    assert action == MoveAction(direction="up", metadata={"k": 1}) != MoveAction(direction="up")
    assert MoveAction(direction="up").tags is not MoveAction(direction="up").tags
    assert action.model_dump() == dataclasses.asdict(action)
    assert dataclasses.asdict(MoveObservation(position=1)).keys() == {"done", "reward", "metadata", "position", "board"}
    with pytest.raises(ValidationError):
        MoveAction()


def test_positions_are_counted_as_a_dataclass_counts_them() -> None:
    assert MoveState("e", 3, 7) == MoveState(episode_id="e", step_count=3, position=7)
    assert Command("hi") == Command(text="hi", loud=False)
    assert State("e").episode_id == "e"
    with pytest.raises(TypeError, match="positional"):
        Command("hi", True, "more")
    with pytest.raises(TypeError, match="text"):
        Command("hi", text="ho")


def test_what_a_dataclass_does_after_its_constructor_is_done() -> None:
    assert Command("hi", loud=True).text == "HI"
    assert Command.model_validate({"text": "hi", "loud": True}).text == "HI"


def test_a_subclass_without_the_decorator_is_an_ordinary_model(serve: Serve) -> None:
    assert PlainAction(direction="up").model_dump() == {"metadata": {}, "direction": "up"}
    url = serve(create_app(MoveEnvironment(), Action, MoveObservation)).url
    assert http_calls.post(url + "/step", json={"action": {"colour": 1}}, trust_env=False).status_code == 422


def test_old_names_are_the_tolerant_models_and_the_rest_is_current() -> None:
    assert openenv_core.Action is types.Action is Action
    assert types.ConcurrencyConfig is current.ConcurrencyConfig
    assert set(types.__all__) == set(current.__all__)
    for name in ("Action", "Observation", "State"):
        mine, theirs = getattr(types, name), getattr(current, name)
        assert issubclass(mine, theirs)
        assert mine().model_dump() == theirs().model_dump()
        assert mine.model_json_schema()["properties"] == theirs.model_json_schema()["properties"]


# -- the samples of the package page of openenv-core 0.1 ---------------------------------------------------------------


@dataclass
class PlainReply:
    response: str
    reward: float = 0.0
    done: bool = False


@dataclass
class PlainText:
    text: str


class ReplyClient(openenv_core.HTTPEnvClient[PlainText, PlainReply]):
    def _step_payload(self, action: PlainText) -> dict[str, Any]:
        return {"text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> openenv_core.StepResult[PlainReply]:
        return openenv_core.StepResult(
            observation=PlainReply(**payload["observation"]),
            reward=payload.get("reward"),
            done=payload.get("done", False),
        )

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return payload


class ReplyEnvironment(Environment):
    def reset(self) -> PlainReply:
        return PlainReply(response="Ready")

    def step(self, action: PlainText) -> PlainReply:
        return PlainReply(response=f"Echo: {action.text}", reward=1.0)

    @property
    def state(self) -> State:
        return State(episode_id="e")


def test_the_client_and_the_server_of_the_package_page_play_an_episode(serve: Serve) -> None:
    client = ReplyClient(base_url=serve(create_app(ReplyEnvironment(), PlainText, PlainReply)).url)
    assert client.reset().observation == PlainReply(response="Ready")
    result = client.step(PlainText(text="hello"))
    assert (result.observation.response, result.reward, result.done) == ("Echo: hello", 1.0, False)
    assert isinstance(result, StepResult)
    client.close()


def test_a_server_converts_actions_and_observations_as_its_page_says() -> None:
    server = openenv_core.env_server.HTTPEnvServer(
        env=MoveEnvironment(), action_cls=MoveAction, observation_cls=MoveObservation
    )
    data = {"direction": "left", "metadata": {"a": 1}}
    action = server._deserialize_action(data)
    assert isinstance(action, MoveAction)
    assert (action.direction, action.steps, action.metadata) == ("left", 1, {"a": 1})
    assert data == {"direction": "left", "metadata": {"a": 1}}
    with pytest.raises(ValidationError):
        server._deserialize_action({})
    observation = MoveObservation(position=2, reward=0.5, done=True, metadata={"k": 1})
    assert server._serialize_observation(observation) == {
        "observation": {"position": 2, "board": []},
        "reward": 0.5,
        "done": True,
    }
    plain = openenv_core.env_server.HTTPEnvServer(
        env=ReplyEnvironment(), action_cls=PlainText, observation_cls=PlainReply
    )
    assert plain._deserialize_action({"text": "x"}) == PlainText(text="x")
    assert plain._serialize_observation(PlainReply("r", 1.0)) == {
        "observation": {"response": "r"},
        "reward": 1.0,
        "done": False,
    }
