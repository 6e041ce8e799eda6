"""Verify lines: plain shell lines over the agent's work tree, all in one fresh sandbox.

Knows what a line may be refused for although it exits with 0 (it was ended from within, its own files were changed),
and whose fault it is when a line dies: one that comes to an end on what the setup left was killed by the agent's code.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from openenv.errors import SandboxGone
from openenv.rollout.case import Case, clean_environment, crash_of, read_reward
from openenv.rollout.commands import lay_files_over, run_line
from openenv.rollout.outcome import CommandResult
from openenv.rollout.proof import Evidence, Proof, could_not_load, proves_itself, runs_pytest, stood_in
from openenv.sandboxes.base import ExecResult, Sandbox

_SCRIPTS = frozenset({".py", ".sh", ".bash", ".js", ".mjs", ".cjs", ".ts", ".rb", ".pl", ".ini", ".cfg", ".toml", ""})
_ODD = frozenset("\\\n\r")
"""What sha256sum does not print as it is."""
_REFUSED = 1
"""The exit code of a line that exited with 0 and does not count."""
_KILLED = 137


class LineCrash(Exception):
    """A line died, with or without the agent's work: there is no verdict."""

    def __init__(self, why: str, result: CommandResult) -> None:
        super().__init__(why)
        self.result = result


@dataclass(frozen=True, slots=True)
class _Attempt:
    result: CommandResult
    crash: str | None = None
    evidence: Evidence | None = None


class Lines:
    """Runs the verify lines of a case. A context manager: they share a sandbox, which is started with the first.

    Args:
        case: What is verified.
        folder: A folder of the host for archives.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._stack = ExitStack()
        self._sandbox: Sandbox | None = None
        self.sandbox_id = ""
        self.refused = False
        """Whether a line was refused or killed: a reward file may then be anybody's."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def run(self, line: str) -> CommandResult:
        """Run a line and return what came of it; its exit code is 0 only where it is passed.

        Raises:
            LineCrash: it died, as it does on what the setup left.
            SandboxError: the sandbox failed.
        """
        try:
            sandbox = self._opened()
            attempt = self._attempt(sandbox, line, proves=self._must_prove(line))
            if attempt.crash is None:
                attempt = self._proven(sandbox, line, attempt)
            sandbox.stop_processes()  # what the agent's code started must not write after its check
        except SandboxGone as exc:
            self._case.cancel.check()
            if "memory" not in exc.reason:
                raise
            self._reopen()
            attempt = _Attempt(CommandResult(cmd=line, exit_code=_KILLED), "ran out of memory with its sandbox")
        if attempt.crash is not None:
            return self._killed(line, attempt.result, attempt.crash)
        return attempt.result

    def reward(self) -> float | None:
        """Return what a line wrote as the reward, or None."""
        return None if self._sandbox is None else read_reward(self._sandbox)

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            task = self._case.task
            seconds = 4 * len(task.verify) * task.verify_timeout_s
            self._sandbox = self._stack.enter_context(self._case.sandbox(with_work=True, seconds=seconds))
            self.sandbox_id = self.sandbox_id or self._sandbox.sandbox_id
        return self._sandbox

    def _reopen(self) -> None:
        self._stack.close()
        self._stack, self._sandbox = ExitStack(), None

    def _must_prove(self, line: str) -> bool:
        task = self._case.task
        if task.proof is not None:
            return task.proof
        named = (text for path, text in task.verify_files.items() if posixpath.basename(path) in line)
        if runs_pytest(line) or stood_in(line, task.verify_files) != line:
            return True
        return any(proves_itself(text) for text in (line, *named))

    def _attempt(self, sandbox: Sandbox, line: str, *, proves: bool) -> _Attempt:
        task = self._case.task
        lay_files_over(sandbox, task.verify_files)  # again for each line: the one before ran the agent's code
        if not proves:
            result, done = run_line(sandbox, line, timeout=task.verify_timeout_s, envs=clean_environment(sandbox.home))
            return self._judged(sandbox, result, done, None)
        proof = Proof(line, sandbox.home, sandbox.workdir, task.verify_files)
        proof.lay(sandbox, self._folder / "proof.tar")
        envs = clean_environment(sandbox.home, proof.environment())
        result, done = run_line(sandbox, proof.command(), timeout=task.verify_timeout_s, envs=envs)
        return self._judged(sandbox, result.model_copy(update={"cmd": line}), done, proof.read(sandbox))

    def _judged(self, sandbox: Sandbox, result: CommandResult, done: ExecResult, evidence: Evidence | None) -> _Attempt:
        crash = crash_of(done, self._case.task.verify_timeout_s)
        if crash is None and result.exit_code == 0:
            changed = _changed(sandbox, self._case.task.verify_files)
            if changed is not None:
                result = self._refuse(result, f"{changed} was changed while it ran")
        return _Attempt(result, crash, evidence)

    def _proven(self, sandbox: Sandbox, line: str, attempt: _Attempt) -> _Attempt:
        """Refuse a line that exits with 0 and does not prove its end, unless no proof can be had of it."""
        evidence, result = attempt.evidence, attempt.result
        if evidence is None or evidence.problem is None:
            return attempt
        unloaded = result.exit_code != 0 and could_not_load(result.stdout + result.stderr)
        if self._case.task.proof is None and not evidence.seen and (result.exit_code == 0 or unloaded):
            control = self._control(line, proves=True)
            if control.evidence is None or not control.evidence.seen:  # the line hides its pytest from everybody
                return self._attempt(sandbox, line, proves=False) if unloaded else attempt
        if result.exit_code != 0:
            return attempt
        return _Attempt(self._refuse(result, evidence.problem))

    def _refuse(self, result: CommandResult, why: str) -> CommandResult:
        self.refused = True
        return result.model_copy(update={"exit_code": _REFUSED, "note": f"exited with 0, but {why}"})

    def _killed(self, line: str, result: CommandResult, crash: str) -> CommandResult:
        control = self._control(line, proves=False)
        if control.crash is not None:
            raise LineCrash(crash, result)
        self.refused = True
        note = f"{crash}; on what the setup left it ends by itself, so the agent's work is what killed it"
        return result.model_copy(update={"exit_code": result.exit_code or _REFUSED, "note": note})

    def _control(self, line: str, *, proves: bool) -> _Attempt:
        """Run a line where the agent has done nothing."""
        task = self._case.task
        try:
            with self._case.sandbox(with_work=False, seconds=2 * task.verify_timeout_s) as sandbox:
                return self._attempt(sandbox, line, proves=proves)
        except SandboxGone as exc:
            self._case.cancel.check()
            return _Attempt(CommandResult(cmd=line, exit_code=_KILLED), f"lost its sandbox: {exc.reason}")


def _changed(sandbox: Sandbox, files: Mapping[str, str]) -> str | None:
    """Return one of the verifier's scripts that is not as it was laid out, or None."""
    laid = {
        posixpath.normpath(posixpath.join(sandbox.workdir, path)): hashlib.sha256(text.encode()).hexdigest()
        for path, text in files.items()
        if (posixpath.splitext(path)[1] in _SCRIPTS or text.startswith("#!")) and not _ODD & set(path)
    }
    if not laid:
        return None
    done = sandbox.exec(["sha256sum", "--", *laid], cwd="/", timeout=60)
    if done.exit_code == 127:  # no such program: one by one
        return next((path for path, digest in laid.items() if _digest(sandbox, path) != digest), None)
    found = {line[66:]: line[:64] for line in done.stdout.splitlines()}
    return next((path for path, digest in laid.items() if found.get(path) != digest), None)


def _digest(sandbox: Sandbox, path: str) -> str:
    try:
        return hashlib.sha256(sandbox.read_bytes(path)).hexdigest()
    except OSError:
        return ""
