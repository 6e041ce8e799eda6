"""Failures are zeros, unless the infrastructure failed: a sandbox that is lost without the agent's work, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from openenv.errors import SandboxError
from openenv.rollout import Check, Outcome, Task, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import Limits, Sandbox, Sandboxes, SandboxSpec

REWARD = "~/logs/verifier/reward.txt"


@pytest.fixture
def roll(local: Sandboxes, leftovers: Callable[[], None]) -> Callable[..., Outcome]:
    """Let an agent that leaves this script as `go.sh` work on a task."""

    def run(script: str, *checks: str | Check, verify_sandbox: Sandboxes | None = None, **fields: Any) -> Outcome:
        task = Task.model_validate({"instruction": "x", "verify": checks, **fields})
        agent = Shell([f"cat > go.sh <<'EOF'\n{script}\nEOF"])
        outcome = run_rollout(task, agent=agent, sandbox=local, verify_sandbox=verify_sandbox)
        leftovers()
        return outcome

    return run


class Watched(Sandboxes):
    """A backend around a real one that counts its sandboxes, and may do something to each."""

    def __init__(self, inner: Sandboxes, change: Callable[[Sandbox], Sandbox] = lambda sandbox: sandbox) -> None:
        self.name, self.features, self._inner, self._change = "watched", inner.features, inner, change
        self.limits: Limits | None = None
        self._lock = threading.Lock()
        self.opened = self.open_now = self.most = 0

    def check(self) -> None:
        pass

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        assert spec is not None
        if self.limits is not None:
            spec = SandboxSpec(limits=self.limits, mounts=spec.mounts, home=spec.home, timeout_s=spec.timeout_s)
        sandbox = self._inner.open(spec)
        with self._lock:
            self.opened += 1
            self.open_now += 1
            self.most = max(self.most, self.open_now)
        close = sandbox.close

        def closed() -> None:
            close()
            with self._lock:
                self.open_now -= 1

        sandbox.close = closed  # type: ignore[method-assign]
        return self._change(sandbox)


def dies_with(file: str) -> Callable[[Sandbox], Sandbox]:
    """Make a sandbox die when a command starts while it holds a file: as when the work in it crashes its machine."""

    def change(sandbox: Sandbox) -> Sandbox:
        run = sandbox.exec

        def fragile(cmd: Any, **options: Any) -> Any:
            if sandbox.exists(f"{sandbox.workdir}/{file}"):
                sandbox.kill()
            return run(cmd, **options)

        sandbox.exec = fragile  # type: ignore[method-assign]
        return sandbox

    return change


# sandboxes


def test_each_line_has_a_sandbox_of_its_own_and_there_are_never_more_than_two(
    roll: Callable[..., Outcome], local: Sandboxes
) -> None:
    watched = Watched(local)
    dirty = "test ! -e left && test ! -e ~/left && test ! -e /tmp/left && touch left ~/left /tmp/left && sleep 0.2"
    outcome = roll("exit 0", dirty, dirty, Check(run="sh go.sh", judge="true"), dirty, verify_sandbox=watched)
    assert (outcome.status, outcome.reward) == ("ok", 1.0)
    assert (watched.opened, watched.most, watched.open_now) == (5, 2, 0)


def test_a_line_that_only_reads_hands_its_sandbox_on(roll: Callable[..., Outcome], local: Sandboxes) -> None:
    watched = Watched(local)
    lines = ("grep -q exit go.sh", "test -e go.sh && cat go.sh | wc -l", "sh go.sh; touch left", "test ! -e left")
    outcome = roll("exit 0", *lines, verify_sandbox=watched)
    assert (outcome.status, outcome.reward) == ("ok", 1.0)
    assert (watched.opened, watched.open_now) == (2, 0)
    watched = Watched(local)
    endless = roll("exit 0", "tail -f go.sh", "grep -q exit go.sh", verify_sandbox=watched, verify_timeout_s=2)
    assert (endless.status, endless.reward) == ("ok", 0.5)
    assert (watched.opened, watched.open_now) == (2, 0)


@pytest.mark.parametrize("check", ["sh go.sh", Check(run="sh go.sh", judge="true")])
def test_a_sandbox_that_dies_with_the_agents_work_is_the_agents_failure(
    roll: Callable[..., Outcome], local: Sandboxes, check: str | Check
) -> None:
    outcome = roll("exit 0", check, verify_sandbox=Watched(local, dies_with("go.sh")))
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert "lost its sandbox" in (outcome.verify_results[0].note or "")


@pytest.mark.parametrize("check", ["true", Check(run="true", judge="true")])
def test_a_sandbox_that_dies_without_it_too_is_nobodys(
    roll: Callable[..., Outcome], local: Sandboxes, check: str | Check
) -> None:
    outcome = roll("exit 0", check, files={"given": ""}, verify_sandbox=Watched(local, dies_with("given")))
    assert (outcome.status, outcome.reward) == ("grader_failed", None)
    assert "lost its sandbox" in (outcome.reason or "")


def test_an_accident_is_nobodys_and_the_line_runs_again(roll: Callable[..., Outcome], local: Sandboxes) -> None:
    accidents = iter([True])

    def once(sandbox: Sandbox) -> Sandbox:
        return dies_with("go.sh")(sandbox) if next(accidents, False) else sandbox

    outcome = roll("exit 0", "sh go.sh", "true", verify_sandbox=Watched(local, once))
    assert (outcome.status, outcome.reward) == ("ok", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["true", Check(run="true", judge="true")])
def test_a_tree_that_does_not_fit_into_the_verifier_is_the_agents_failure(
    roll: Callable[..., Outcome], local: Sandboxes, check: str | Check
) -> None:
    narrow = Watched(local)
    narrow.limits = Limits(disk_mb=16, memory_mb=256)
    task = Task.model_validate({"instruction": "x", "verify": [check]})
    agent = Shell(["head -c 30000000 /dev/urandom > big"])
    outcome = run_rollout(task, agent=agent, sandbox=local, verify_sandbox=narrow)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert run_rollout(task, agent="noop", sandbox=local, verify_sandbox=narrow).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "f() { f | f & }; f; sleep 1",
        "cat /dev/zero > fill; cat /dev/zero > ~/fill; cat /dev/zero > /tmp/fill; cat /dev/zero > /dev/shm/fill",
        "yes | head -c 80000000; yes | head -c 80000000 >&2",
        "i=0; while [ $i -lt 30000 ]; do : > f$i; i=$((i + 1)); done",
        "chmod 000 . ~ ~/logs ~/logs/verifier",
        "rm -rf ~/* ~/.[a-z]*; kill -9 -1",
        "kill -INT 1; kill -TERM 1; kill -9 1; kill -STOP 1",
    ],
)
def test_what_code_does_to_its_line_is_no_reason_for_no_verdict(roll: Callable[..., Outcome], script: str) -> None:
    limits = Limits(memory_mb=256, disk_mb=64, pids=64)
    line = f"sh go.sh; echo 0.0 > {REWARD}; false"
    outcome = roll(script, line, "test -e go.sh && false", limits=limits, verify_timeout_s=20)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


# judges


def test_a_judge_that_only_the_agents_output_kills_is_a_zero(roll: Callable[..., Outcome]) -> None:
    judge = 'test "$(cat "$OUTPUT/stdout")" != boom || kill -9 $$'
    outcome = roll("echo boom", Check(run="sh go.sh", judge=judge), "true")
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert "signal 9" in (outcome.verify_results[0].note or "")


def test_a_judge_whose_sandbox_cannot_hold_the_output_is_a_zero(roll: Callable[..., Outcome], local: Sandboxes) -> None:
    narrow = Watched(local)
    narrow.limits = Limits(disk_mb=16, memory_mb=256)
    check = Check(run="sh go.sh", judge="true")
    outcome = roll("yes | head -c 14000000; yes | head -c 14000000 >&2", check, verify_sandbox=narrow)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


@pytest.mark.slow_but_for("nan")
@pytest.mark.parametrize("output", ["nan", "7", "-1", "much", ""])
def test_a_score_that_is_no_reward_is_the_agents_where_the_solution_has_one(
    roll: Callable[..., Outcome], output: str
) -> None:
    copies = Check(run="sh go.sh", judge=f'cp "$OUTPUT/stdout" {REWARD}')
    outcome = roll(f"echo {output}", copies, solution="echo 'echo 0.5' > go.sh")
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert "it must be a number from 0 to 1" in (outcome.verify_results[0].note or "")
    unsolved = roll(f"echo {output}", copies)
    assert (unsolved.status, unsolved.reward) == ("ok", 0.0)


# rewards


@pytest.mark.parametrize("text", ["2", "-0.5", "inf", "nan", "one", ""])
def test_a_check_that_writes_no_valid_reward_earns_nothing(roll: Callable[..., Outcome], text: str) -> None:
    outcome = roll("exit 0", f"echo {text} > {REWARD}")
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert "it must be a number from 0 to 1" in (outcome.verify_results[0].note or "")
    assert roll("exit 0", f"echo {text} > {REWARD}", on_missing=0.25).reward == 0.25


MISSING: dict[str, str | Check] = {
    "a judge that dies": Check(run="cat answer.txt", judge='test -s "$OUTPUT/stdout" || kill -9 $$'),
    "a judge that hangs": Check(run="cat answer.txt", judge='test -s "$OUTPUT/stdout" || sleep 60'),
    "a judge with an empty score": Check(run="cat answer.txt", judge=f'cat "$OUTPUT/stdout" > {REWARD}'),
    "a run that dies": Check(run="cat answer.txt || kill -9 $$", judge="true"),
    "a line that dies": "cat answer.txt || kill -9 $$",
    "a line that hangs": "cat answer.txt || sleep 60",
    "a line with an empty score": f"cat answer.txt > {REWARD}",
}


@pytest.mark.slow_but_for("a judge with an empty score", "a line that dies")
@pytest.mark.parametrize("name", MISSING)
def test_an_agent_that_writes_no_answer_earns_nothing(roll: Callable[..., Outcome], name: str) -> None:
    outcome = roll("exit 0", MISSING[name], verify_timeout_s=3)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    lowest = roll("exit 0", MISSING[name], verify_timeout_s=3, reward_range=(-1, 1))
    assert (lowest.status, lowest.reward) == ("ok", -1.0)


def test_the_reward_of_a_missing_result_is_in_the_range() -> None:
    with pytest.raises(ValidationError, match="on_missing must be from 0 to 1"):
        Task(instruction="x", on_missing=2.0)
    with pytest.raises(ValidationError, match="on_missing"):
        Task(instruction="x", on_missing=float("nan"))


def test_a_task_without_checks_says_so(roll: Callable[..., Outcome]) -> None:
    outcome = roll("exit 0")
    assert (outcome.status, outcome.reward, outcome.reason) == ("ok", None, "no checks")


def test_a_task_may_declare_another_range(roll: Callable[..., Outcome]) -> None:
    assert roll("exit 0", f"echo 7.5 > {REWARD}", reward_range=(-1, 10)).reward == 7.5
    assert roll("exit 0", f"echo -1 > {REWARD}", reward_range=(-1, 10)).reward == -1.0
    assert roll("exit 0", f"echo 11 > {REWARD}", reward_range=(-1, 10)).reward == -1.0
    unjudged = Check(run="kill -9 $$", judge=f"echo -1 > {REWARD}")
    assert roll("exit 0", unjudged, reward_range=(-1, 1)).reward == -1.0


@pytest.mark.parametrize("wrong", [(1, 0), (0, 0), (0.5, 1), (0, float("inf")), (float("nan"), 1), (0,)])
def test_a_range_that_makes_no_sense_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="reward_range"):
        Task.model_validate({"instruction": "x", "reward_range": wrong})


@pytest.mark.parametrize("text", ["1e9", "nan", "none"])
def test_a_wild_reward_that_the_agents_code_wrote_is_a_zero(roll: Callable[..., Outcome], text: str) -> None:
    line = f"sh go.sh; test -s {REWARD} || echo 0.5 > {REWARD}"
    outcome = roll(f"echo {text} > {REWARD}", line, "true")
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert outcome.metadata["ignored_reward_file"] is True


@pytest.mark.slow
@pytest.mark.parametrize("act", [f"echo 1.0 > {REWARD}", f"rm -f {REWARD}"])
def test_a_process_that_outlives_a_line_does_not_choose_the_reward(roll: Callable[..., Outcome], act: str) -> None:
    script = f"(sleep 0.3; while :; do {act}; sleep 0.05; done) > /dev/null 2>&1 &"
    line = f"sh go.sh; echo 0.1 > {REWARD}"
    assert roll("exit 0", line, "true").reward == 0.1
    outcome = roll(script, line, "true")
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert "outlived" in (outcome.verify_results[0].note or "")
    no_file = roll(script, "sh go.sh; test -e go.sh", "true", reward_file=False)
    assert (no_file.status, no_file.reward) == ("ok", 1.0)


@pytest.mark.parametrize(
    "end",
    [
        "kill -9 $PPID; sleep 9",
        "exit 3",
        "rm -rf ~/logs; touch ~/logs",
        pytest.param(f"mkfifo {REWARD}", marks=pytest.mark.slow),
    ],
)
def test_a_line_that_cannot_write_its_reward_is_not_worth_more(roll: Callable[..., Outcome], end: str) -> None:
    line = f"sh go.sh || exit 1; echo 0.1 > {REWARD}"
    limit_s = 8  # for the line that waits at a pipe
    files = {"go.sh": "true\n"}
    outcome = roll(end, line, "test -e go.sh", "test -e go.sh", files=files, verify_timeout_s=limit_s)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


@pytest.mark.parametrize("act", ["rm -rf ~/logs/verifier", "chmod 0 ~/logs/verifier"])
def test_a_line_that_passes_without_the_reward_that_it_would_write_earns_the_lowest(
    roll: Callable[..., Outcome], act: str
) -> None:
    line = f"sh go.sh; echo 0.1 > {REWARD}; exit 0"
    assert roll(act, line).reward == 0.0
    assert roll(act, f"test -e go.sh && {line}", solution=("touch go.sh",)).reward == 0.0


def test_a_line_that_writes_a_reward_only_where_it_fails_passes_without_one(roll: Callable[..., Outcome]) -> None:
    line = f"sh go.sh || echo 0 > {REWARD}"
    assert roll("exit 0", line, solution=("echo exit 0 > go.sh",)).reward == 1.0
    assert roll("exit 1", line, solution=("echo exit 0 > go.sh",)).reward == 0.0
    assert roll("echo 42", f"grep -q 42 go.sh || echo 0 > {REWARD}").reward == 1.0  # runs nothing of the agent's


def test_the_last_line_that_writes_a_reward_wins(roll: Callable[..., Outcome]) -> None:
    outcome = roll("exit 0", f"echo 0.2 > {REWARD}", f"test ! -e {REWARD} && echo 0.7 > {REWARD}", "false")
    assert (outcome.status, outcome.reward) == ("ok", 0.7)


def test_a_sandbox_that_cannot_be_closed_does_not_change_the_verdict(
    roll: Callable[..., Outcome], local: Sandboxes
) -> None:
    def stubborn(sandbox: Sandbox) -> Sandbox:
        close = sandbox.close

        def closing() -> None:
            close()
            raise SandboxError("it does not go away")

        sandbox.close = closing  # type: ignore[method-assign]
        return sandbox

    assert roll("exit 0", "true", verify_sandbox=Watched(local, stubborn)).reward == 1.0
