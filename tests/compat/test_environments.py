"""Environments as published ones are written: unusual models, every way to write `reset`, tool actions, no server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, RootModel
from sample_echo import EchoAction, EchoEnvironment, EchoObservation, frames

import http_calls
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import (
    Action,
    Observation,
    State,
)
from openenv.core.generic_client import GenericEnvClient
from servers import Serve

# -- models that are not quite the usual ones -------------------------------------------------------------------------


class Move(BaseModel):
    kind: Literal["move"] = "move"
    steps: int


class Say(BaseModel):
    kind: Literal["say"] = "say"
    text: str


class AnyAction(RootModel[Annotated[Move | Say, Field(discriminator="kind")]]):
    """A union of actions, and no subclass of `Action`."""


class PlainObservation(BaseModel):
    """No subclass of `Observation`, and without metadata."""

    did: str
    reward: float | None = None
    done: bool = False


class UnionEnvironment(Environment):
    def reset(self) -> PlainObservation:
        return PlainObservation(did="reset")

    def step(self, action: AnyAction) -> PlainObservation:
        chosen = action.root
        if isinstance(chosen, Move):
            return PlainObservation(did=f"moved {chosen.steps}", reward=0.5)
        return PlainObservation(did=f"said {chosen.text}", done=True)

    @property
    def state(self) -> State:
        return State()


def test_a_union_of_actions_and_a_plain_observation(serve: Serve) -> None:
    server = serve(create_app(UnionEnvironment, AnyAction, PlainObservation))
    begun, moved, said, wrong = frames(
        server.url,
        {"type": "reset", "data": {"seed": 1}},
        {"type": "step", "data": {"kind": "move", "steps": 3}},
        {"type": "step", "data": {"kind": "say", "text": "ok"}},
        {"type": "step", "data": {"kind": "fly"}},
    )
    assert begun["data"] == {"observation": {"did": "reset"}, "reward": None, "done": False}
    assert moved["data"] == {"observation": {"did": "moved 3"}, "reward": 0.5, "done": False}
    assert said["data"] == {"observation": {"did": "said ok"}, "reward": None, "done": True}
    assert wrong["data"]["code"] == "VALIDATION_ERROR"
    with http_calls.Client(base_url=server.url, trust_env=False) as http:
        stepped = http.post("/step", json={"action": {"kind": "move", "steps": 2}}).json()
        assert stepped == {"observation": {"did": "moved 2"}, "reward": 0.5, "done": False, "metadata": None}
        assert http.post("/step", json={"action": {"kind": "fly"}}).status_code == 422
        schema = http.get("/schema").json()
        assert schema["action"]["discriminator"]["propertyName"] == "kind"
        assert schema["observation"]["properties"].keys() == {"did", "reward", "done"}


class OddObservation(Observation):
    observation: str = "inner"
    info: dict[str, Any] = Field(default_factory=dict)
    state: str = "s"
    episode_id: str | None = None


class OddState(State):
    board: list[list[int]] = Field(default_factory=list)
    info: dict[str, Any] = Field(default_factory=dict)


class OddEnvironment(Environment[Action, OddObservation, OddState]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> OddObservation:
        return OddObservation(info={"a": 1}, episode_id=episode_id)

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> OddObservation:
        return OddObservation(observation="stepped", done=True, reward=1)

    @property
    def state(self) -> OddState:
        return OddState(episode_id="e", board=[[1, 2]], info={"k": "v"}, unlisted=5)


def test_fields_with_the_names_of_the_envelope_and_states_with_more_fields(serve: Serve) -> None:
    url = serve(create_app(OddEnvironment, Action, OddObservation)).url
    begun, stepped, state = frames(
        url, {"type": "reset", "data": {"episode_id": "e"}}, {"type": "step", "data": {}}, {"type": "state"}
    )
    inner = {"metadata": {}, "observation": "inner", "info": {"a": 1}, "state": "s", "episode_id": "e"}
    assert begun["data"] == {"observation": inner, "reward": None, "done": False}
    assert stepped["data"]["observation"]["observation"] == "stepped"
    full = {"episode_id": "e", "step_count": 0, "board": [[1, 2]], "info": {"k": "v"}, "unlisted": 5}
    assert state["data"] == full
    assert http_calls.get(url + "/state", trust_env=False).json() == full
    assert http_calls.get(url + "/schema", trust_env=False).json()["state"]["properties"].keys() >= {"board", "info"}


class ShyEnvironment(Environment):
    """Has no state before its first reset."""

    raises = False

    def __init__(self) -> None:
        super().__init__()
        self._state: State | None = None

    def reset(self, **kwargs: Any) -> Observation:
        self._state = State(episode_id="begun")
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> Any:
        if self._state is None and self.raises:
            raise RuntimeError("reset first")
        return self._state


class RaisingShyEnvironment(ShyEnvironment):
    raises = True


def test_a_state_that_is_none_before_the_first_reset_is_empty(serve: Serve) -> None:
    url = serve(create_app(ShyEnvironment, Action, Observation)).url
    before, _, after = frames(url, {"type": "state"}, {"type": "reset"}, {"type": "state"})
    assert before == {"type": "state", "data": {}}
    assert after["data"]["episode_id"] == "begun"
    assert http_calls.get(url + "/state", trust_env=False).status_code == 200


def test_a_state_that_raises_before_the_first_reset_is_an_error_and_no_more(serve: Serve) -> None:
    url = serve(create_app(RaisingShyEnvironment, Action, Observation)).url
    before, begun, after = frames(url, {"type": "state"}, {"type": "reset"}, {"type": "state"})
    assert before["data"] == {"message": "reset first", "code": "EXECUTION_ERROR"}
    assert begun["type"] == "observation"
    assert after["data"]["episode_id"] == "begun"
    assert http_calls.get(url + "/state", trust_env=False).status_code == 500


# -- every way to write reset -----------------------------------------------------------------------------------------


class Base(Environment):
    got: Any = None

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"timeout_s": timeout_s, **kwargs})

    @property
    def state(self) -> State:
        return State()


class NoParameters(Base):
    def reset(self) -> Observation:
        return Observation(metadata={"got": {}})


class OwnParameter(Base):
    def reset(self, task_id: str = "default") -> Observation:
        return Observation(metadata={"got": {"task_id": task_id}})


class Usual(Base):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"got": {"seed": seed, "episode_id": episode_id, **kwargs}})


class SeedOnly(Base):
    def reset(self, *, seed: int | None = None) -> Observation:
        return Observation(metadata={"got": {"seed": seed}})


class Asynchronous(Base):
    def reset(self) -> Observation:
        raise AssertionError("the asynchronous one is meant")

    async def reset_async(self, seed: int | None = None, level: int = 0) -> Observation:
        return Observation(metadata={"got": {"seed": seed, "level": level}})


@pytest.mark.parametrize(
    ("env", "got"),
    [
        (NoParameters, {}),
        (OwnParameter, {"task_id": "t"}),
        (Usual, {"seed": 4, "episode_id": "e", "task_id": "t", "level": 2}),
        (SeedOnly, {"seed": 4}),
        (Asynchronous, {"seed": 4, "level": 2}),
    ],
)
def test_reset_gets_the_keywords_it_takes(env: type[Environment], got: dict[str, Any], serve: Serve) -> None:
    url = serve(create_app(env, Action, Observation)).url
    sent = {"seed": 4, "episode_id": "e", "task_id": "t", "level": 2}
    assert frames(url, {"type": "reset", "data": sent})[0]["data"]["metadata"]["got"] == got
    assert http_calls.post(url + "/reset", json=sent, trust_env=False).json()["metadata"]["got"] == got
    with GenericEnvClient(base_url=url).sync() as client:
        assert client.reset(**sent).metadata == {"got": got}
        assert client.reset().done is False


def test_step_gets_keywords_over_http_and_never_a_second_action(serve: Serve) -> None:
    url = serve(create_app(Usual, Action, Observation)).url
    body = {"action": {}, "timeout_s": 2.5, "request_id": "r", "hint": 1}
    metadata = http_calls.post(url + "/step", json=body, trust_env=False).json()["metadata"]
    assert metadata == {"timeout_s": 2.5, "request_id": "r", "hint": 1}


# -- tool actions by the application's action class -------------------------------------------------------------------


class NamesItsAction(Base):
    def reset(self) -> Observation:
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        return Observation(metadata={"action": type(action).__name__})


class OwnCallToolAction(CallToolAction):
    extra: int = 0


@pytest.mark.parametrize("action_cls", [Action, ListToolsAction, CallToolAction])
def test_tool_actions_are_recognised_where_the_class_is_open_to_them(action_cls: Any, serve: Serve) -> None:
    url = serve(create_app(NamesItsAction, action_cls, Observation)).url
    listed, called = frames(
        url,
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "step", "data": {"type": "call_tool", "tool_name": "t", "arguments": {"a": 1}}},
    )
    assert listed["data"]["metadata"] == {"action": "ListToolsAction"}
    assert called["data"]["metadata"] == {"action": "CallToolAction"}


def test_with_a_subclass_a_tool_action_is_that_subclass_or_refused(serve: Serve) -> None:
    url = serve(create_app(NamesItsAction, OwnCallToolAction, Observation)).url
    called, listed, rpc = frames(
        url,
        {"type": "step", "data": {"type": "call_tool", "tool_name": "t", "extra": 3}},
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
    )
    assert called["data"]["metadata"] == {"action": "OwnCallToolAction"}
    assert listed["data"]["code"] == "VALIDATION_ERROR"
    assert (rpc["type"], rpc["data"]["id"]) == ("mcp", 1)


# -- environments in the same process ---------------------------------------------------------------------------------


def test_an_environment_is_stepped_in_process_without_a_server() -> None:
    env = EchoEnvironment()
    assert env.reset(seed=1, episode_id="e").echoed == "ready"
    assert env.step(EchoAction(message="abc")).reward == 3.0
    assert (env.state.episode_id, env.state.step_count) == ("e", 1)
    env.close()


def test_serialised_observations_have_the_shape_of_the_wire() -> None:
    observation = EchoObservation(echoed="x", reward=1.5, done=True, metadata={"k": 1})
    assert serialize_observation(observation) == {
        "observation": {"metadata": {"k": 1}, "echoed": "x"},
        "reward": 1.5,
        "done": True,
        "metadata": {"k": 1},
    }
    assert "metadata" not in serialize_observation(EchoObservation())
