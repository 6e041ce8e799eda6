"""A client class needs no methods: its models follow from its type parameters."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel

from environments import Add, Counter, Sum
from openenv import EnvClient, Environment, HTTPEnvClient, StepResult, VectorEnv
from openenv.errors import ProtocolError
from openenv.server.loading import as_app
from openenv.types import Action, Observation, State
from servers import Serve

ObsT = TypeVar("ObsT")


class CounterEnv(EnvClient[Add, Sum, State]):
    pass


class Patch(BaseModel):
    pixels: NDArray[np.float32]
    model_config = {"arbitrary_types_allowed": True}


class Picture(Observation):
    pixels: NDArray[np.uint8]
    depth: NDArray[np.float32] | None = None
    raw: bytes = b""
    frames: tuple[bytes, ...] = ()
    patch: Patch | None = None


class Camera(Environment[Action, Picture, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    _state = State()

    def reset(self, **kwargs: Any) -> Picture:
        patch = Patch(pixels=np.ones((1, 2), dtype=np.float32))
        return Picture(pixels=np.eye(2, dtype=np.uint8), raw=b"\xff\x00", frames=(b"\xfe",), patch=patch)

    def step(self, action: Action, **kwargs: Any) -> Picture:
        return Picture(pixels=np.zeros((0, 3), dtype=np.uint8), depth=np.array([0.5], dtype=np.float32), reward=1.0)

    @property
    def state(self) -> State:
        return self._state


class CameraEnv(EnvClient[Action, Picture, State]):
    pass


def test_an_empty_client_class_plays_an_episode(serve: Serve) -> None:
    with CounterEnv(serve(as_app(Counter, "Counter")).url).sync() as env:
        first = env.reset(episode_id="mine")
        result = env.step(Add(amount=3))
        assert (type(first.observation), type(result.observation), type(env.state())) == (Sum, Sum, State)
        assert result.observation.total == 3
        assert (result.observation.reward, result.observation.done) == (result.reward, result.done)
        assert env.state().episode_id == "mine"


def test_clients_over_http_and_vectors_need_no_methods_either(serve: Serve) -> None:
    class OverHttp(HTTPEnvClient[Add, Sum]):
        pass

    url = serve(as_app(Counter, "Counter")).url
    with OverHttp(url) as env:
        env.reset()
        assert env.step(Add(amount=2)).observation.total == 2
    with VectorEnv(url, 2, client=CounterEnv) as many:
        many.reset()
        assert [one.total for one in many.step([Add(amount=1), Add(amount=5)]).observations] == [1, 5]


def test_arrays_and_bytes_come_back_as_what_they_were(serve: Serve) -> None:
    with CameraEnv(serve(as_app(Camera, "Camera")).url).sync() as env:
        first = env.reset().observation
        assert first.pixels.dtype == np.uint8
        assert first.pixels.tolist() == [[1, 0], [0, 1]]
        assert (first.depth, first.raw, first.frames) == (None, b"\xff\x00", (b"\xfe",))
        assert first.patch is not None
        assert first.patch.pixels.dtype == np.float32
        second = env.step(Action()).observation
        assert second.depth is not None
        assert second.depth.dtype == np.float32


def test_models_are_found_through_generic_base_classes() -> None:
    class Base(EnvClient[Add, ObsT, State], Generic[ObsT]):
        pass

    class Own(Base[Sum]):
        pass

    class Quoted(EnvClient["Add", "Sum", "State"]):
        pass

    for cls in (Own, Quoted):
        result: StepResult[Sum] = cls(base_url="http://h")._parse_result({"observation": {"total": 4}, "reward": 1})
        assert (result.observation.total, result.observation.reward) == (4, 1)


def test_a_plain_model_gets_no_reward_that_it_has_no_field_for() -> None:
    class Text(BaseModel):
        model_config = {"extra": "forbid"}
        text: str

    class TextEnv(EnvClient[Add, Text, State]):
        pass

    result = TextEnv(base_url="http://h")._parse_result({"observation": {"text": "a"}, "reward": 0.5, "done": True})
    assert (result.observation.text, result.reward, result.done) == ("a", 0.5, True)


def test_an_action_leaves_its_empty_metadata_at_home() -> None:
    env = CounterEnv(base_url="http://h")
    assert "metadata" not in env._step_payload(Add(amount=1))
    assert env._step_payload(Add(amount=1, metadata={"a": 1}))["metadata"] == {"a": 1}


def test_a_reply_that_does_not_fit_says_where() -> None:
    with pytest.raises(ProtocolError, match=r"no Sum: total: .*same version") as caught:
        CounterEnv(base_url="http://h")._parse_result({"observation": {"total": "many"}})
    assert len(caught.value.details["errors"]) == 1


def test_a_method_that_is_written_is_used() -> None:
    class Louder(CounterEnv):
        def _step_payload(self, action: Add) -> dict[str, Any]:
            return {"amount": action.amount * 10}

    assert Louder(base_url="http://h")._step_payload(Add(amount=2)) == {"amount": 20}


@pytest.mark.parametrize("parameters", [(), (Any, Any, Any), (Add, Any, State)], ids=str)
def test_a_class_without_models_says_what_to_write(parameters: Any) -> None:
    base: Any = EnvClient[parameters] if parameters else EnvClient
    cls = type("Half", (base,) if not parameters else (base.__origin__,), {"__orig_bases__": (base,)})
    with pytest.raises(TypeError, match=r"class Half\(EnvClient\[MyAction, MyObservation, MyState\]\)"):
        cls(base_url="http://h")
