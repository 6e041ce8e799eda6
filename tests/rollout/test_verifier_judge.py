"""Run and judge apart: the agent's work runs in one sandbox, data of it reaches the other, and that one decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from openenv.errors import SandboxError
from openenv.rollout import Cancellation, Check, Outcome, Progress, RolloutStore, Task, reverify, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.verify.worktree_guard import run_files
from openenv.sandboxes import backend
from openenv.sandboxes.base import Limits, Sandbox, Sandboxes, SandboxSpec

SAME = 'cmp "$OUTPUT/stdout" cases/1.out'
CASES = {"cases/1.in": "3 4\n", "cases/1.out": "7\n"}


def task(*checks: str | Check, **fields: Any) -> Task:
    return Task.model_validate({"instruction": "x", "verify": checks, **fields})


def judged(run: str, judge: str = "true", **fields: Any) -> Check:
    return Check.model_validate({"run": run, "judge": judge, **fields})


@pytest.fixture
def roll(local: Sandboxes, leftovers: Callable[[], None]) -> Callable[..., Outcome]:
    """Let an agent that runs these lines work on a task."""

    def run(case: Task, *lines: str, **options: Any) -> Outcome:
        outcome = run_rollout(case, agent=Shell([*lines, "true"]), **{"sandbox": local, **options})
        leftovers()
        return outcome

    return run


ADD = task(judged("python3 add.py < cases/1.in", SAME), verify_files=CASES)
RIGHT = "echo 'a, b = input().split(); print(int(a) + int(b))' > add.py"


def test_what_a_program_prints_is_judged_and_both_parts_are_reported(roll: Callable[..., Outcome]) -> None:
    outcome = roll(ADD, RIGHT)
    assert (outcome.status, outcome.reward) == ("ok", 1.0)
    [result] = outcome.verify_results
    assert (result.cmd, result.exit_code, result.note, result.score) == (SAME, 0, None, None)
    assert result.run is not None
    assert (result.run.cmd, result.run.exit_code, result.run.stdout) == ("python3 add.py < cases/1.in", 0, "7\n")
    wrong = roll(ADD, "echo 'print(8)' > add.py")
    assert (wrong.status, wrong.reward, wrong.verify_results[0].exit_code) == ("ok", 0.0, 1)
    assert roll(ADD).reward == 0.0


@pytest.mark.parametrize(
    "cheat",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import os; os.system('cp cases/1.out /dev/stdout; cat cases/* ../*/cases/1.out')",
        "import os; os.system('echo 1.0 > ~/logs/verifier/reward.txt; mkdir -p ~/logs/output; "
        "echo 7 > ~/logs/output/stdout')",
        "import os; os.kill(os.getppid(), 9)",
    ],
)
def test_nothing_the_program_does_reaches_its_judge(roll: Callable[..., Outcome], cheat: str) -> None:
    outcome = roll(ADD, f'cat > add.py <<"EOF"\n{cheat}\nEOF')
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


def test_the_judge_sees_data_and_nothing_of_the_work_tree(roll: Callable[..., Outcome]) -> None:
    look = (
        'test ! -e mine.txt && test -e given.txt && test -e tests/x && cat "$OUTPUT/exit_code" && '
        'find "$OUTPUT" -mindepth 1 | sed "s#$OUTPUT/##" | sort && test ! -x "$OUTPUT/files/out/tool" && '
        '! echo x 2>/dev/null > "$OUTPUT/new" && test "$(readlink -f .)" = "$HOME/workdir"'
    )
    case = task(
        judged("sh go.sh", look, keep=("out", "one.txt", "missing", "link.txt", "pipe")),
        files={"given.txt": "x"},
        verify_files={"tests/x": "x"},
    )
    go = (
        "mkdir -p out/deep; echo x | tee out/tool out/deep/file one.txt > /dev/null; chmod 755 out/tool; "
        "ln -s /etc/passwd out/link; ln -s /etc/passwd link.txt; mkfifo pipe; test ! -e tests/x && exit 3"
    )
    outcome = roll(case, "touch mine.txt", f"echo '{go}' > go.sh")
    [result] = outcome.verify_results
    assert (outcome.reward, result.exit_code) == (1.0, 0)
    listed = ["exit_code", "files", "files/one.txt", "files/out", "files/out/deep", "files/out/deep/file"]
    assert result.stdout.splitlines() == ["3", *listed, "files/out/tool", "stderr", "stdout"]


def test_output_reaches_the_judge_byte_by_byte(roll: Callable[..., Outcome]) -> None:
    exact = 'printf "\\377\\000\\n" | cmp - "$OUTPUT/stdout" && printf err | cmp - "$OUTPUT/stderr"'
    program = "import sys; sys.stdout.buffer.write(bytes([255, 0, 10])); sys.stderr.write('err')"
    outcome = roll(task(judged("python3 go.py", exact)), f'cat > go.py <<"EOF"\n{program}\nEOF')
    assert outcome.reward == 1.0


def test_endless_output_is_cut_and_judged(roll: Callable[..., Outcome]) -> None:
    outcome = roll(task(judged("yes | head -c 40000000", 'test "$(wc -c < "$OUTPUT/stdout")" -lt 20000000')))
    assert outcome.reward == 1.0
    assert outcome.verify_results[0].run is not None
    assert len(outcome.verify_results[0].run.stdout) < 1_000_000


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("kill -9 $$", "signal 9"),
        pytest.param("kill -SEGV $$", "signal 11", marks=pytest.mark.slow),
        ("sleep 60", "did not end"),
        ("exec python3 -c \"x = b'x' * (512 << 20)\"", "signal 9"),
        ("truncate -s 900M big.bin", "cannot be taken"),
    ],
)
def test_work_that_dies_is_a_zero_and_the_next_check_counts(roll: Callable[..., Outcome], line: str, why: str) -> None:
    case = task(
        judged("sh go.sh", keep=("big.bin",)),
        judged("true"),
        verify_timeout_s=5 if line == "sleep 60" else 60,
        limits=Limits(memory_mb=64, disk_mb=64),
    )
    outcome = roll(case, f"cat > go.sh <<'EOF'\n{line}\nEOF")
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert outcome.verify_results[0].exit_code != 0
    assert why in (outcome.verify_results[0].note or "")


@pytest.mark.parametrize(("line", "why"), [("kill -9 $$", "signal 9"), ("sleep 60", "did not end")])
def test_a_judge_that_dies_is_a_failed_check(roll: Callable[..., Outcome], line: str, why: str) -> None:
    case = task(judged("true"), judged("echo ran", line), verify_timeout_s=5 if line == "sleep 60" else 60)
    outcome = roll(case)
    assert (outcome.status, outcome.phase, outcome.reward) == ("ok", "done", 0.5)
    assert why in (outcome.verify_results[1].note or "")
    assert outcome.verify_results[1].run is not None
    assert outcome.verify_results[1].run.stdout == "ran\n"


def test_a_judge_may_give_a_part_of_a_reward(roll: Callable[..., Outcome]) -> None:
    part = judged("true", "echo 0.25 > ~/logs/verifier/reward.txt; exit 1")
    outcome = roll(task(part, judged("true"), "true", judged("true", "false")))
    assert outcome.reward == pytest.approx((0.25 + 1 + 1 + 0) / 4)
    assert [result.score for result in outcome.verify_results] == [0.25, None, None, None]
    assert roll(task(part, reward_file=False)).reward == 0.0


def test_what_one_check_leaves_does_not_reach_the_next(roll: Callable[..., Outcome]) -> None:
    dirty = judged("touch left", "touch ~/left")
    clean = judged("test ! -e left", 'test ! -e ~/left && test "$(cat "$OUTPUT/exit_code")" = 0')
    outcome = roll(task(dirty, clean, "test ! -e left && test ! -e ~/left"))
    assert outcome.reward == 1.0


def test_run_sees_the_files_it_names_or_needs() -> None:
    files = {"cases/1.in": "", "cases/1.out": "", "a.py": "", "/srv/tool": "", "cases/11.in": ""}

    def seen(run: str, needs: tuple[str, ...] | None = None) -> set[str]:
        return set(run_files(Check(run=run, judge="x", needs=needs), files, "/home/user/workdir"))

    assert seen("python3 add.py < cases/1.in") == {"cases/1.in"}
    assert seen("python3 ./a.py '/home/user/workdir/cases/11.in'") == {"a.py", "cases/11.in"}
    assert seen("/srv/tool --in=cases/1.in") == {"/srv/tool", "cases/1.in"}
    assert seen("cat other/cases/1.in ba.py") == set()
    assert seen("sh all.sh", ("cases/*.in", "a.py")) == {"cases/1.in", "cases/11.in", "a.py"}
    assert seen("cat cases/1.in", ()) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": "x"},
        {"run": "", "judge": "x"},
        {"run": "x", "judge": "y", "keep": ["/etc/passwd"]},
        {"run": "x", "judge": "y", "keep": ["a/../../b"]},
        {"run": "x", "judge": "y", "keep": ["."]},
        {"run": "x", "judge": "y", "kept": []},
    ],
)
def test_a_check_that_cannot_work_is_refused_when_it_is_written(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Task.model_validate({"instruction": "x", "verify": [wrong]})


# stored, cancelled, elsewhere


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "store") as opened:
        yield opened


def test_checks_are_stored_and_verified_again(
    roll: Callable[..., Outcome], store: RolloutStore, local: Sandboxes
) -> None:
    first = roll(ADD, RIGHT, store=store)
    record = store.get(first.rollout_id)
    assert record.task == ADD
    assert record.outcome == first
    assert reverify(store, first.rollout_id, sandbox=local).reward == 1.0
    harder = judged("echo 1 1 | python3 add.py", 'grep -qx 2 "$OUTPUT/stdout"')
    again = reverify(store, first.rollout_id, lines=[harder, "false"], sandbox=local)
    assert again.reward == 0.5
    assert store.get(first.rollout_id, verdict="last").task.verify == (harder, "false")


@pytest.mark.parametrize("part", ["run", "judge"])
def test_either_part_can_be_cancelled(roll: Callable[..., Outcome], part: str) -> None:
    cancel = Cancellation()
    case = task(judged("sleep 60" if part == "run" else "true", "sleep 60"))

    def watch(event: Progress) -> None:
        if event.phase == "verify" and (part == "run" or "judging" in event.message):
            cancel.cancel("enough")

    outcome = roll(case, cancel=cancel, on_progress=watch)
    assert (outcome.status, outcome.reward, outcome.reason) == ("cancelled", None, "enough")


class Few(Sandboxes):
    """A backend around a real one that starts only so many sandboxes."""

    def __init__(self, inner: Sandboxes, opens: int) -> None:
        self.name, self.features, self._inner, self._opens = "few", inner.features, inner, opens

    def check(self) -> None:
        pass

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        if self._opens == 0:
            raise SandboxError("no more sandboxes")
        self._opens -= 1
        return self._inner.open(spec)


@pytest.mark.parametrize("opens", [0, 1])
def test_a_sandbox_that_does_not_start_is_sandbox_failed(
    roll: Callable[..., Outcome], local: Sandboxes, opens: int
) -> None:
    outcome = roll(ADD, RIGHT, verify_sandbox=Few(local, opens))
    assert (outcome.status, outcome.phase, outcome.reward) == ("sandbox_failed", "verify", None)


def test_run_and_judge_work_without_isolation_too() -> None:
    processes = backend("process", i_know_there_is_no_isolation=True)
    case = task(
        judged("cp cases/1.in kept/x", 'cmp "$OUTPUT/files/kept/x" cases/1.in && test ! -e kept', keep=("kept",)),
        judged("kill -9 $$"),
        verify_files=CASES,
    )
    outcome = run_rollout(case, agent=Shell(["mkdir kept"]), sandbox=processes)
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert processes.leftovers() == []
