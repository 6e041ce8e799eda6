"""Reading an environment's catalogue of tasks, and training on a split of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from environments import Idle
from openenv import TaskClient, create_app
from openenv.errors import AccessDenied, ConnectFailed, Forbidden, ServerError
from openenv.rollout import Model
from openenv.server.access import AccessPolicy
from openenv.testing import Script, ScriptedModel, serve
from openenv.train import play, shuffled
from openenv.types import Action, Observation

WORDS = {"train": [f"word-{number}" for number in range(7)], "test": ["last"]}


class Word(Action):
    text: str


class Catalogue(Idle):
    """Has tasks; the reward is 1 for the word of the task."""

    ranges: ClassVar[list[tuple[int | None, int | None]]] = []

    def reset(self, word: str = "", **kwargs: Any) -> Observation:
        self.word = word
        return Observation(metadata={"word": word})

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(reward=float(action.text == self.word), done=True)

    def list_splits(self) -> list[Any]:
        return [*WORDS, {"name": "hidden", "type": "test"}]

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split)

    def num_tasks(self, split: str) -> int:
        return len(WORDS[split])

    def get_task(self, split: str, index: int) -> Any:
        return {"word": WORDS[split][index]}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        self.ranges.append((start, stop))
        return [{"word": word} for word in WORDS[split][start:stop]]


@pytest.fixture
def tasks() -> Iterator[TaskClient]:
    Catalogue.ranges.clear()
    with serve(create_app(Catalogue, Word, Observation)) as served, TaskClient(served.url) as client:
        yield client


def test_all_that_a_catalogue_has_can_be_read(tasks: TaskClient) -> None:
    assert [name.lower() for name in tasks.environments()] == ["catalogue"]
    assert tasks.splits() == [
        {"name": "train", "type": "train"},
        {"name": "test", "type": "test"},
        {"name": "hidden", "type": "test"},
    ]
    assert tasks.num_tasks("train") == 7
    assert tasks.task("test", 0) == {"word": "last"}
    assert tasks.task_range("train", 5) == [{"word": "word-5"}, {"word": "word-6"}]
    assert len(tasks.tasks("train")) == 7
    with pytest.raises(IndexError, match="Invalid task index"):
        tasks.task("test", 9)


def test_a_split_is_a_sequence_that_is_read_in_pages(tasks: TaskClient) -> None:
    split = tasks.split("train", page=3)
    assert len(split) == 7
    assert split[-1] == {"word": "word-6"}
    assert Catalogue.ranges == [(6, 9)]
    assert [task["word"] for task in split] == WORDS["train"]
    assert split[1:3] == [{"word": "word-1"}, {"word": "word-2"}]
    assert Catalogue.ranges == [(6, 9), (0, 3), (3, 6)], "each page is read once"
    with pytest.raises(IndexError):
        split[7]
    with pytest.raises(ValueError, match="page"):
        tasks.split("train", page=0)


def test_a_model_plays_the_tasks_of_a_split(tasks: TaskClient) -> None:
    async def rewards() -> dict[str, list[float | None]]:
        with ScriptedModel(Script(name="player", turns=(), ending="word-3")) as server:
            starts = shuffled(tasks.split("train", page=2), epochs=1)
            base = str(tasks).split()[1].rstrip(">")
            async with play(base, Model(**server.model()), starts, samples=1, concurrency=1) as stream:
                return {str(group.start["word"]): group.rewards async for group in stream}

    played = asyncio.run(asyncio.wait_for(rewards(), 60))
    assert sorted(played) == WORDS["train"]
    assert [word for word, values in played.items() if values == [1.0]] == ["word-3"]


def test_what_goes_wrong_has_its_own_error(tasks: TaskClient) -> None:
    with pytest.raises(ServerError, match="unknown environment 'other'"):
        TaskClient(str(tasks).split()[1].rstrip(">"), name="other").splits()
    with pytest.raises(ConnectFailed, match="Cannot reach"):
        TaskClient("http://127.0.0.1:9").environments()
    with pytest.raises(ValueError, match="base_url"):
        TaskClient("ftp://nowhere")
    with serve(create_app(Idle, Word, Observation)) as served, TaskClient(served.url) as client:
        with pytest.raises(NotImplementedError, match="list_splits is not supported"):
            client.splits()


def test_a_catalogue_needs_a_trainers_token() -> None:
    access = AccessPolicy(orchestrator=["orchestrator"], agent=["agent"])
    with serve(create_app(Catalogue, Word, Observation, access=access)) as served:
        assert TaskClient(served.url, token="orchestrator").num_tasks("train") == 7
        with pytest.raises(AccessDenied):
            TaskClient(served.url, token="wrong").num_tasks("train")
        with pytest.raises(Forbidden):
            TaskClient(served.url, token="agent").num_tasks("train")
