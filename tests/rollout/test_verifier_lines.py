"""Verify lines that die or are tampered with: each of them is a failed check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenv.rollout import Outcome, Task, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes import backend
from openenv.sandboxes.base import Limits, Sandboxes


@pytest.fixture
def roll(local: Sandboxes, leftovers: Callable[[], None]) -> Callable[..., Outcome]:
    """Let an agent that writes this script work on a task."""

    def run(script: str, *lines: str, **fields: Any) -> Outcome:
        task = Task(instruction="x", verify=lines, **fields)
        agent = Shell([f"cat > go.sh <<'EOF'\n{script}\nEOF"])
        outcome = run_rollout(task, agent=agent, sandbox=local)
        leftovers()
        return outcome

    return run


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("kill -9 $PPID; sleep 60", "signal 9"),
        pytest.param("kill -SEGV $PPID; sleep 60", "signal 11", marks=pytest.mark.slow),
        ("kill -9 -1", "signal 9"),
        ("sleep 60", "did not end"),
    ],
)
def test_a_check_that_only_the_agents_work_kills_is_not_passed(
    roll: Callable[..., Outcome], script: str, why: str
) -> None:
    outcome = roll(script, "sh go.sh; true", "test -e go.sh", verify_timeout_s=5 if script == "sleep 60" else 60)
    first, second = outcome.verify_results
    assert (outcome.status, outcome.reward, second.exit_code) == ("ok", 0.5, 0)
    assert first.exit_code != 0
    assert why in (first.note or "")


def test_a_check_that_runs_out_of_memory_with_the_agents_work_is_not_passed(roll: Callable[..., Outcome]) -> None:
    hog = "exec python3 -c \"x = b'x' * (512 << 20)\""
    outcome = roll(hog, "test ! -e go.sh || exec sh go.sh", limits=Limits(memory_mb=64, disk_mb=64))
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


def test_a_check_that_dies_by_itself_fails(roll: Callable[..., Outcome]) -> None:
    outcome = roll("exit 0", "sh go.sh; kill -9 $$", "true")
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert [result.exit_code for result in outcome.verify_results] == [137, 0]


def test_a_reward_written_before_the_check_was_killed_does_not_count(roll: Callable[..., Outcome]) -> None:
    script = "echo 1.0 > ~/logs/verifier/reward.txt; kill -9 $PPID; sleep 60"
    outcome = roll(script, "sh go.sh; echo 0.0 > ~/logs/verifier/reward.txt", "true")
    assert (outcome.status, outcome.reward) == ("ok", 0.0)  # and to kill it is not worth more than what it writes
    assert outcome.metadata["ignored_reward_file"] is True


def test_a_script_of_the_verifier_that_is_changed_while_it_runs_is_not_passed(roll: Callable[..., Outcome]) -> None:
    files = {"tests/a.sh": "sh go.sh; sh tests/b.sh\n", "tests/b.sh": "exit 1\n"}
    for edit in ("echo exit 0 > tests/b.sh", "rm -rf tests; mkdir tests; echo true > tests/b.sh", "rm tests/b.sh"):
        outcome = roll(edit, "sh tests/a.sh || true", verify_files=files)
        assert outcome.reward == 0.0
        assert "was changed while it ran" in (outcome.verify_results[0].note or "")


@pytest.mark.parametrize(
    "edit",
    [
        "echo 0 > tests/data.txt",
        "echo 'echo exit 1 > tests/b.sh; exit 0' > tests/b.sh",
        pytest.param(
            "(setsid sh -c 'sleep 0.3; echo exit 1 > tests/b.sh' > /dev/null 2>&1 &)\n"
            "echo 'sleep 1; exit 0' > tests/b.sh",
            marks=pytest.mark.slow,
        ),
        "mv tests own; mkdir tests; echo 'rm -r tests; mv own tests; exit 0' > tests/b.sh",
        "ln tests/b.sh b; mv tests/b.sh c; echo 'mv c tests/b.sh; rm b; exit 0' > tests/b.sh",
    ],
)
def test_files_of_the_verifier_that_are_changed_and_put_back_are_noticed(
    roll: Callable[..., Outcome], edit: str
) -> None:
    check = "sh go.sh; grep -qx 0 tests/data.txt && exit 0; sh tests/b.sh\n"
    files = {"tests/a.sh": check, "tests/b.sh": "exit 1\n", "tests/data.txt": "49\n"}
    outcome = roll(edit, "sh tests/a.sh", verify_files=files)
    assert outcome.reward == 0.0
    assert "was changed while it ran" in (outcome.verify_results[0].note or "")


def test_a_check_that_changes_its_files_is_excused_for_what_it_changes_with_the_solution(
    roll: Callable[..., Outcome],
) -> None:
    files = {
        "tests/run.sh": "#!/bin/sh\nsed -i s/0/1/ tests/log.txt; echo x > tests/new; sh go.sh\n",
        "tests/log.txt": "0\n",
    }
    line = "test -e go.sh && chmod 755 tests/run.sh && tests/run.sh"  # without the work it changes nothing
    fields = {"verify_files": files, "solution": ("echo exit 0 > go.sh",)}
    assert roll("exit 0", line, **fields).reward == 1.0
    assert roll("touch tests/run.sh; exit 0", line, **fields).reward == 1.0  # no more than the check does itself
    assert roll("echo x >> tests/run.sh; exit 0", line, **fields).reward == 0.0


def test_a_check_may_change_modes_and_data_of_its_own(roll: Callable[..., Outcome]) -> None:
    files = {"check.sh": "#!/bin/sh\necho 1 >> cases/seen.txt\nsh go.sh\n", "cases/seen.txt": "0\n"}
    assert roll("exit 0", "chmod 755 check.sh && ./check.sh", verify_files=files).reward == 1.0


def test_the_same_holds_without_isolation() -> None:
    processes = backend("process", i_know_there_is_no_isolation=True)
    task = Task(instruction="x", verify=("sh go.sh; true", "test -e go.sh"))
    agent = Shell(["echo 'kill -9 $PPID; sleep 60' > go.sh"])
    outcome = run_rollout(task, agent=agent, sandbox=processes)
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert processes.leftovers() == []
