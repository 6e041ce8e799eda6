"""Stored episodes as rows for supervised fine-tuning and as preference pairs."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from environments import Idle
from openenv import create_app
from openenv.rollout import Model, RolloutStore, Sampling
from openenv.rollout.store.exports import export_rollouts
from openenv.testing import serve
from openenv.train import play
from openenv.types import Action, Observation
from vllm_double import VllmDouble


class Word(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Fruit(Idle):
    """Earns what the answer says, at the second try."""

    def __init__(self) -> None:
        super().__init__()
        self._tries = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Hint:
        self._tries = 0
        return Hint(hint=f"guess {seed}")

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: object) -> Hint:
        self._tries += 1
        is_last = self._tries == 2
        return Hint(hint="again", done=is_last, reward=float(action.text) if is_last else 0.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RolloutStore:
    stored = RolloutStore(tmp_path_factory.mktemp("fruit") / "store")
    answers = itertools.cycle(["0.5", "0.25", "0.5", "1", "0.5", "0"])  # each second one decides: 0.25, 1 and 0

    async def run(url: str, double: VllmDouble) -> None:
        model = Model(base_url=double.url, name="m", engine="vllm", sampling=Sampling())
        options: dict[str, Any] = {"samples": 3, "concurrency": 1, "store": stored}
        options |= {"system": "One number.", "text_only": True}
        async with play(url, model, [7, 8], **options) as stream:
            async for group in stream:
                assert sorted(reward or 0.0 for reward in group.rewards) == [0.0, 0.25, 1.0]

    app = create_app(Fruit, Word, Hint, max_concurrent_envs=2)
    with VllmDouble(lambda prompt: next(answers)) as double, serve(app) as served:
        asyncio.run(asyncio.wait_for(run(served.url, double), 60))
    return stored


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_rewarded_conversation_is_a_row_for_fine_tuning(store: RolloutStore, tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    assert export_rollouts(store, path, kind="sft") == 6
    assert export_rollouts(store, path, kind="sft", min_reward=1.0) == 2
    for row in rows(path):
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
        assert row["messages"][-1]["content"] == "1"
        assert (row["reward"], row["tools"]) == (1.0, None)
    assert {row["messages"][1]["content"] for row in rows(path)} == {"guess 7", "guess 8"}


def test_the_best_and_the_worst_of_a_group_are_a_pair(store: RolloutStore, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    assert export_rollouts(store, path, kind="preferences") == 2
    for row, seed in zip(rows(path), (7, 8), strict=True):
        assert row["prompt"][1:] == [{"role": "user", "content": f"guess {seed}"}]
        assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.0)
        assert [message["content"] for message in row["chosen"]] == ["0.5", "again", "1"]
        assert [message["content"] for message in row["rejected"]] == ["0.5", "again", "0"]
        assert row["task_id"] == f"seed-{seed}"
        assert row["chosen_rollout"] != row["rejected_rollout"]


def test_equal_rewards_make_no_pair(store: RolloutStore, tmp_path: Path) -> None:
    assert export_rollouts(store, tmp_path / "pairs.jsonl", kind="preferences", min_reward=1.0) == 0
