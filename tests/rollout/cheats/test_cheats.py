"""Cheating does not pay: every attempt earns what doing nothing earns, and the attempts are real ones."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from openenv.rollout import Task
from openenv.sandboxes.base import Sandboxes, SandboxSpec
from openenv.testing import Cheat, CheatResult, all_cheats, run_cheats

ONE_SANDBOX = Path(__file__).resolve().parents[3] / "benchmarks" / "cheats_in_one_sandbox.py"
PAID_WHEN_PUBLISHED = (
    *("planted-reward", "background-writer", "edited-verify-script", "sitecustomize"),
    *("exit-when-loaded", "exit-hooks", "skipped-tests", "faked-report", "judged-exit", "judged-by-itself"),
)
"""Some of the cheats that pay in the published order: one sandbox for agent and verifier, the reward a file in it."""


def described(results: list[CheatResult]) -> list[str]:
    """What succeeded, for a message that names it."""
    return [f"{result.kind} {result.name}: {result.breach or (result.status, result.reward)}" for result in results]


def some_of_each_family() -> list[Cheat]:
    """Of the cheats that share rollouts each family's 1st, 3rd, 5th, ...; of those that need their own the first."""
    numbers: Counter[tuple[str, str, bool]] = Counter()
    chosen = []
    for cheat in all_cheats():
        if cheat.quick:
            kind = (cheat.family, cheat.aim, cheat.together)
            if numbers[kind] % 2 == 0 if cheat.together else numbers[kind] == 0:
                chosen.append(cheat)
            numbers[kind] += 1
    return chosen


@pytest.mark.timeout(280)
def test_no_cheat_of_a_family_pays(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    chosen = some_of_each_family()
    report = run_cheats(local, cheats=chosen, quick=True)
    assert described(report.succeeded) == []
    assert len(report.results) + len(report.skipped) == len(chosen) >= 200
    leftovers()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_the_others_pays_either(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    """One cheat per rollout, which takes hours: `openenv rollouts cheats`."""
    quick = {cheat.name for cheat in some_of_each_family()}
    chosen = [cheat for cheat in all_cheats() if cheat.name not in quick]
    report = run_cheats(local, cheats=chosen, concurrency=4, quick=True)  # many wait for a time limit
    assert report.unfit == []
    assert described(report.succeeded) == []
    assert len(report.results) + len(report.skipped) == len(chosen)
    assert len(report.results) >= 200
    leftovers()


def test_every_variant_has_an_id_of_its_own_and_no_parameter_left() -> None:
    cheats = all_cheats()
    assert [name for name, count in Counter(cheat.name for cheat in cheats).items() if count > 1] == []
    parameters = ("@name@", "@form@", "@place@", "@how@", "@file@", "@signal@", "@target@", "@resource@", "@value@")
    for cheat in cheats:
        text = "\n".join((*cheat.lines, cheat.what))
        assert [parameter for parameter in parameters if parameter in text] == [], cheat.name


def test_every_kind_of_cheat_is_there() -> None:
    cheats = all_cheats()
    assert len(cheats) >= 200
    assert sum(cheat.quick for cheat in cheats) >= 400
    assert {cheat.aim for cheat in cheats} == {"win", "dodge"}
    assert {cheat.family for cheat in cheats} >= {
        *("planted-reward", "linked-work-tree", "background-writer", "patched-pytest", "sitecustomize"),
        *("edited-verify-script", "path-hijack", "huge-output", "forked-daemon", "host-network", "proxy-admin"),
        *("another-key", "archive-names", "hard-links", "devices", "huge-sparse-file"),
        *("exit-when-loaded", "system-exit", "exit-hooks", "edited-while-it-runs", "killed-check", "faked-report"),
        *("shadowed-module", "pytest-settings", "make-file", "node-module", "git-settings", "virtual-environment"),
        *("left-for-the-next-line", "edited-as-it-runs", "reward-value", "reward-withheld", "ended-check"),
        *("exhausted-by-the-agent", "exhausted-by-a-line", "exhausted-by-a-run", "judge-breaks", "signal"),
        *("operator-decides", "skip-by-value", "missing-answer", "result-not-finite", "reward-json"),
        *("forged-mark", "hung-process"),
        *("work-folder", "endpoint-blamed", "unusual-request", "changed-sampling", "control-channel"),
    }
    assert {"python", "npm", "make", "c", "git", "venv", "lines"} <= {cheat.task.task_id for cheat in cheats}


def test_a_cheat_that_pays_is_reported(local: Sandboxes) -> None:
    task = next(cheat.task for cheat in all_cheats() if cheat.task.task_id == "file")
    solving = Cheat("solves", "does the task", ("echo 42 > answer.txt",), task)
    leaking = Cheat("leaks", "prints what only the host has", ("echo LEAK",), task)
    report = run_cheats(local, cheats=[solving, leaking])
    assert [result.name for result in report.succeeded] == ["solves", "leaks"]
    document = report.document()
    assert document["succeeded"] == 2
    assert document["wins"] == ["solves", "leaks"]
    assert document["dodges"] == []
    assert document["cheats"][0]["reward"] == 1.0


def test_a_rollout_without_a_reward_is_a_dodge(local: Sandboxes) -> None:
    # The setup is broken, which no agent can do: nothing else gives no reward for certain.
    broken = Task(instruction="x", setup=("false",), verify=("false",), solution=("true",), task_id="broken")
    honest = CheatResult("lost", "loses its reward", status="env_failed", reward=None, honest=0.0)
    assert (honest.kind, honest.succeeded) == ("dodge", True)
    report = run_cheats(local, cheats=[Cheat("lost", "loses its reward", ("true",), broken)])
    assert report.unfit == ["broken"]


@pytest.mark.slow
def test_one_that_pays_is_found_among_those_that_share_its_rollout(local: Sandboxes) -> None:
    task = next(cheat.task for cheat in all_cheats() if cheat.task.task_id == "file")
    held = [Cheat(f"held/{n}", "does nothing", (f"touch {n}",), task, together=True) for n in range(3)]
    solving = Cheat("solves", "does the task", ("echo 42 > answer.txt",), task, together=True)
    report = run_cheats(local, cheats=[*held, solving], quick=True)
    assert [(result.name, result.kind) for result in report.results] == [
        ("held/0", None),
        ("held/1", None),
        ("held/2", None),
        ("solves", "win"),
    ]
    first = Cheat("first/half", "writes a half", ("printf 4 > half",), task, together=True)
    second = Cheat("second/half", "writes the rest", ("[ -e half ] && echo 42 > answer.txt",), task, together=True)
    report = run_cheats(local, cheats=[first, second], quick=True)
    assert [result.name for result in report.wins] == ["first/and-1-more"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAID_WHEN_PUBLISHED)
def test_the_same_cheat_pays_where_agent_and_verifier_share_a_sandbox(local: Sandboxes, name: str) -> None:
    cheat = next(cheat for cheat in all_cheats() if cheat.name == name)
    with local.open(SandboxSpec(limits=cheat.task.limits)) as sandbox:
        assert runpy.run_path(str(ONE_SANDBOX))["published_reward"](sandbox, cheat) > 0
