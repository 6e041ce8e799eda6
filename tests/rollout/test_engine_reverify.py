"""Verifying again: new checks over an old work tree, without agent and model, the old verdict untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import RolloutCancelled, RolloutError, SandboxError, StoreError
from openenv.rollout import Cancellation, Outcome, RolloutStore, Task, reverify, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import Sandboxes

TASK = Task(
    instruction="x",
    files={"given.txt": "given", "conftest.py": "# honest\n"},
    setup=("echo tool > ~/tool",),
    verify=("test -e answer.txt",),
    task_id="t",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def stored(local: Sandboxes, store: RolloutStore) -> Callable[..., Outcome]:
    def run(*lines: str, task: Task = TASK, **arguments: Any) -> Outcome:
        return run_rollout(task, agent=Shell(lines), sandbox=local, store=store, **arguments)

    return run


def test_new_checks_give_a_new_record_and_the_old_one_stays(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes, leftovers: Callable[[], None]
) -> None:
    first = stored("echo 42 > answer.txt; rm given.txt; echo evil > conftest.py; mkdir -p ~/x")
    assert first.reward == 1.0
    lines = (
        "grep -qx 42 answer.txt",
        "test ! -e given.txt",
        "grep -q honest conftest.py",
        "grep -q tool ~/tool",
        "test ! -e ~/x",
        "false",
    )
    again = reverify(store, first.rollout_id[:6], lines=lines, sandbox=local)
    assert (again.status, again.reward) == ("ok", pytest.approx(5 / 6))
    assert again.rollout_id == first.rollout_id
    assert [record.outcome.reward for record in store.history(first.rollout_id)] == [pytest.approx(5 / 6), 1.0]
    assert store.get(first.rollout_id, verdict="last").task.verify == lines
    assert store.get(first.rollout_id).outcome == first
    assert store.history(first.rollout_id)[-1].outcome == first
    leftovers()


def test_the_same_checks_give_the_same_verdict(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = stored("true")
    assert reverify(store, first.rollout_id, sandbox=local).reward == first.reward == 0.0


def test_files_of_the_verifier_can_be_new(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = stored("touch answer.txt")
    files = {"check.sh": "echo 0.75 > ~/logs/verifier/reward.txt"}
    assert reverify(store, first.rollout_id, lines=["sh check.sh"], verify_files=files, sandbox=local).reward == 0.75
    other = Task(instruction="other", verify=("false", "true"))
    assert reverify(store, first.rollout_id, task=other, sandbox=local).reward == 0.5


def test_a_line_that_runs_nothing_verifies_nothing(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = stored("true")
    with pytest.raises(RolloutError, match="blank or a comment"):
        reverify(store, first.rollout_id, lines=["# later"], sandbox=local)
    with pytest.raises(StoreError, match="cannot be called 'last'"):
        reverify(store, first.rollout_id, verdict="last", sandbox=local)
    assert len(store.history(first.rollout_id)) == 1


def test_a_verifier_that_crashed_gets_another_chance(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = stored("touch answer.txt", task=TASK.model_copy(update={"verify": ("kill -9 $$",)}))
    assert (first.status, first.reward) == ("ok", 0.0)
    second = reverify(store, first.rollout_id, lines=["test -e answer.txt"], sandbox=local)
    assert (second.status, second.reward, second.reason) == ("ok", 1.0, None)
    third = reverify(store, first.rollout_id, lines=["kill -9 $$"], sandbox=local)
    assert (third.status, third.reward) == ("ok", 0.0)


def test_a_truncated_or_failed_rollout_keeps_its_label(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    hurried = TASK.model_copy(update={"agent_timeout_s": 3})
    cut = stored("touch answer.txt; sleep 60", task=hurried, verify_truncated=False)
    assert (cut.status, cut.reward) == ("truncated", None)
    again = reverify(store, cut.rollout_id, sandbox=local)
    assert (again.status, again.reward) == ("truncated", 1.0)
    replaced = stored("cd ~; rm -rf workdir; ln -s / workdir")
    assert (replaced.status, replaced.phase, replaced.reward) == ("policy_failed", "collect", 0.0)
    assert reverify(store, replaced.rollout_id, lines=["test -e given.txt"], sandbox=local).reward == 1.0


def test_without_a_work_tree_there_is_nothing_to_verify(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    failed = stored("true", task=TASK.model_copy(update={"setup": ("false",)}))
    with pytest.raises(StoreError, match="No work tree was kept"):
        reverify(store, failed.rollout_id, sandbox=local)
    with pytest.raises(StoreError, match="no rollout"):
        reverify(store, "nothing", sandbox=local)


def test_a_cancelled_verification_stores_nothing(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = stored("true")
    cancel = Cancellation()
    cancel.cancel()
    with pytest.raises((RolloutCancelled, SandboxError)):
        reverify(store, first.rollout_id, sandbox=local, cancel=cancel)
    assert len(store.history(first.rollout_id)) == 1


def test_a_rollout_that_lost_its_work_with_its_sandbox_is_verified_again_as_the_setup_left_it(
    stored: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = stored("python3 -c 'import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))'")
    assert (first.status, first.reward, first.metadata["lost_worktree"]) == ("policy_failed", 0.0, True)
    again = reverify(store, first.rollout_id, lines=("grep -q given given.txt",), sandbox=local)
    assert (again.status, again.reward) == ("policy_failed", 1.0)
    broken = reverify(store, first.rollout_id, lines=("kill -9 $$",), sandbox=local)
    assert broken.reward == 0.0
    unchecked = reverify(store, first.rollout_id, lines=(), sandbox=local)
    assert unchecked.reward is None
