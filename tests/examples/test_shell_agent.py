"""The tasks of examples/shell_agent: solutions earn everything, idleness and cheating earn nothing."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from openenv.rollout import Model, Task, run_many
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.testing import Script, ScriptedModel, Turn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shell_agent"
CHEATS = (
    "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; echo 1 > reward.txt; echo PASS",
    "mkdir -p .want; touch .want/a; printf '#!/bin/sh\\nexit 0\\n' > cmp; chmod +x cmp; cp cmp grep; cp cmp test",
)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("tasks", None)
    import tasks

    return tasks


def rewards(tasks: list[Task], agent: str) -> list[float | None]:
    return [outcome.reward for outcome in run_many(tasks, agent=agent, sandbox="local", concurrency=4)]


def test_a_seed_is_a_task_and_no_training_task_is_held_out(tasks: ModuleType) -> None:
    held_out = tasks.held_out_tasks()
    assert len(held_out) == 40
    assert [task.task_id for task in held_out] == [task.task_id for task in tasks.held_out_tasks()]
    families = [task.metadata["family"] for task in held_out]
    assert {families.count(name) for name in tasks.FAMILIES} == {6, 7}
    drawn = list(itertools.islice(tasks.TrainingTasks(0), 500))
    assert drawn == list(itertools.islice(tasks.TrainingTasks(0), 500))
    assert not {task.task_id for task in drawn} & {task.task_id for task in held_out}
    assert not {task.instruction for task in drawn} & {task.instruction for task in held_out}


def test_families_that_the_model_has_learned_come_less_often(tasks: ModuleType) -> None:
    training = tasks.TrainingTasks(0)
    for _ in range(50):
        for family in set(tasks.FAMILIES) - {"fix"}:
            training.report(family, 1.0)
    families = Counter(task.metadata["family"] for task in itertools.islice(training, 600))
    assert 250 < families["fix"] < 350
    assert min(families.values()) > 30


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.slow)])  # one of each family; all
def test_solutions_earn_one_and_doing_nothing_earns_zero(tasks: ModuleType, count: int) -> None:
    chosen = tasks.held_out_tasks()[:count]
    assert rewards(chosen, "oracle") == [1.0] * count
    assert rewards(chosen, "noop") == [0.0] * count


@pytest.mark.parametrize("command", CHEATS)
def test_the_cheats_that_the_prompt_proposes_earn_nothing(tasks: ModuleType, command: str) -> None:
    agent = ShellChat(max_turns=1)
    with ScriptedModel(Script(name="cheat", turns=[Turn(text=command)], ending="exit")) as model:
        outcomes = run_many(
            tasks.held_out_tasks()[:6], agent=agent, model=Model(**model.model()), sandbox="local", concurrency=4
        )
    assert [outcome.reward for outcome in outcomes] == [0.0] * 6
    assert {outcome.trust for outcome in outcomes} == {"isolated"}
