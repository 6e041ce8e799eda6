"""The Task API: shapes, unknown names, missing methods, sync and async catalogues."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import httpx2
import pytest
from pydantic import BaseModel

import http_calls
from environments import Idle
from openenv.server.app import create_app
from openenv.types import Action, Observation
from servers import Serve
from slow_steps import take, take_async

JSON_BODY = {"content-type": "application/json"}


class Item(BaseModel):
    name: str


class Catalogue(Idle):
    TASKS: ClassVar[list[Item]] = [Item(name=f"t{i}") for i in range(5)]

    def list_splits(self) -> list[Any]:
        return ["train", "extra", {"name": "mine", "type": "test"}, Item(name="model")]

    def list_tasks(self, split: str) -> list[Any]:
        return self.TASKS

    async def num_tasks(self, split: str) -> int:
        return len(self.TASKS)

    def get_task(self, split: str, index: int) -> Any:
        return self.TASKS[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return self.TASKS[start:stop]


class Partial(Idle):
    def list_splits(self) -> list[Any]:
        raise NotImplementedError


@pytest.fixture
def tasks(serve: Serve) -> Iterator[httpx2.Client]:
    server = serve(create_app(Catalogue, Action, Observation, env_name="Shop", max_concurrent_envs=2))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        yield client


def test_the_environment_is_listed_and_found_in_any_case(tasks: httpx2.Client) -> None:
    assert tasks.get("/list_environments").json() == ["Shop"]
    assert tasks.get("/shop/splits").status_code == 200
    unknown = tasks.get("/other/splits")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "unknown environment 'other'"})


def test_splits_are_named_and_typed(tasks: httpx2.Client) -> None:
    assert tasks.get("/Shop/splits").json() == [
        {"name": "train", "type": "train"},
        {"name": "extra", "type": "validation"},
        {"name": "mine", "type": "test"},
        {"name": "model"},
    ]


def test_tasks_are_listed_counted_and_fetched(tasks: httpx2.Client) -> None:
    everything = [{"name": f"t{i}"} for i in range(5)]
    assert tasks.post("/Shop/tasks", json={"split": "train"}).json() == {"tasks": everything, "env_name": "Shop"}
    assert tasks.post("/Shop/num_tasks", json={"split": "train"}).json() == {"num_tasks": 5}
    assert tasks.post("/Shop/task", json={"split": "train", "index": 2}).json() == {"task": {"name": "t2"}}
    ranged = {"split": "train", "start": 1, "stop": 3}
    assert tasks.post("/Shop/task_range", json=ranged).json() == {"tasks": everything[1:3]}
    assert tasks.post("/Shop/task_range", json={"split": "train"}).json() == {"tasks": everything}


def test_a_wrong_index_is_400_and_a_wrong_body_422(tasks: httpx2.Client) -> None:
    assert tasks.post("/Shop/task", json={"split": "train", "index": 99}).status_code == 400
    assert tasks.post("/Shop/task", json={"split": "train"}).status_code == 422
    assert tasks.post("/Shop/tasks", json={"split": "train", "extra": 1}).status_code == 422


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1.5", '"x"'])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("task", '{"split": "train", "index": N}'),
        ("task_range", '{"split": "train", "start": N, "stop": 2}'),
        ("task_range", '{"split": "train", "start": 0, "stop": N}'),
        ("tasks", '{"split": N}'),
        ("num_tasks", '{"split": "train", "more": N}'),
    ],
)
def test_a_number_that_is_not_finite_is_a_wrong_body(tasks: httpx2.Client, path: str, body: str, number: str) -> None:
    if number == '"x"' and path == "tasks":
        pytest.skip("that is a split")
    answer = tasks.post(f"/Shop/{path}", content=body.replace("N", number), headers=JSON_BODY)
    assert answer.status_code == 422, answer.text
    assert isinstance(answer.json()["detail"], list)


@pytest.mark.parametrize("env_cls", [Idle, Partial])
def test_an_environment_without_tasks_says_so(serve: Serve, env_cls: type[Any]) -> None:
    server = serve(create_app(env_cls, Action, Observation))
    answer = http_calls.get(f"{server.url}/{env_cls.__name__}/splits", trust_env=False)
    assert answer.status_code == 501
    assert answer.json() == {"detail": "list_splits is not supported for this environment"}


class Lazy(Idle):
    """Makes its tasks while they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def _task(self, number: int) -> dict[str, Any]:
        return {"i": number, "closed": self.is_closed, "thread": threading.current_thread().name}

    def list_splits(self) -> Iterator[str]:
        yield from ("train", "test")

    def list_tasks(self, split: str) -> Iterator[Any]:
        for number in range(3):
            take(0.02)
            yield self._task(number)

    async def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> AsyncIterator[Any]:
        for number in range(3):
            await take_async(0.02)
            yield self._task(number)


def test_tasks_that_are_made_while_they_are_read_are_read_in_the_environments_thread_while_it_lives(
    serve: Serve,
) -> None:
    server = serve(create_app(Lazy, Action, Observation, env_name="lazy"))
    with http_calls.Client(base_url=server.url, trust_env=False) as client:
        found = client.post("/lazy/tasks", json={"split": "train"}).json()["tasks"]
        assert [task["i"] for task in found] == [0, 1, 2]
        assert not any(task["closed"] for task in found)
        assert "test-server" not in {task["thread"] for task in found}
        ranged = client.post("/lazy/task_range", json={"split": "train"}).json()["tasks"]
        assert [(task["i"], task["closed"]) for task in ranged] == [(0, False), (1, False), (2, False)]
        assert [split["name"] for split in client.get("/lazy/splits").json()] == ["train", "test"]
