"""Branches of played episodes: forks or repeated actions, and never a silent different state."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

from environments import Idle
from openenv import create_app
from openenv.errors import RolloutError, StoreError
from openenv.rollout import Model, RolloutStore, StoredRollout
from openenv.rollout.capture.records import FILE
from openenv.rollout.store.store import STEPS_FILE
from openenv.rollout.tasks.task import BranchPoint
from openenv.rollout.viewer.rollout_routes import _tree_document
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.train import EpisodeSample, ReplayDiverged, SampleGroup, branch, play
from openenv.types import Action, Observation


class Word(Action):
    text: str = Field(pattern="^[a-z]+$")


class Seen(Observation):
    said: str = ""
    luck: float = 0.0


class Talk(Idle):
    """Ends with `yes`, which gives 1; `maybe` gives 0.25. Each step shows a number of its seeded generator."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    calls: ClassVar[Counter[str]] = Counter()
    broken: ClassVar[str] = ""
    """How the environment differs from the recorded one."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random()
        self.said: list[str] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.calls["reset"] += 1
        self.random = random.Random(seed)
        self.said = []
        return Seen(said="begin")

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.calls["step"] += 1
        self.said.append(action.text)
        reward = {"yes": 1.0, "maybe": 0.25}.get(action.text, 0.0)
        if self.broken == "reward":
            reward += 0.5
        luck = random.random() if self.broken == "luck" else self.random.random()
        return Seen(said=" ".join(self.said), luck=luck, reward=reward, done=action.text == "yes")


class Locked(Talk):
    """Supports no forks."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def model_of(*words: str) -> ScriptedModel:
    return ScriptedModel(Script(name="player", turns=[Turn(text=word) for word in words], ending="yes"))


PARENT = ("no", "maybe", "perhaps")


class Table:
    """A served environment, a store, and an episode of four answers in it."""

    def __init__(self, url: str, store: RolloutStore) -> None:
        self.url, self.store = url, store
        self.parent = self.played(PARENT, [7])[0].samples[0].outcome.rollout_id
        Talk.calls.clear()

    def played(self, words: tuple[str, ...], starts: list[Any], **options: Any) -> list[SampleGroup]:
        async def collect(model: Model) -> list[SampleGroup]:
            chosen = {"samples": 1, "concurrency": 2, "system": "Talk.", "store": self.store, **options}
            async with play(self.url, model, starts, **chosen) as stream:
                return [group async for group in stream]

        with model_of(*words) as server:
            return asyncio.run(asyncio.wait_for(collect(Model(**server.model())), 120))

    def branches(self, words: tuple[str, ...], call: int, **options: Any) -> tuple[list[EpisodeSample], int]:
        """Return the continuations, and how many answers were sampled for them."""
        with model_of(*words) as server:
            model = Model(**server.model())
            playing = branch(self.store, self.parent[:8], call=call, model=model, **{"samples": 3, **options})
            group = asyncio.run(asyncio.wait_for(playing, 120))
            return group.samples, len(server.played())

    def rows(self, rollout_id: str) -> list[Any]:
        lines = self.store.live_file(rollout_id, STEPS_FILE).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [(row["kind"], row.get("answer"), row.get("observation") or row["error"]["message"]) for row in rows]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Callable[..., Table]]:
    """Serve an environment, and play an episode in it."""
    servers = []

    with RolloutStore(tmp_path) as store:

        def make(environment: type[Talk] = Talk, capacity: int = 8) -> Table:
            servers.append(serve(create_app(environment, Word, Seen, max_concurrent_envs=capacity)))
            return Table(servers[-1].__enter__().url, store)

        yield make
        for server in servers:
            server.__exit__(None, None, None)
    Talk.broken = ""


def test_branches_continue_in_forks_of_the_environment(table: Callable[..., Table]) -> None:
    played = table()
    samples, sampled = played.branches(("no", "maybe", "other"), call=2)
    # One repeats the two shared actions, and the others continue from its snapshot. Each takes two actions of its own.
    assert Talk.calls == {"reset": 1, "step": 2 + 3 * 2}
    assert sampled == 3 * 2
    ways = [sample.outcome.metadata["reached_by"] for sample in samples]
    assert sorted(ways) == ["fork", "fork", "replay"]
    for sample in samples:
        outcome = sample.outcome
        assert (outcome.status, outcome.reward) == ("ok", 1.25)
        assert sample.turn_rewards == {1: 0.0, 2: 0.25, 3: 0.0, 4: 1.0}
        assert [turn.turn for turn in outcome.turns] == [1, 2, 3, 4]
        assert outcome.start == BranchPoint(played.parent, 2)
        rows = played.rows(outcome.rollout_id)
        assert rows[:3] == played.rows(played.parent)[:3]
        assert [row[2]["said"] for row in rows[3:]] == ["no maybe other", "no maybe other yes"]
        assert rows[3][2]["luck"] == played.rows(played.parent)[3][2]["luck"]  # the generator was copied, too


def test_branches_are_a_group_with_a_parent_and_train_on_their_own_tokens(table: Callable[..., Table]) -> None:
    played = table()
    samples, _ = played.branches(("no", "maybe", "other"), call=2)
    group = SampleGroup.of([sample.outcome for sample in samples])
    assert group.advantages() == [0.0, 0.0, 0.0]
    parent = played.store.get(played.parent).outcome
    for sample in samples:
        [trained] = sample.trainable
        assert trained.n_trainable == sum(len(turn.completion_token_ids) for turn in sample.outcome.turns[2:])
        assert sample.outcome.turns[0].completion_token_ids == parent.turns[0].completion_token_ids
    rows = played.store.find(parent=played.parent)
    assert {row.rollout_id for row in rows} == {sample.outcome.rollout_id for sample in samples}
    assert {(row.parent_call, row.environment, row.group == rows[0].group) for row in rows} == {(2, "Talk", True)}
    journals = [(played.store.captures / row.rollout_id / FILE).read_text() for row in rows]
    calls = [journal.split("\n", 2)[2] for journal in journals]  # after the first entry, which has the task
    assert not any("begin" in each for each in calls)  # the shared part is stored once
    assert {node["rollout_id"] for node in _tree_document(played.store, played.parent)["nodes"]} == {
        played.parent,
        *(row.rollout_id for row in rows),
    }


def test_without_forks_each_branch_repeats_the_actions(table: Callable[..., Table]) -> None:
    played = table(Locked)
    samples, sampled = played.branches(("no", "maybe", "other"), call=2)
    assert Talk.calls == {"reset": 3, "step": 3 * (2 + 2)}
    assert sampled == 3 * 2
    assert [sample.outcome.metadata["reached_by"] for sample in samples] == ["replay"] * 3
    assert [sample.reward for sample in samples] == [1.25] * 3


def test_a_server_with_one_slot_is_enough(table: Callable[..., Table]) -> None:
    samples, _ = table(capacity=1).branches(("no", "maybe", "other"), call=2)
    assert [sample.reward for sample in samples] == [1.25] * 3


@pytest.mark.parametrize(("broken", "text"), [("reward", "reward is 0.5 instead of 0.0"), ("luck", "observation.luck")])
@pytest.mark.parametrize("environment", [Talk, Locked])
def test_an_environment_that_does_not_repeat_its_steps_is_an_error(
    table: Callable[..., Table], environment: type[Talk], broken: str, text: str
) -> None:
    played = table(environment)
    Talk.broken = broken
    with pytest.raises(ReplayDiverged, match=f"step 1 was repeated, and {text}"):
        played.branches(("no", "maybe", "other"), call=2, samples=2, retries=0)


def test_a_branch_at_0_begins_with_the_same_reset(table: Callable[..., Table]) -> None:
    played = table()
    samples, sampled = played.branches(("maybe",), call=0, samples=2)
    assert Talk.calls == {"reset": 1, "step": 2 * 2}
    assert sampled == 2 * 2
    assert [sample.reward for sample in samples] == [1.25] * 2


def test_a_branch_can_be_branched(table: Callable[..., Table]) -> None:
    played = table()
    [first], _ = played.branches(("no", "maybe", "other", "more"), call=2, samples=1)
    played.parent = first.outcome.rollout_id
    [second], sampled = played.branches(("no", "maybe", "other", "maybe"), call=3, samples=1)
    assert (second.reward, sampled) == (1.5, 2)
    assert [row[2]["said"] for row in played.rows(second.outcome.rollout_id)][-2:] == [
        "no maybe other maybe",
        "no maybe other maybe yes",
    ]
    [trained] = second.trainable
    assert trained.n_trainable == sum(len(turn.completion_token_ids) for turn in second.outcome.turns[3:])


def test_refused_actions_are_repeated_and_shown(table: Callable[..., Table]) -> None:
    played = table()
    [group] = played.played(("no", "WRONG", "maybe", "more"), [7])
    played.parent = group.samples[0].outcome.rollout_id
    rows = played.rows(played.parent)
    assert [row[1] for row in rows] == [None, 1, 2, 3, 4, 5]
    assert "String should match pattern" in rows[2][2]
    Talk.calls.clear()
    [sample], sampled = played.branches(("no", "WRONG", "maybe", "other"), call=3, samples=1)
    assert (sample.reward, sampled, Talk.calls) == (1.25, 2, {"reset": 1, "step": 4})
    assert played.rows(sample.outcome.rollout_id)[:4] == rows[:4]


def test_a_stream_plays_starts_and_branches(table: Callable[..., Table]) -> None:
    played = table()
    groups = played.played(PARENT, [7, BranchPoint(played.parent, 1)], samples=2)
    names = sorted(group.name for group in groups)
    assert names == [f"{played.parent[:8]}@1", "seed-7"]
    assert [group.start for group in groups] == [{"seed": 7}] * 2
    said = {
        tuple(row[2]["said"] for row in played.rows(sample.outcome.rollout_id))
        for group in groups
        for sample in group.samples
    }
    assert said == {("begin", "no", "no maybe", "no maybe perhaps", "no maybe perhaps yes")}


def test_episodes_that_cannot_be_branched_say_why(table: Callable[..., Table]) -> None:
    played = table()
    with pytest.raises(StoreError, match="has no answer after call 4; branch at 0 to 3"):
        played.branches((), call=4)
    with pytest.raises(StoreError, match=r"branch it with `openenv\.train\.branch`"):
        StoredRollout(played.store, played.parent).branch(call=1)
    with pytest.raises(RolloutError, match="pass store="):
        played.played((), [BranchPoint(played.parent, 1)], store=None)
    played.store.live_file(played.parent, STEPS_FILE).unlink()
    with pytest.raises(StoreError, match="are not stored"):
        played.branches((), call=1)
