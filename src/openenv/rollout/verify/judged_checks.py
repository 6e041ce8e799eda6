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
# If a part is killed, hangs or writes an invalid reward, the check has `Task.missing_reward`. Only if its sandbox is
# also lost on the baseline (and on the solution) did the infrastructure fail: `CheckCrash`, no verdict.

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError
from openenv.rollout.store.archives import UnusableWorktree, files_of, worktree_limit, write_archive
from openenv.rollout.tasks.task import MAX_OUTPUT, Check, CommandResult, crash_of
from openenv.rollout.verify.cases import OUTPUT, Source, VerificationCase, clean_environment, path_kinds, run_command
from openenv.rollout.verify.live_check import LiveOptions, LiveRun
from openenv.rollout.verify.reward_file import invalid_reward, read_reward
from openenv.rollout.verify.verify_lines import (
    KILLED,
    REFUSED,
    CheckCrash,
    LineRun,
    attempt_line,
    lost_line,
    retry_lost,
)
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
    """Runs the judged checks of a case."""

    def __init__(self, case: VerificationCase) -> None:
        self._case = case

    def run(self, check: Check, report: Callable[[str], None], label: str) -> CommandResult:
        """Run both parts of a check and return the judge's result; `result.run` is the result of `run`.

        If `run` dies, no judge starts and the result has the exit code of `run`.

        Raises:
            CheckCrash: a part loses its sandbox without the agent's work too.
            SandboxNotStarted: a sandbox did not start.
        """
        if check.port is not None:
            return self._verdict(check, retry_lost(lambda: self._both_parts(check, "work")))
        output = self._run_part(check, "work")
        if output.is_lost:
            output = self._run_part(check, "work")
        if output.problem is not None:
            ran = output.result(check)
            result = CommandResult(cmd=check.judge, exit_code=ran.exit_code or 1, run=ran, score=self._missing())
            if output.is_lost and self._case.is_broken(lambda source: self._run_part(check, source).is_lost):
                raise CheckCrash(output.problem, result, part="the run")
            return result.model_copy(update={"note": f"not judged: its run {output.problem}"})
        report(f"{label}ran with exit code {output.exit_code}, judging")
        return self._verdict(check, retry_lost(lambda: self._judge_part(check, output)))

    def _verdict(self, check: Check, judged: LineRun) -> CommandResult:
        problem = self._problem(judged)
        if problem is None:
            score = None if judged.written is None else judged.written.value
            return judged.result.model_copy(update={"score": score})
        if judged.is_lost and self._case.is_broken(lambda source: self._both_parts(check, source).is_lost):
            raise CheckCrash(problem, judged.result)
        code = judged.result.exit_code or REFUSED
        changes = {"exit_code": code, "note": f"its judge {problem}", "score": self._missing()}
        return judged.result.model_copy(update=changes)

    def _missing(self) -> float | None:
        """Return the score of a check without a judgement; None stands for 0, a failed check."""
        return self._case.task.missing_reward or None

    def _problem(self, judged: LineRun) -> str | None:
        """Return why a judge's run is not a verdict, or None if it is one."""
        if judged.crash is not None or judged.written is None or judged.written.value is not None:
            return judged.crash
        return invalid_reward(judged.written, self._case.task)

    def _both_parts(self, check: Check, source: Source) -> LineRun:
        if check.port is None:
            return self._judge_part(check, self._run_part(check, source))
        needs = self._case.need(check, source), self._case.judges_need(check)
        try:
            with self._case.use(needs[0]) as running, self._case.use(needs[1]) as judging:
                return _judge_live(self._case, check, check.port, running.sandbox, judging.sandbox)
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
    output.problem = crash_of(done, task.verify_timeout_s)
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


def _judge_live(case: VerificationCase, check: Check, port: int, running: Sandbox, judging: Sandbox) -> LineRun:
    """Run both parts of a check at once."""
    task = case.task
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
