"""Whatever an environment puts into an observation, the step that made it is not lost, over WebSocket and HTTP."""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import io
import json
import math
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict

from environments import Idle
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import Action, Observation, State
from servers import Serve

HEADER = "X-OpenEnv-Session"


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float


class Unprintable:
    """Neither JSON nor `repr` know what to do with it."""

    def __repr__(self) -> str:
        raise RuntimeError("not even that")


class Opaque:
    """Has a `repr` and nothing else."""

    def __repr__(self) -> str:
        return "<Opaque>"


def circular() -> dict[str, Any]:
    """A dict that holds itself."""
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def png(value: Any) -> bool:
    """Whether a value is a PNG as a data URL."""
    head, _, body = value.partition(",")
    return head == "data:image/png;base64" and Image.open(io.BytesIO(base64.b64decode(body))).size == (4, 3)


Check = Callable[[Any], bool]
VALUES: dict[str, tuple[Callable[[], Any], Check]] = {
    "array": (lambda: np.arange(6, dtype=np.float32).reshape(2, 3), lambda v: v == [[0, 1, 2], [3, 4, 5]]),
    "array with NaN": (lambda: np.array([1.0, math.nan]), lambda v: v == [1.0, None]),
    "array of objects": (lambda: np.array([Opaque(), 1], dtype=object), lambda v: v == ["<Opaque>", 1]),
    "scalar": (lambda: np.int64(7), lambda v: v == 7),
    "boolean scalar": (lambda: np.bool_(True), lambda v: v is True),
    "arrays inside": (lambda: {"a": [np.zeros(2), {"b": np.ones(1)}]}, lambda v: v == {"a": [[0, 0], {"b": [1]}]}),
    "bytes": (lambda: b"\x00\xff\xfe", lambda v: base64.urlsafe_b64decode(v) == b"\x00\xff\xfe"),
    "bytearray": (lambda: bytearray(b"\x00\xff"), lambda v: base64.urlsafe_b64decode(v) == b"\x00\xff"),
    "memoryview": (lambda: memoryview(b"\x00\xff"), lambda v: base64.urlsafe_b64decode(v) == b"\x00\xff"),
    "image": (lambda: Image.new("RGB", (4, 3), "red"), png),
    "NaN": (lambda: math.nan, lambda v: v is None),
    "infinity": (lambda: [math.inf, -math.inf], lambda v: v == [None, None]),
    "huge integer": (lambda: 10**400, lambda v: v is not None),
    "set": (lambda: {1}, lambda v: v == [1]),
    "tuple": (lambda: (1, "a"), lambda v: v == [1, "a"]),
    "enum": (lambda: Colour.RED, lambda v: v == "red"),
    "dataclass": (lambda: Point(1, 2.5), lambda v: v == {"x": 1, "y": 2.5}),
    "date": (lambda: datetime.date(2024, 2, 29), lambda v: v == "2024-02-29"),
    "decimal": (lambda: decimal.Decimal("1.5"), lambda v: float(v) == 1.5),
    "uuid": (lambda: uuid.UUID(int=5), lambda v: v.endswith("5")),
    "path": (lambda: pathlib.Path("a/b"), lambda v: v == "a/b"),
    "complex": (lambda: 1 + 2j, lambda v: v is not None),
    "keys that are no text": (lambda: {(1, 2): "a", 3: "b"}, lambda v: "b" in v.values()),
    "lone surrogate": (lambda: "bad \ud800", lambda v: v is not None),
    "surrogate key": (lambda: {"\ud800": 1}, lambda v: v is not None),
    "function": (lambda: len, lambda v: "len" in v),
    "opaque object": (Opaque, lambda v: v == "<Opaque>"),
    "object without repr": (Unprintable, lambda v: isinstance(v, str)),
    "generator": (lambda: (n for n in range(3)), lambda v: v is not None),
    "circle": (circular, lambda v: v is not None),
    "deep": (lambda: nested(5000), lambda v: v is not None),
    "exception": (lambda: ValueError("oops"), lambda v: "oops" in v),
    "model": (lambda: Observation(reward=1.0), lambda v: v["reward"] == 1.0),
}


class Pick(Action):
    """Names the value to return."""

    name: str
    where: str = "value"


class Thing(Observation):
    """An observation with anything in it."""

    count: int = 0
    value: Any = None


class AnyEnv(Idle):
    """Returns what it is asked for, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Thing:
        return Thing()

    def step(self, action: Pick, timeout_s: float | None = None, **kwargs: Any) -> Thing:
        self.count += 1
        value = VALUES[action.name][0]()
        if action.where == "metadata":
            return Thing(count=self.count, reward=1.5, metadata={"value": value, "fine": 1, "\ud800": 2})
        return Thing(count=self.count, reward=1.5, done=True, value=value)

    @property
    def state(self) -> State:
        return State(step_count=self.count, value=VALUES["array"][0](), odd=Unprintable())


class Loose(BaseModel):
    """An observation that is no `Observation`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    reward: Any = None
    done: Any = False
    metadata: Any = None


REWARDS: dict[str, tuple[Any, Any]] = {
    "float": (0.5, 0.5),
    "int": (3, 3),
    "bool": (True, True),
    "none": (None, None),
    "numpy float": (np.float32(0.5), 0.5),
    "numpy bool": (np.bool_(True), True),
    "array of one": (np.array([0.5]), 0.5),
    "array of two": (np.array([0.5, 1.0]), None),
    "text": ("much", None),
    "NaN": (math.nan, None),
    "numpy NaN": (np.float64("nan"), None),
    "huge": (10**400, None),
    "gigantic": (10**5000, None),
    "unprintable": (Unprintable(), None),
}


class LooseEnv(AnyEnv):
    """Returns odd rewards."""

    def step(self, action: Pick, timeout_s: float | None = None, **kwargs: Any) -> Any:
        self.count += 1
        metadata = "no mapping" if action.where == "odd metadata" else {"count": self.count}
        return Loose(reward=REWARDS[action.name][0], metadata=metadata)


@pytest.mark.parametrize("where", ["value", "metadata"])
def test_no_value_loses_a_step_over_websocket(serve: Serve, peer: Any, where: str) -> None:
    """W22: each step is answered with an observation, its reward, and the value in a form that JSON has."""
    one = peer(serve(create_app(AnyEnv, Pick, Thing)).port)
    one.reset()
    for count, (name, (_, check)) in enumerate(VALUES.items(), start=1):
        answer = one.step(name=name, where=where)
        assert answer["type"] == "observation", (name, answer)
        data = answer["data"]
        assert (data["observation"]["count"], data["reward"]) == (count, 1.5), name
        value = data["observation"].get("value") if where == "value" else data["metadata"].get("value")
        assert check(value), (name, value)


@pytest.mark.parametrize("where", ["value", "metadata"])
def test_no_value_loses_a_step_over_http(serve: Serve, http: Any, where: str) -> None:
    """W22: the same over HTTP, with the same encoding."""
    client = http(serve(create_app(AnyEnv, Pick, Thing)).url)
    named = {HEADER: client.post("/reset", headers={HEADER: "new"}).headers[HEADER]}
    for count, (name, (_, check)) in enumerate(VALUES.items(), start=1):
        answer = client.post("/step", json={"action": {"name": name, "where": where}}, headers=named)
        assert answer.status_code == 200, (name, answer.text)
        data = json.loads(answer.text)
        assert (data["observation"]["count"], data["reward"]) == (count, 1.5), name
        value = data["observation"].get("value") if where == "value" else data["metadata"].get("value")
        assert check(value), (name, value)


def test_a_state_with_odd_values_is_shown(serve: Serve, http: Any, peer: Any) -> None:
    """W22, W23: the state is encoded by the same rules."""
    server = serve(create_app(AnyEnv, Pick, Thing))
    for shown in (peer(server.port).ask({"type": "state"})["data"], http(server.url).get("/state").json()):
        assert shown["value"] == [[0, 1, 2], [3, 4, 5]]
        assert isinstance(shown["odd"], str)


@pytest.mark.parametrize("where", ["value", "odd metadata"])
def test_no_reward_loses_a_step_and_both_wires_agree(serve: Serve, http: Any, peer: Any, where: str) -> None:
    """W22: odd rewards are numbers where they can be and null with a note where not, alike over both wires."""
    server = serve(create_app(LooseEnv, Pick, Loose))
    one, client = peer(server.port), http(server.url)
    for count, (name, (_, expected)) in enumerate(REWARDS.items(), start=1):
        frame = one.step(name=name, where=where)
        assert frame["type"] == "observation", (name, frame)
        answer = client.post("/step", json={"action": {"name": name, "where": where}})
        assert answer.status_code == 200, (name, answer.text)
        for data in (frame["data"], answer.json()):
            assert data["reward"] == expected, name
        if where == "value":
            assert frame["data"]["metadata"]["count"] == count
        if expected is None and name != "none":
            assert "nonfinite_reward" in frame["data"]["metadata"]
            assert "nonfinite_reward" in answer.json()["metadata"]
