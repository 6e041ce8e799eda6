"""Judged checks: `run` executes the agent's code in one sandbox, `judge` decides in another one.

Knows one `VerificationCase`. Must not know verify lines.
"""

# sandbox 1: the agent's work             host                     sandbox 2: the baseline and all verify files
#
#   run ──> stdout, stderr, exit code ──> `_RunOutput` (bytes) ──>  $OUTPUT/stdout, stderr, exit_code   (read-only)
#           files in `Check.keep`     ──>                     ──>  $OUTPUT/files/...                   (read-only)
#           closed before the judge starts                         judge ──> exit code, reward file
#
# If the check has a port, both sandboxes run at the same time, and the judge connects to the agent's server
# (`live_check.py`); nothing else reaches sandbox 2.
#
# If a part is killed, hangs or writes an invalid reward, the check has `Task.missing_reward`. If `ReferenceRuns` show
# that the infrastructure is the cause, there is no verdict: `CheckCrash`.

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError
from openenv.rollout.store.archives import UnusableWorktree, files_of, worktree_limit, write_archive
from openenv.rollout.store.verdict import CheckFacts, Source
from openenv.rollout.tasks.task import MAX_OUTPUT, Check, CommandResult, crash_of
from openenv.rollout.verify.attempts import (
    KILLED,
    REFUSED,
    CheckCrash,
    LineRun,
    attempt_line,
    invalid_reward,
    lost_line,
    read_reward,
    retry_lost,
)
from openenv.rollout.verify.cases import OUTPUT, VerificationCase, clean_environment, path_kinds, run_command
from openenv.rollout.verify.live_check import LiveOptions, LiveRun
from openenv.rollout.verify.references import ReferenceRuns
from openenv.sandboxes.base import Sandbox, Stream

MAX_STREAM = 16 * 1024 * 1024
"""Bytes of each output stream that the judge receives."""
MAX_TAKEN = 64 * 1024 * 1024
"""Bytes of all files in `Check.keep`."""


@dataclass(slots=True)
class _RunOutput:
    """The output of a check's `run`, as data."""

    exit_code: int = KILLED
    duration_s: float = 0.0
    streams: dict[Stream, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    files: dict[str, bytes] = field(default_factory=dict)
    problem: str | None = None
    """Why the output cannot be judged: `run` did not end by itself, or a file cannot be taken."""
    is_lost: bool = False
    """Whether its sandbox failed, which may be an accident."""
    timed_out: bool = False

    def feed(self, stream: Stream, chunk: bytes) -> None:
        received = self.streams[stream]
        received += chunk[: MAX_STREAM - len(received)]

    def result(self, check: Check) -> CommandResult:
        stdout, stderr = (
            bytes(self.streams[name][:MAX_OUTPUT]).decode("utf-8", "replace") for name in ("stdout", "stderr")
        )
        return CommandResult(
            cmd=check.run,
            exit_code=self.exit_code,
            stdout=stdout,
            stderr=stderr,
            duration_s=self.duration_s,
            note=self.problem,
        )


class JudgedChecks:
    """Runs the judged checks of a case.

    Args:
        case: The case.
        references: The facts of the checks over files that no agent changed.
    """

    def __init__(self, case: VerificationCase, references: ReferenceRuns) -> None:
        self._case, self._references = case, references

    def run(self, number: int, check: Check, say: Callable[[str], None]) -> CommandResult:
        """Run both parts of a check and return the judge's result; `result.run` is the result of `run`.

        If `run` dies, no judge starts and the result has the exit code of `run`.

        Raises:
            CheckCrash: the infrastructure fails a part, also without the agent's work.
            SandboxNotStarted: a sandbox did not start.
        """
        attempt = self._attempt(check, "work", say)
        facts = self._facts(attempt)
        self._references.noted[number] = facts
        problem, written = attempt.crash, attempt.written
        if problem is None and written is not None and written.value is None:
            problem = invalid_reward(written, self._case.task)
        if problem is None:
            score = None if written is None else written.value
            return attempt.result.model_copy(update={"score": score})
        if self._references.is_broken(number, facts, partial(self._run_reference, check)):
            raise CheckCrash(problem, attempt.result, part=f"the {attempt.part}")
        note = f"its judge {problem}" if attempt.part == "judge" else f"not judged: its run {problem}"
        changes = {"exit_code": attempt.result.exit_code or REFUSED, "note": note, "score": self._missing()}
        return attempt.result.model_copy(update=changes)

    def _missing(self) -> float | None:
        """Return the score of a check without a judgement; None stands for 0, a failed check."""
        return self._case.task.missing_reward or None

    def _facts(self, attempt: LineRun) -> CheckFacts:
        return attempt.facts(reads_file=True)

    def _run_reference(self, check: Check, source: Source) -> CheckFacts:
        return self._facts(self._attempt(check, source))

    def _attempt(self, check: Check, source: Source, say: Callable[[str], None] | None = None) -> LineRun:
        """Run both parts of a check; the second run of a part with a lost sandbox counts."""
        if check.port is not None:
            return retry_lost(lambda: self._both_parts(check, source))
        output = self._run_part(check, source)
        if output.is_lost:
            output = self._run_part(check, source)
        if output.problem is not None:
            ran = output.result(check)
            result = CommandResult(cmd=check.judge, exit_code=ran.exit_code or REFUSED, run=ran)
            return LineRun(result, output.problem, output.timed_out, is_lost=output.is_lost, part="run")
        if say is not None:
            say(f"ran with exit code {output.exit_code}, judging")
        return retry_lost(lambda: self._judge_part(check, output))

    def _both_parts(self, check: Check, source: Source) -> LineRun:
        needs = self._case.need(check, source), self._case.judges_need(check)
        try:
            with self._case.use(needs[0]) as running, self._case.use(needs[1]) as judging:
                return _judge_live(self._case, check, running.sandbox, judging.sandbox)
        except (SandboxError, OSError) as exc:
            self._case.cancel.check()
            return lost_line(check.judge, exc)

    def _run_part(self, check: Check, source: Source) -> _RunOutput:
        try:
            with self._case.use(self._case.need(check, source)) as ready:
                return _run_part(self._case, check, ready.sandbox)
        except (SandboxError, OSError) as exc:
            self._case.cancel.check()
            lost = lost_line(check.run, exc)
            return _RunOutput(problem=lost.crash, is_lost=lost.is_lost)

    def _judge_part(self, check: Check, output: _RunOutput) -> LineRun:
        ran = output.result(check)
        try:
            with self._case.use(self._case.judges_need(check)) as ready:
                judged = _judge_part(self._case, check, ready.sandbox, output)
        except (SandboxError, OSError) as exc:
            self._case.cancel.check()
            judged = lost_line(check.judge, exc)
        return replace(judged, result=judged.result.model_copy(update={"run": ran}))


def _run_part(case: VerificationCase, check: Check, sandbox: Sandbox) -> _RunOutput:
    task, output = case.task, _RunOutput()
    done = sandbox.exec(
        check.run,
        envs={**task.verify_env, **clean_environment(sandbox.home)},
        cwd=sandbox.workdir,
        timeout=task.verify_timeout_s,
        on_output=output.feed,
        max_output=1024,
    )
    output.exit_code, output.duration_s = done.exit_code, done.duration_s
    output.problem, output.timed_out = crash_of(done, task.verify_timeout_s), done.timed_out
    if output.problem is None and check.keep:
        sandbox.stop_processes()  # nothing may write while files are taken
        try:
            output.files = _take(sandbox, check.keep, case.folder, min(MAX_TAKEN, worktree_limit(task.limits)))
        except SandboxGone:
            raise
        except (SandboxTreeError, UnusableWorktree, OSError) as exc:
            output.problem = f"left files that cannot be taken: {exc}"
    return output


def _take(sandbox: Sandbox, paths: tuple[str, ...], folder: Path, room: int) -> dict[str, bytes]:
    """Take regular files out of a sandbox by their paths; `room` bytes at most.

    Raises:
        SandboxTreeError, UnusableWorktree: the files are too large or cannot be packed.
    """
    taken: dict[str, bytes] = {}
    for path, kind in zip(paths, path_kinds(sandbox, paths), strict=True):
        inside = posixpath.join(sandbox.workdir, path)
        files: dict[str, bytes] = {}
        if kind == "f":
            files = {path: sandbox.read_bytes(inside, max_bytes=room + 1)}
        elif kind == "d":
            archive = folder / "kept.tar"
            sandbox.pack(inside, archive, max_bytes=2 * room)  # headers take space as well
            files = {f"{path}/{name}": content for name, content in files_of(archive, max_bytes=room).items()}
        room -= sum(map(len, files.values()))
        if room < 0:
            raise SandboxTreeError(f"'{path}' is too large")
        taken.update(files)
    return taken


def _judge_part(case: VerificationCase, check: Check, sandbox: Sandbox, output: _RunOutput) -> LineRun:
    task = case.task
    output_folder = posixpath.join(sandbox.home, OUTPUT)
    _lay_output(sandbox, output, output_folder, case.folder / "output.tar")
    if "isolation" in case.backend.features:  # without isolation the backend must be able to remove the folder later
        run_command(sandbox, ["chmod", "-R", "a-w", "--", output_folder])
    place = case.place()
    clean = clean_environment(sandbox.home, {"OUTPUT": output_folder, **place.environment(sandbox)})
    envs = {**task.verify_env, **clean}
    line = place.command(check.judge, sandbox)
    judged = attempt_line(sandbox, line, timeout=task.verify_timeout_s, envs=envs, cmd=check.judge)
    sandbox.stop_processes()
    return judged if task.reward_file is False else replace(judged, written=read_reward(sandbox, task))


def _judge_live(case: VerificationCase, check: Check, running: Sandbox, judging: Sandbox) -> LineRun:
    """Run both parts of a check with a port at once."""
    task, port = case.task, check.port
    assert port is not None
    options = LiveOptions(
        line=check.run,
        port=port,
        envs={**task.verify_env, **clean_environment(running.home)},
        seconds=task.verify_timeout_s,
        isolated="isolation" in case.backend.features,
    )
    with LiveRun(running, judging, case.folder, options) as live:
        judged = attempt_line(judging, check.judge, timeout=task.verify_timeout_s, envs=live.judge_environment)
        result = judged.result.model_copy(update={"run": live.result()})
    judging.stop_processes()
    written = None if task.reward_file is False else read_reward(judging, task)
    return replace(judged, result=result, written=written)


def _lay_output(sandbox: Sandbox, output: _RunOutput, output_folder: str, archive: Path) -> None:
    """Write the output as plain files that the judge can read, but neither change nor execute."""
    contents: dict[str, bytes] = {str(name): bytes(received) for name, received in output.streams.items()}
    contents["exit_code"] = f"{output.exit_code}\n".encode()
    contents |= {f"files/{name}": content for name, content in output.files.items()}
    write_archive(archive, contents, mode=0o444, folder="files")
    run_command(sandbox, ["rm", "-rf", "--", output_folder])
    sandbox.unpack(archive, output_folder)
    archive.unlink()
