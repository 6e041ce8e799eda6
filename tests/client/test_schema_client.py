"""`openenv.connect` makes models of the schemas that a server publishes."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, Field, RootModel, ValidationError

import openenv
from environments import Add, Counter, Shelf
from openenv.client.schema_models import build_types, read_models
from openenv.errors import ConnectFailed, ProtocolError, RequestValidationError
from openenv.protocol.schema import json_schema
from openenv.server.loading import as_app
from openenv.types import Action, Observation, State
from servers import Serve


class Point(BaseModel):
    x: int
    y: float = 1.5


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Drive(Action):
    to: Point
    mode: Literal["fast", "slow"] = "slow"
    times: int = Field(default=1, ge=1, le=9)
    tags: list[str] = Field(default_factory=lambda: ["a"])
    home: Point = Point(x=7)
    since: datetime.datetime = datetime.datetime(2024, 1, 1)  # noqa: DTZ001


class View(Observation):
    pixels: NDArray[np.uint8]
    depth: NDArray[np.float32] | None = None
    raw: bytes = b""
    tree: Node | None = None
    pair: tuple[int, str] = (1, "a")
    seen: list[str] = Field(default_factory=list)


class Robot(openenv.Environment[Drive, View, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    _state = State()

    def reset(self, **kwargs: Any) -> View:
        return View(pixels=np.eye(2, dtype=np.uint8), raw=b"\xff", tree=Node(name="a", children=[Node(name="b")]))

    def step(self, action: Drive, **kwargs: Any) -> View:
        seen = [*action.tags, action.mode, str(action.home.x), str(action.since.year)]
        return View(pixels=np.full((1, action.times), action.to.x, dtype=np.uint8), seen=seen, reward=1.0, done=True)

    @property
    def state(self) -> State:
        return self._state


def types_of(action: Any, observation: Any = Observation, state: Any = State) -> Any:
    schemas = {"action": json_schema(action), "observation": json_schema(observation), "state": json_schema(state)}
    return build_types(read_models(schemas))


def test_a_list_of_an_observation_is_empty_by_default_and_one_of_an_action_stays_unset() -> None:
    types = types_of(Drive, View)
    view = types.observation.model_fields["seen"]
    assert (view.annotation, view.get_default(call_default_factory=True)) == (list[str], [])
    drive = types.action(to={"x": 1})
    assert drive.tags is None
    assert "tags" not in drive.model_dump()  # the server's default, ["a"], counts
    children = types.observation(pixels=np.eye(2, dtype=np.uint8), tree={"name": "a"}).tree.children
    assert children == []  # its schema has the default


def test_models_come_from_the_server(serve: Serve) -> None:
    with openenv.connect(serve(as_app(Robot, "Robot")).url).sync() as env:
        first = env.reset().observation
        assert (type(first).__name__, first.raw, first.pair, first.tree.children[0].name) == (
            "View",
            b"\xff",
            (1, "a"),
            "b",
        )
        assert isinstance(first.pixels, np.ndarray)
        assert first.pixels.dtype == np.uint8
        result = env.step(env.Action(to={"x": 4}, times=3))
        assert result.observation.pixels.tolist() == [[4, 4, 4]]
        assert (result.reward, result.done) == (1.0, True)
        # What the schema does not say, the server fills in.
        assert result.observation.seen == ["a", "slow", "7", "2024"]
        assert env.step({"to": {"x": 1}, "tags": ["b"]}).observation.seen[0] == "b"
        assert env.state().step_count == 0


def test_an_action_that_does_not_fit_is_refused_before_it_is_sent(serve: Serve) -> None:
    with openenv.connect(serve(as_app(Robot, "Robot")).url).sync() as env:
        env.reset()
        with pytest.raises(ValidationError, match="less than or equal to 9"):
            env.Action(to={"x": 1}, times=10)
        with pytest.raises(RequestValidationError, match="times") as caught:
            env.step({"to": {"x": 1}, "times": 10})
        assert caught.value.details["errors"][0]["loc"] == ("times",)


@pytest.mark.anyio
async def test_it_is_awaited_inside_a_loop(serve: Serve) -> None:
    async with openenv.connect(serve(as_app(Counter, "Counter")).url) as env:
        await env.reset()
        assert (await env.step(env.Action(amount=2))).observation.total == 2
        async with env.new_session() as other:
            assert other.Action is env.Action


def test_the_models_are_known_once_it_is_connected(serve: Serve) -> None:
    env = openenv.connect(serve(as_app(Counter, "Counter")).url)
    with pytest.raises(RuntimeError, match="once the client is connected"):
        _ = env.Action
    with env:
        assert env.Action(amount=1).amount == 1


def test_tools_are_called_by_steps(serve: Serve) -> None:
    with openenv.connect(serve(as_app(Shelf, "Shelf")).url).sync() as env:
        env.reset()
        assert env.Action.model_fields.keys() >= {"metadata"}


def test_no_server_is_a_typed_error(free_port: Callable[[], int]) -> None:
    env = openenv.connect(f"http://127.0.0.1:{free_port()}", retry_refused_s=0.0).sync()
    with pytest.raises(ConnectFailed):
        env.reset()


def test_a_root_that_is_a_union_stays_one() -> None:
    class Left(BaseModel):
        kind: Literal["left"]

    class Right(BaseModel):
        kind: Literal["right"]
        by: int

    class Either(RootModel[Left | Right]):
        pass

    action = types_of(Either).action
    assert {one.__name__ for one in action.__args__} == {"Left", "Right"}


def test_names_that_python_has_taken_get_an_underscore() -> None:
    schema = {
        "type": "object",
        "title": "Odd action",
        "properties": {"class": {"type": "string"}, "a-b": {"type": "integer"}, "1st": {"type": "integer"}},
        "required": ["class", "a-b", "1st"],
    }
    types = build_types(read_models({"action": schema, "observation": json_schema(Observation), "state": {}}))
    action = types.action(class_="x", a_b=1, value_1st=2)
    assert type(action).__name__ == "OddAction"
    assert action.model_dump() == {"class": "x", "a-b": 1, "1st": 2}
    assert types.observation is Observation


def test_models_of_one_name_in_two_documents_are_one_if_they_are_the_same() -> None:
    class Other(BaseModel):
        spot: Point

    types = types_of(Drive, type("Spot", (Observation,), {"__annotations__": {"at": Other}}))
    assert types.observation.model_fields["at"].annotation.model_fields["spot"].annotation.__name__ == "Point"


@pytest.mark.parametrize(
    ("schemas", "reason"),
    [({}, "action is NoneType"), ({"action": {"$ref": "#/$defs/None"}}, "refers to nothing")],
)
def test_schemas_that_are_none_are_a_typed_error(schemas: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        openenv.client.schema_client.learn_types(schemas, "http://h")  # type: ignore[attr-defined]


def test_a_model_that_holds_itself_without_end_is_read() -> None:
    types = types_of(type("Grow", (Action,), {"__annotations__": {"tree": Node}, "__module__": __name__}))
    tree = types.action(tree={"name": "a", "children": [{"name": "b", "children": []}]}).tree
    assert tree.children[0].name == "b"


def test_an_action_class_of_the_same_fields_is_the_base_itself() -> None:
    assert types_of(Add).action.__base__.__base__ is Action
