"""Branches: continuations of a stored rollout from one of its calls, without sampling the shared answers again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asking_agent import AskingAgent
from openenv.errors import StoreError
from openenv.rollout import Model, Outcome, RolloutStore, Sampling, StoredRollout, Task, run_many, run_rollout
from openenv.rollout.capture.records import FILE
from openenv.rollout.run.engine import Engine, EngineOptions
from openenv.rollout.store.comparison import compare_rollouts
from openenv.rollout.tasks.task import BranchPoint
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train import SampleGroup

TASK = Task(
    instruction="Count.",
    files={"data.txt": "1\n"},
    setup=("echo set > up.txt",),
    verify=("test -s answers.txt && test -s up.txt",),
    task_id="count",
)
TURNS = tuple(Turn(text=f"step {number}, seed ${{seed}}") for number in range(6))


@pytest.fixture
def scripted() -> Iterator[ScriptedModel]:
    with ScriptedModel(Script(name="steps", turns=TURNS, ending="done ${seed}")) as server:
        yield server


def options(scripted: ScriptedModel, local: Sandboxes) -> dict[str, Any]:
    return {
        "agent": AskingAgent(),
        "model": Model(**scripted.model(), sampling=Sampling().parameters()),
        "sandbox": local,
    }


def answers(outcome: Outcome) -> list[str]:
    """Return the lines that the agent wrote down."""
    return next(text for path, text in outcome.files.items() if path.endswith("answers.txt")).splitlines()


@pytest.fixture
def parent(local: Sandboxes, scripted: ScriptedModel, tmp_path: Path) -> Outcome:
    with RolloutStore(tmp_path) as store:
        return run_rollout(TASK, store=store, seed=3, **options(scripted, local))


def test_branches_share_a_prefix_and_go_their_own_ways(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    assert len(scripted.played()) == 7
    with RolloutStore(tmp_path) as store:
        rollout = StoredRollout(store, parent.rollout_id[:6])
        outcomes = rollout.branch(call=5, samples=8, seed=3, concurrency=4, **options(scripted, local))
        assert len(scripted.played()) == 7 + 8 * 2
        assert [each.status for each in outcomes] == ["ok"] * 8
        assert [each.metadata["replayed"] for each in outcomes] == [5] * 8
        for outcome in outcomes:
            assert [turn.turn for turn in outcome.turns] == [1, 2, 3, 4, 5, 6, 7]
            assert [turn.completion_token_ids for turn in outcome.turns[:5]] == [
                turn.completion_token_ids for turn in parent.turns[:5]
            ]
        assert len({tuple(answers(outcome)) for outcome in outcomes}) == 8  # each has its own seeds
        rows = store.find(parent=parent.rollout_id)
        assert {row.rollout_id for row in rows} == {each.rollout_id for each in outcomes}
        assert {row.parent_call for row in rows} == {5}
        assert len({row.group for row in rows}) == 1
        assert rows[0].group.startswith(parent.rollout_id[:8])
        assert store.find(rollout_id=parent.rollout_id)[0].parent == ""
        whole = (store.captures / parent.rollout_id / FILE).stat().st_size
        assert all((store.captures / each.rollout_id / FILE).stat().st_size < whole for each in outcomes)

        group = SampleGroup.of(store.get(each.rollout_id).outcome for each in outcomes)
        assert group.rewards == [1.0] * 8
        assert group.advantages() == [0.0] * 8
        assert group.name == rows[0].group
        for sample in group.samples:
            own = sum(len(turn.completion_token_ids) for turn in sample.outcome.turns[5:])
            assert sample.n_tokens == own, "the shared answers are context"
            [sequence] = sample.sequences
            assert sequence.excluded == {
                "shared_turn": sum(len(turn.completion_token_ids) for turn in sample.outcome.turns[:5])
            }


def test_equal_answers_give_equal_trees(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    with RolloutStore(tmp_path) as store:
        rollout = StoredRollout(store, parent.rollout_id)
        first, again = (rollout.branch(call=3, samples=2, seed=9, **options(scripted, local)) for _ in range(2))
        for one, other in zip(first, again, strict=True):
            pairs = [(store, store.get(each.rollout_id)) for each in (one, other)]
            assert compare_rollouts(pairs[0], pairs[1]).differences == []
        different = compare_rollouts(*((store, store.get(each.rollout_id)) for each in first))
        assert different.differences[0].place == "sampling of call 4"


def test_a_branch_of_a_branch_has_the_answers_of_both(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    with RolloutStore(tmp_path) as store:
        (second,) = StoredRollout(store, parent.rollout_id).branch(
            call=2, samples=1, seed=1, **options(scripted, local)
        )
        (third,) = StoredRollout(store, second.rollout_id).branch(call=4, samples=1, seed=2, **options(scripted, local))
        lines = [answers(each) for each in (parent, second, third)]
        assert lines[1][:2] == lines[0][:2]
        assert lines[2][:4] == lines[1][:4]
        assert lines[2][4] != lines[1][4]
        assert third.start == BranchPoint(second.rollout_id, 4)


def test_labels_of_the_caller_start_no_branch(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    labels = {"parent": parent.rollout_id, "parent_call": 2, "continues": parent.rollout_id}
    with RolloutStore(tmp_path) as store:
        (outcome,) = run_many([TASK], store=store, metadata=labels, **options(scripted, local))
        assert outcome.start is None
        assert "replayed" not in outcome.metadata
        assert store.find(parent=parent.rollout_id) == []


def test_an_interrupted_branch_is_resumed_as_that_branch(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    """Killed before its first entry, a branch still has its parent, and its own seeds."""
    start = BranchPoint(parent.rollout_id, 3)
    with RolloutStore(tmp_path) as store:
        engine = EngineOptions(store=store, seed=5, **options(scripted, local))
        with Engine(engine) as shared:
            undisturbed = shared.run(TASK, rollout_id="whole", start=start)
            store.begin("killed", TASK, about={"start": asdict(start)})
            store.release("killed")
            outcome = shared.resume("killed")
        assert outcome.start == undisturbed.start == start
        assert outcome.metadata["replayed"] == 3
        assert answers(outcome) == answers(undisturbed)


def test_a_branch_from_the_start_and_one_without_a_seed(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    with RolloutStore(tmp_path) as store:
        (whole,) = StoredRollout(store, parent.rollout_id).branch(call=0, samples=1, **options(scripted, local))
        assert "replayed" not in whole.metadata
        (late,) = StoredRollout(store, parent.rollout_id).branch(call=7, samples=1, **options(scripted, local))
        assert late.files == parent.files
        assert len(scripted.played()) == 7 + 7


def test_what_cannot_be_branched_is_refused(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    with RolloutStore(tmp_path) as store:
        rollout = StoredRollout(store, parent.rollout_id)
        with pytest.raises(StoreError, match="has no answer of call 8; its calls: 1 to 7"):
            rollout.branch(call=8)
        with pytest.raises(ValueError, match="at least 1"):
            rollout.branch(call=1, samples=0)
        with pytest.raises(StoreError, match="There is no rollout"):
            StoredRollout(store, "nothing")
        (noop,) = run_many([TASK], agent="noop", sandbox=local, store=store)
        with pytest.raises(StoreError, match="has no answer of call 1; its calls: none"):
            StoredRollout(store, noop.rollout_id).branch(call=1)
        file = store.captures / noop.rollout_id / FILE
        file.write_bytes(file.read_bytes().replace(b'"collect"', b'"COLLECT"', 1))
        with pytest.raises(StoreError, match=r"cannot be branched: .*is damaged"):
            StoredRollout(store, noop.rollout_id).branch(call=0)


def test_the_options_of_a_stored_rollout_are_known(
    local: Sandboxes, scripted: ScriptedModel, tmp_path: Path, parent: Outcome
) -> None:
    with RolloutStore(tmp_path) as store:
        known = StoredRollout(store, parent.rollout_id).options()
        assert (known["agent"], known["sandbox"]) == ("asking", "local")
        assert known["model"].base_url == scripted.url
        assert known["model"].seed is None, "branches must not repeat the parent's seed"
