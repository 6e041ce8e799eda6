"""Checks are validated before the first agent: on the initial files and on the solution, once per task."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import SandboxError, TaskRefused
from openenv.rollout import Cancellation, Check, Outcome, RolloutStore, Task, run_many, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.run import validation
from openenv.rollout.run.engine import Engine, EngineOptions
from openenv.rollout.store.verdict import CheckFacts, References
from openenv.rollout.verify import references
from openenv.sandboxes.base import Sandbox, Sandboxes, SandboxSpec
from waiting import wait_until

REWARD = "~/logs/verifier/reward.txt"


class Counting(Sandboxes):
    """A backend around a real one that counts its sandboxes and may change their commands.

    Args:
        breaks: Returns whether a command should fail as on a broken machine: with this exit code, or None.
    """

    def __init__(self, inner: Sandboxes, breaks: Callable[[str], int | None] = lambda line: None) -> None:
        self.name, self.features, self._inner, self.breaks = "counting", inner.features, inner, breaks
        self.opened = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        pass

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        with self._lock:
            self.opened += 1
        sandbox = self._inner.open(spec)
        run = sandbox.exec

        def run_or_break(cmd: Any, **options: Any) -> Any:
            line = cmd if isinstance(cmd, str) else " ".join(cmd)
            code = self.breaks(line)
            if code is not None and code < 0:
                sandbox.kill()
            return run(cmd if code is None else f"exit {code}", **options)

        sandbox.exec = run_or_break  # type: ignore[method-assign]
        return sandbox


@pytest.fixture
def roll(local: Sandboxes, tmp_path: Path, leftovers: Callable[[], None]) -> Callable[..., Outcome]:
    """Let an agent with these lines work on a task whose checks are validated."""

    def run(task: Task, *lines: str, **options: Any) -> Outcome:
        arguments = {"sandbox": local, "cache": tmp_path / "cache", "validate_checks": True, **options}
        outcome = run_rollout(task, agent=Shell(list(lines) or ["true"]), **arguments)
        leftovers()
        return outcome

    return run


def task(*checks: str | Check, **fields: Any) -> Task:
    return Task.model_validate({"instruction": "x", "task_id": "t", "verify": checks, **fields})


def facts(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((cache / "checks").glob("*.json")) if path.stat().st_size]


# refusals


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"verify": "false", "solution": "true"}, "Check 1 of task 't' fails .* exit code 1: false"),
        ({"verify": ["true", "echo WRONG; exit 3"], "solution": "true"}, "Check 2 .* exit code 3.*WRONG"),
        ({"verify": "kill -9 $$", "solution": "true"}, "Check 1 .*signal 9"),
        ({"verify": {"run": "true", "judge": "exit 4"}, "solution": "true"}, "Check 1 .* exit code 4"),
        ({"verify": {"run": "true", "judge": f"echo nan > {REWARD}"}, "solution": "true"}, "Check 1 .* from 0 to 1"),
        ({"verify": {"run": "true", "judge": f"echo 0 > {REWARD}"}, "solution": "true"}, r"Check 1 .*\(score 0\)"),
        ({"verify": f"echo 0 > {REWARD}", "solution": "true"}, "earns 0, the lowest reward"),
        ({"verify": "true", "solution": ["true", "echo BROKEN; exit 7"]}, "The solution of task 't' fails.*BROKEN"),
    ],
)
def test_a_task_whose_solution_fails_a_check_is_refused_before_its_agent(
    roll: Callable[..., Outcome], tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with RolloutStore(tmp_path / "store") as store:
        with pytest.raises(TaskRefused, match=f"(?s){says}") as caught:
            roll(Task.model_validate({"instruction": "x", "task_id": "t", **fields}), "echo ran", store=store)
        assert store.find() == []
        assert store.running() == []
    assert caught.value.code == "TASK_REFUSED"
    assert "validate_checks=False" in str(caught.value)
    assert facts(tmp_path / "cache") == []


def test_a_solution_may_earn_less_than_all_and_pass_with_another_exit_code(roll: Callable[..., Outcome]) -> None:
    line = f"echo 0.4 > {REWARD}; test -e done"
    assert roll(task(line, solution="true"), "true").reward == 0.4
    score = Check(run="true", judge=f"echo 0.3 > {REWARD}")
    assert roll(task(score, "true", solution="true"), "true").reward == 0.65


def test_noop_and_oracle_run_a_task_that_is_refused(local: Sandboxes, tmp_path: Path) -> None:
    broken = task("false", solution="true")
    for agent in ("noop", "oracle"):
        outcome = run_rollout(broken, agent=agent, sandbox=local, cache=tmp_path, validate_checks=True)
        assert (outcome.status, outcome.reward) == ("ok", 0.0)
    ran = run_rollout(broken, agent=Shell(["true"]), sandbox=local, cache=tmp_path, validate_checks=False)
    assert (ran.status, ran.reward) == ("ok", 0.0)


def test_a_batch_names_all_refused_tasks_and_runs_no_agent(local: Sandboxes, tmp_path: Path) -> None:
    tasks = [
        task("true", solution="true", task_id="good"),
        *(task(f"false {n}", solution="true", task_id=n) for n in "ab"),
    ]
    outcomes: list[Outcome] = []
    with pytest.raises(TaskRefused, match=r"(?s)task 'a'.*task 'b'") as caught:
        run_many(
            tasks,
            agent=Shell(["true"]),
            sandbox=local,
            cache=tmp_path,
            validate_checks=True,
            on_outcome=lambda number, outcome: outcomes.append(outcome),
        )
    assert "good" not in str(caught.value)
    assert outcomes == []


def test_a_solution_that_fails_once_is_tried_again(local: Sandboxes, tmp_path: Path) -> None:
    codes = iter([None, 1])  # on the initial files, then on the solution
    backend = Counting(local, lambda line: next(codes, None) if line == "test -e . # check" else None)
    checked = task("test -e . # check", solution="true")
    agent = Shell(["true"])
    outcome = run_rollout(checked, agent=agent, sandbox=backend, cache=tmp_path, validate_checks=True)
    assert (outcome.status, outcome.reward) == ("ok", 1.0)
    assert len(facts(tmp_path)) == 1


# warnings


def test_a_check_without_a_verdict_on_the_initial_files_is_a_warning_and_worth_nothing(
    roll: Callable[..., Outcome], caplog: pytest.LogCaptureFixture
) -> None:
    check = Check(run="cat answer.txt", judge='test -s "$OUTPUT/stdout" || kill -9 $$')
    unsolved = task(check, "true", task_id="crashes")
    with caplog.at_level(logging.WARNING):
        idle = roll(unsolved)
    assert (idle.status, idle.reward) == ("ok", 0.5)
    warnings = [record.getMessage() for record in caplog.records if "no verdict" in record.getMessage()]
    assert len(warnings) == 1
    assert "check 1 of task 'crashes'" in warnings[0]
    assert "signal 9" in warnings[0]
    assert roll(unsolved, "echo 42 > answer.txt").reward == 1.0
    assert roll(unsolved.model_copy(update={"on_missing": 0.25})).reward == 0.625


def test_a_sound_task_gives_no_warning(roll: Callable[..., Outcome], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert roll(task("grep -qx 42 answer.txt", solution="echo 42 > answer.txt")).reward == 0.0
    assert [record.getMessage() for record in caplog.records if "check" in record.getMessage()] == []


# kept facts


def test_a_task_is_validated_once_also_in_other_engines(local: Sandboxes, tmp_path: Path) -> None:
    backend = Counting(local)
    checked = task("touch a; true", "touch b; true", solution="touch answer.txt")
    options: dict[str, Any] = {"sandbox": backend, "cache": tmp_path, "validate_checks": True, "agent": Shell(["true"])}
    assert run_rollout(checked, **options).reward == 1.0
    first, backend.opened = backend.opened, 0
    assert run_rollout(checked, **options).reward == 1.0
    assert (first, backend.opened) == (3 + 5, 3)
    run_rollout(checked.model_copy(update={"task_id": "u", "metadata": {"group": "g"}}), **options)
    assert backend.opened == 6
    backend.opened = 0
    for change in ({"verify_files": {"f": "x"}}, {"instruction": "y"}):
        run_rollout(checked.model_copy(update=change), **options)
    assert backend.opened == 2 * 8
    assert len(facts(tmp_path)) == 3


def test_rollouts_of_a_task_at_once_validate_it_once(local: Sandboxes, tmp_path: Path) -> None:
    backend = Counting(local)
    checked = task("sleep 0.2")
    outcomes = run_many(
        [checked] * 6, agent=Shell(["true"]), sandbox=backend, cache=tmp_path, validate_checks=True, concurrency=6
    )
    assert [outcome.reward for outcome in outcomes] == [1.0] * 6
    assert backend.opened == 2 + 6 * 2
    backend.opened = 0
    threads = []
    with Engine(EngineOptions(agent=Shell(["true"]), sandbox=backend, cache=tmp_path / "x", validate_checks=True)) as e:
        threads = [threading.Thread(target=e.run, args=(checked,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert backend.opened == 2 + 4 * 2


def test_a_cache_that_cannot_be_written_validates_once_per_engine(local: Sandboxes, tmp_path: Path) -> None:
    backend = Counting(local)
    (tmp_path / "checks").write_text("a file")
    run_many([task("true")] * 3, agent=Shell(["true"]), sandbox=backend, cache=tmp_path, validate_checks=True)
    assert backend.opened == 2 + 3 * 2


@pytest.mark.parametrize("damage", ["", '{"format": 1, "setup": [', '{"format": 1, "setup": [], "solved": []}', "[]"])
def test_damaged_facts_are_replaced(roll: Callable[..., Outcome], tmp_path: Path, damage: str) -> None:
    checked = task("test -e answer.txt", solution="touch answer.txt")
    roll(checked)
    [path] = (tmp_path / "cache" / "checks").glob("*.json")
    before = path.read_text()
    path.write_text(damage)
    assert roll(checked, "touch answer.txt").reward == 1.0
    assert path.read_text() == before


CHILD = """
import sys
from openenv.rollout import Task, run_rollout
from openenv.rollout.agents import Shell
task = Task(instruction="x", verify=("sleep 0.5", "date +%s%N >> /dev/null; true"))
print(run_rollout(task, agent=Shell(["true"]), cache=sys.argv[1], validate_checks=True).reward, flush=True)
"""


def child(cache: Path) -> subprocess.Popen[str]:
    program = textwrap.dedent(CHILD).replace("cache=sys.argv[1]", "cache=__import__('pathlib').Path(sys.argv[1])")
    return subprocess.Popen([sys.executable, "-c", program, str(cache)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_wait_for_each_other_and_one_that_is_killed_leaves_nothing(local: Sandboxes, tmp_path: Path) -> None:
    killed = child(tmp_path)
    wait_until(lambda: any((tmp_path / "checks").glob("*.json")), 30)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    [path] = (tmp_path / "checks").glob("*.json")
    assert path.read_text() == ""
    others = [child(tmp_path) for _ in range(3)]
    assert [other.communicate(timeout=60)[0] for other in others] == ["1.0\n"] * 3
    assert len(facts(tmp_path)) == 1
    assert os.listdir(tmp_path / "checks") == [path.name]


def test_a_validation_can_be_cancelled_and_so_can_those_that_wait_for_it(
    local: Sandboxes, tmp_path: Path, leftovers: Callable[[], None]
) -> None:
    cancel, validating = Cancellation(), threading.Event()
    options = EngineOptions(
        agent=Shell(["true"]),
        sandbox=local,
        cache=tmp_path,
        validate_checks=True,
        on_install=lambda message: validating.set(),
    )
    statuses: list[str] = []
    checked = task("sleep 60")
    with Engine(options) as engine:

        def run() -> None:
            statuses.append(engine.run(checked, cancel=cancel).status)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert validating.wait(30)
        cancel.cancel("enough")
        for thread in threads:
            thread.join(30)
        assert statuses == ["cancelled"] * 3
    assert facts(tmp_path) == []
    leftovers()
    cancel = Cancellation()
    outcomes = run_many(
        [checked] * 2,
        agent=Shell(["true"]),
        sandbox=local,
        cache=tmp_path,
        validate_checks=True,
        cancel=cancel,
        on_install=lambda message: cancel.cancel("enough"),
    )
    assert [outcome.status for outcome in outcomes] == ["cancelled"] * 2
    leftovers()


def test_a_fingerprint_says_where_commands_run(local: Sandboxes) -> None:
    spec = SandboxSpec()
    assert local.fingerprint(spec) == local.fingerprint(spec)
    prints = {backend.fingerprint(spec) for backend in (local, Counting(local))}
    assert len({*prints, Counting(local).fingerprint(SandboxSpec(image="other"))}) == 3


# whose failure it is


MACHINE: dict[str, Check | str] = {"line": "sh go.sh", "check": Check(run="sh go.sh", judge="true")}


@pytest.mark.parametrize("kind", MACHINE)
def test_a_machine_that_breaks_after_the_validation_is_nobodys_failure(
    local: Sandboxes, tmp_path: Path, kind: str
) -> None:
    backend = Counting(local)
    broken = task(MACHINE[kind], files={"go.sh": "exit 0\n"})
    options: dict[str, Any] = {"sandbox": backend, "cache": tmp_path, "validate_checks": True, "agent": Shell(["true"])}
    assert run_rollout(broken, **options).reward == 1.0
    backend.breaks = lambda line: 137 if "sh go.sh" in line else None
    outcome = run_rollout(broken, **options)
    assert (outcome.status, outcome.reward, outcome.phase) == ("grader_failed", None, "verify")
    assert "signal 9" in (outcome.reason or "")
    assert "remove the folder `checks` in OPENENV_CACHE" in (outcome.reason or "")
    again = run_rollout(broken, **options)
    assert (again.status, again.reward) == ("grader_failed", None)
    backend.breaks = lambda line: None
    assert run_rollout(broken, **options).reward == 1.0


def test_a_check_that_fails_once_on_the_initial_files_does_not_discard_a_failure(
    local: Sandboxes, tmp_path: Path
) -> None:
    """Such as a flaky check: the infrastructure is to blame only if it fails again."""
    backend = Counting(local)
    flaky = task("sh go.sh", files={"go.sh": "exit 0\n"})
    options: dict[str, Any] = {"sandbox": backend, "cache": tmp_path, "validate_checks": True}
    assert run_rollout(flaky, agent=Shell(["true"]), **options).reward == 1.0
    codes = iter([None, 137])
    backend.breaks = lambda line: next(codes, None) if line.startswith("sh go.sh") else None
    outcome = run_rollout(flaky, agent=Shell(["echo 'kill -9 $PPID; kill -9 $$' > go.sh"]), **options)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert len(facts(tmp_path)) == 1


ACTS = {
    "kill": "kill -9 $PPID; kill -9 $$",
    "kill-all": "kill -9 -1",
    "hang": "sleep 60",
    "stop": "kill -STOP $PPID; kill -STOP $$; sleep 60",
    "nan": f"echo nan > {REWARD}",
    "infinity": f"echo 1e999 > {REWARD}",
    "too-much": f"echo 7 > {REWARD}",
    "no-reward": "rm -rf ~/logs; touch ~/logs",
    "processes": "f() { f | f & }; f; sleep 9",
    "disk": "cat /dev/zero > ~/fill; cat /dev/zero > /tmp/fill; rm -rf ~/logs",
    "memory": "python3 -c 'x = bytearray(1 << 31); import time; time.sleep(9)'",
}
FORMS: dict[str, Check | str] = {
    "line": f"sh go.sh; test -e {REWARD} || echo 0.1 > {REWARD}",
    "passing-line": f"sh go.sh; echo 0.1 > {REWARD}; exit 0",
    "check": Check(run="sh go.sh", judge='grep -q 42 "$OUTPUT/stdout"'),
}


@pytest.mark.slow_but_for("kill-line", "nan-line", "no-reward-passing-line")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("act", ACTS)
def test_an_agent_cannot_turn_its_failure_into_no_reward(roll: Callable[..., Outcome], act: str, form: str) -> None:
    limits = {"memory_mb": 256, "disk_mb": 64, "pids": 64}
    attacked = task(FORMS[form], files={"go.sh": "exit 0\n"}, limits=limits, verify_timeout_s=6)
    outcome = roll(attacked, f"cat > go.sh <<'EOF'\n{ACTS[act]}\nEOF")
    assert outcome.status == "ok"
    assert outcome.reward in (0.0, 0.1), outcome.verify_results
    writes = ("nan", "infinity", "too-much") if form == "line" else ()
    assert outcome.reward == 0.0 or act not in (*writes, "no-reward")


def test_a_verifier_that_fails_before_any_agent_runs_no_agent(
    roll: Callable[..., Outcome], local: Sandboxes, tmp_path: Path
) -> None:
    backend = Counting(local, lambda line: -1 if line == "true # check" else None)
    with RolloutStore(tmp_path / "store") as store:
        outcome = roll(task("true # check"), "echo ran", verify_sandbox=backend, store=store)
        assert store.get(outcome.rollout_id).outcome == outcome
    assert (outcome.status, outcome.reward, outcome.agent_exit_code) == ("grader_failed", None, None)
    assert "lost its sandbox" in (outcome.reason or "")
    assert "before any agent" in (outcome.reason or "")
    assert facts(tmp_path / "cache") == []


def test_a_setup_that_fails_is_reported_by_the_rollout(roll: Callable[..., Outcome]) -> None:
    outcome = roll(task("true", setup="exit 3", solution="true"))
    assert (outcome.status, outcome.phase, outcome.setup_results[0].exit_code) == ("env_failed", "setup", 3)


def test_a_backend_that_opens_nothing_fails_the_rollout_and_refuses_no_task(
    roll: Callable[..., Outcome], local: Sandboxes
) -> None:
    class Full(Counting):
        def open(self, spec: SandboxSpec | None = None) -> Sandbox:
            raise SandboxError("no more sandboxes")

    outcome = roll(task("true", solution="true"), sandbox=Full(local))
    assert (outcome.status, outcome.reward) == ("sandbox_failed", None)


# each guard is necessary


def no_solution_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation._ValidationRun, "require_solution", lambda *args: None)


def nothing_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation.Validator, "_warn", lambda *args: None)


def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_stored", lambda *args: None)


def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_file(path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_RDWR)

    monkeypatch.setattr(validation, "try_locked", open_file)


def half_files_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(file: int, checked: Task) -> validation.Validation | None:
        text = os.pread(file, 4096, 0)
        return validation.Validation(References(setup=(CheckFacts(ending="lost"),))) if text else None

    monkeypatch.setattr(validation, "_stored", stored)


def the_instruction_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_NOT_IN_KEY", {"instruction", "verify_files", *validation._NOT_IN_KEY})


def the_initial_files_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_PROBES", 1)


def the_infrastructure_is_never_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references.ReferenceRuns, "is_broken", lambda *args: False)


def the_infrastructure_is_always_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references.ReferenceRuns, "is_broken", lambda *args: True)


def failures_of_the_verifier_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation._ValidationRun, "failure", lambda *args: None)


GUARDS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None], dict[str, Any]]] = {
    "the solution passes": (
        no_solution_is_required,
        test_a_task_whose_solution_fails_a_check_is_refused_before_its_agent,
        {"fields": {"verify": "false", "solution": "true"}, "says": "Check 1"},
    ),
    "a batch is refused as a whole": (
        no_solution_is_required,
        test_a_batch_names_all_refused_tasks_and_runs_no_agent,
        {},
    ),
    "the warning": (
        nothing_is_warned_about,
        test_a_check_without_a_verdict_on_the_initial_files_is_a_warning_and_worth_nothing,
        {},
    ),
    "facts are kept": (nothing_is_kept, test_a_task_is_validated_once_also_in_other_engines, {}),
    "the key has all that a check sees": (
        the_instruction_is_not_in_the_key,
        test_a_task_is_validated_once_also_in_other_engines,
        {},
    ),
    "others wait": (nobody_waits, test_rollouts_of_a_task_at_once_validate_it_once, {}),
    "files are whole": (half_files_are_believed, test_damaged_facts_are_replaced, {"damage": "["}),
    "two runs on the initial files": (
        the_initial_files_run_once,
        test_a_check_that_fails_once_on_the_initial_files_does_not_discard_a_failure,
        {},
    ),
    "a broken machine gives no reward": (
        the_infrastructure_is_never_to_blame,
        test_a_machine_that_breaks_after_the_validation_is_nobodys_failure,
        {"kind": "line"},
    ),
    "an agent's failure has a reward": (
        the_infrastructure_is_always_to_blame,
        test_an_agent_cannot_turn_its_failure_into_no_reward,
        {"act": "kill", "form": "line"},
    ),
    "no answer has a reward": (
        the_infrastructure_is_always_to_blame,
        test_a_check_without_a_verdict_on_the_initial_files_is_a_warning_and_worth_nothing,
        {},
    ),
    "no agent runs if the verifier fails": (
        failures_of_the_verifier_are_ignored,
        test_a_verifier_that_fails_before_any_agent_runs_no_agent,
        {},
    ),
}
"""Of each guard: how to take it out, and a test that fails without it."""


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_a_test_fails_without_each_guard(
    guard: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    disable, test, arguments = GUARDS[guard]
    names = set(inspect.signature(test).parameters) - set(arguments)
    fixtures = {name: request.getfixturevalue(name) for name in names}
    disable(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**fixtures, **arguments)
