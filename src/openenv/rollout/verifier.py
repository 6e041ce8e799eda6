"""Verification: every check of a task, in fresh sandboxes that the agent never touched, and the reward they earn.

Knows the two kinds of checks and what they are worth together. Must not know agents, models or stores: what was stored
can be verified again.
"""

from __future__ import annotations

import hashlib
import io
import math
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError
from openenv.rollout.outcome import CommandResult
from openenv.rollout.progress import Cancellation
from openenv.rollout.proof import Evidence, Proof, could_not_load, proves_itself, runs_pytest, stood_in
from openenv.rollout.scratch import scratch
from openenv.rollout.task import Check, Task
from openenv.rollout.worktree import Patterns, UnusableWorktree, files_of, worktree_limit
from openenv.sandboxes.base import HOME, ExecResult, Sandbox, Sandboxes, SandboxSpec, Stream

# commands: Setup and verify lines: what runs one of them, and the files that are laid out before.
#
# Knows sandboxes and `CommandResult`. Must not know what a line's failure means.


MAX_OUTPUT = 256 * 1024
_CLEAR = """
while [ "$1" != -- ]; do
  if [ -L "$1" ] || { [ -e "$1" ] && [ ! -d "$1" ]; }; then rm -f -- "$1" || exit 1; fi
  shift
done
shift
for file in "$@"; do rm -rf -- "$file" || exit 1; done
"""


def run_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str] | None = None
) -> tuple[CommandResult, ExecResult]:
    """Run a shell line in the work folder; `timed_out` and the like are in the second value."""
    done = sandbox.exec(line, envs=envs, cwd=sandbox.workdir, timeout=timeout, max_output=MAX_OUTPUT)
    result = CommandResult(
        cmd=line, exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, duration_s=done.duration_s
    )
    return result, done


def lay_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files, relative paths below the work folder."""
    for path, text in files.items():
        sandbox.write_text(posixpath.join(sandbox.workdir, path), text)


def lay_files_over(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files over a tree that nobody trusts: links and odd files in the way are removed first."""
    targets = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in files]
    if not targets:
        return
    below = f"{sandbox.workdir}/"
    parents = sorted({parent for path in targets if path.startswith(below) for parent in _parents(path, below)})
    done = sandbox.exec(["/bin/sh", "-c", _CLEAR, "sh", *parents, "--", *targets], cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"The verifier's files could not be laid out: {done.stderr.strip()}")
    lay_files(sandbox, files)


def _parents(path: str, below: str) -> list[str]:
    found = []
    parent = posixpath.dirname(path)
    while parent.startswith(below):
        found.append(parent)
        parent = posixpath.dirname(parent)
    return found


# case: A case: what is verified, and the fresh sandboxes in which that is done.
#
# Knows sandboxes, archives and tasks: what lies in a verifier's sandbox before anything runs there. Must not know what
# the outcome of a check means.


REWARD_FILE = "logs/verifier/reward.txt"
"""Below the home of a verifier's sandbox."""
_SLACK_S = 120.0


class NotStarted(Exception):
    """A sandbox did not start; the cause is the sandbox's own error."""

    def __init__(self, error: SandboxError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class VerificationCase:
    """What is verified, and where.

    Args:
        task: What was to be done.
        backend: What starts sandboxes.
        worktree: The agent's work tree, merged; None leaves the work folder as the setup made it.
        baseline: The home as the setup left it, or None.
        home: Where the home is inside.
        cancel: What ends it early.
    """

    task: Task
    backend: Sandboxes
    worktree: Path | None
    baseline: Path | None
    home: str = HOME
    cancel: Cancellation = field(default_factory=Cancellation)

    @contextmanager
    def sandbox(self, *, with_work: bool, seconds: float) -> Iterator[Sandbox]:
        """Start a fresh sandbox that holds what the setup left and, `with_work`, what the agent made of it.

        Raises:
            NotStarted: the sandbox did not start.
            SandboxError: what belongs into it could not be laid out there.
        """
        self.cancel.check()
        spec = SandboxSpec(limits=self.task.limits, timeout_s=seconds + _SLACK_S, home=self.home)
        try:
            opened = self.backend.open(spec)
        except SandboxError as exc:
            self.cancel.check()
            raise NotStarted(exc) from exc
        with opened as sandbox, self.cancel.on_cancel(sandbox.kill):
            self._prepare(sandbox, self.worktree if with_work else None)
            yield sandbox

    def _prepare(self, sandbox: Sandbox, worktree: Path | None) -> None:
        folder = posixpath.join(sandbox.home, posixpath.dirname(REWARD_FILE))
        if self.baseline is not None:
            sandbox.unpack(self.baseline, sandbox.home)
        if worktree is not None:
            if self.baseline is not None:
                shut = ["-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
                run_own(sandbox, ["find", sandbox.workdir, *shut])  # the setup may have shut a folder
                run_own(sandbox, ["find", sandbox.workdir, "-mindepth", "1", "-delete"])
            sandbox.unpack(worktree, sandbox.workdir)
        lay_files(sandbox, {path: text for path, text in self.task.files.items() if _outside(path, sandbox.home)})
        run_own(sandbox, ["/bin/sh", "-c", 'rm -rf -- "$1" && mkdir -p -- "$1"', "sh", folder])


def clean_environment(home: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of verify lines: nothing in it points into the work tree.

    PATH is the sandbox's own, as it was for the setup and the agent: the checks run_own on the same Python.
    """
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A repository in the work tree must not bring commands along.
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
        **(more or {}),
    }


def crash_of(done: ExecResult, timeout: float) -> str | None:
    """Return why a verify line did not come to a result of its own, or None when it did."""
    if done.timed_out:
        return f"did not end within {timeout:g} s"
    if 128 < done.exit_code <= 192:
        return f"was ended by signal {done.exit_code - 128}"
    return None


def read_reward(sandbox: Sandbox) -> float | None:
    """Return the number in a sandbox's reward file, or None where there is none."""
    try:
        reward = float(sandbox.read_bytes(posixpath.join(sandbox.home, REWARD_FILE), max_bytes=1024))
    except SandboxGone:
        raise
    except (SandboxError, OSError, ValueError):  # nothing there, or no file, or no number
        return None
    return reward if math.isfinite(reward) else None


def run_own(sandbox: Sandbox, argv: list[str]) -> str:
    """Run a command of the verifier's own; return what it printed.

    Raises:
        SandboxError: it failed.
    """
    done = sandbox.exec(argv, cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"'{argv[0]}' failed in the verifier's sandbox: {done.stderr.strip()}")
    return done.stdout


def _outside(path: str, home: str) -> bool:
    return path.startswith("/") and not posixpath.normpath(path).startswith(f"{home}/")


# lines: Verify lines: plain shell lines over the agent's work tree, all in one fresh sandbox.
#
# Knows what a line may be refused for although it exits with 0 (it was ended from within, its own files were changed),
# and whose fault it is when a line dies: one that comes to an end on what the setup left was killed by the agent's
# code.


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


class LineChecks:
    """Runs the verify lines of a case. A context manager: they share a sandbox, which is started with the first.

    Args:
        case: What is verified.
        folder: A folder of the host for archives.
    """

    def __init__(self, case: VerificationCase, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._stack = ExitStack()
        self._sandbox: Sandbox | None = None
        self.sandbox_id = ""
        self.refused = False
        """Whether a line was refused or killed: a reward file may then be anybody's."""

    def __enter__(self) -> LineChecks:
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


# judging: Run and judge apart: the agent's work runs in one sandbox, what came out of it is judged in another.
#
# Knows sandboxes, archives and `Check`. What the agent wrote is data to the judge: no file of it lies where a program
# looks for code, and the sandbox it ran in is gone before the judge's is started.


OUTPUT = "logs/output"
"""Below the home of the judge's sandbox: the folder that `$OUTPUT` names."""
MAX_STREAM = 16 * 1024 * 1024
"""So much of what `run_own` prints on either stream reaches the judge."""
MAX_KEPT = 64 * 1024 * 1024
_WORDS = re.compile(r"[^\s'\"<>|;&()=,`]+")
_KINDS = """
cd -- "$1" || exit 1
shift
for path in "$@"; do
  kind=- here=
  if [ -f "$path" ]; then kind=f; elif [ -d "$path" ]; then kind=d; fi
  rest=$path
  while [ -n "$rest" ]; do
    part=${rest%%/*}
    case $rest in */*) rest=${rest#*/};; *) rest=;; esac
    here=$here$part
    if [ -L "$here" ]; then kind=-; fi
    here=$here/
  done
  printf %s "$kind"
done
"""
"""Says of each path whether it is a file, a folder or nothing to be kept; a link on the way is the latter."""


class JudgeCrash(Exception):
    """A judge died: there is no verdict."""

    def __init__(self, why: str, result: CommandResult) -> None:
        super().__init__(why)
        self.result = result


@dataclass(slots=True)
class _Output:
    """What came of `run_own`, as data."""

    done: ExecResult
    streams: dict[Stream, bytearray]
    files: dict[str, bytes] = field(default_factory=dict)
    problem: str | None = None
    """Why there is nothing to judge: the agent's work did not come to an end, or left what cannot be taken."""

    def result(self, check: Check) -> CommandResult:
        return CommandResult(
            cmd=check.run,
            exit_code=self.done.exit_code,
            stdout=_text(self.streams["stdout"]),
            stderr=_text(self.streams["stderr"]),
            duration_s=self.done.duration_s,
            note=self.problem,
        )


def run_and_judge(
    case: VerificationCase, check: Check, folder: Path, report: Callable[[str], None] = lambda message: None
) -> tuple[CommandResult, str]:
    """Run both parts of a check; return what the judge did, with what `run_own` did in it, and the first sandbox's id.

    Where `run_own` died there is no judge: the result has its exit code.

    Args:
        folder: A folder of the host for archives.
        report: Is told when the first part is over.

    Raises:
        JudgeCrash: the judge died.
        SandboxError: a sandbox failed.
    """
    sandbox_id = ""
    try:
        with case.sandbox(with_work=True, seconds=2 * case.task.verify_timeout_s) as sandbox:
            sandbox_id = sandbox.sandbox_id
            output = _run_part(case, check, sandbox, folder)
    except SandboxGone as exc:
        case.cancel.check()
        if "memory" not in exc.reason:
            raise
        done = ExecResult(_KILLED, "", "", oom=True)
        output = _Output(done, _streams(), problem="ran out of memory with its sandbox")
    if output.problem is not None:
        ran = output.result(check)
        note = f"not judged: its run_own {output.problem}"
        return CommandResult(cmd=check.judge, exit_code=ran.exit_code or 1, run_own=ran, note=note), sandbox_id
    report(f"ran with exit code {output.done.exit_code}, judging")
    with case.sandbox(with_work=False, seconds=case.task.verify_timeout_s) as sandbox:
        return _judge_part(case, check, sandbox, output, folder), sandbox_id


def needed(check: Check, verify_files: Mapping[str, str], workdir: str) -> dict[str, str]:
    """Return the verifier's files that a check's `run_own` sees."""
    if check.needs is not None:
        patterns = Patterns(check.needs)
        return {path: text for path, text in verify_files.items() if patterns.cover(posixpath.normpath(path))}
    words = {posixpath.normpath(posixpath.join(workdir, word)) for word in _WORDS.findall(check.run)}
    return {path: text for path, text in verify_files.items() if posixpath.join(workdir, path) in words}


def _text(said: bytearray) -> str:
    return bytes(said[:MAX_OUTPUT]).decode("utf-8", "replace")


def _streams() -> dict[Stream, bytearray]:
    return {"stdout": bytearray(), "stderr": bytearray()}


def _run_part(case: VerificationCase, check: Check, sandbox: Sandbox, folder: Path) -> _Output:
    task = case.task
    lay_files_over(sandbox, needed(check, task.verify_files, sandbox.workdir))
    streams = _streams()

    def feed(stream: Stream, chunk: bytes) -> None:
        said = streams[stream]
        said += chunk[: MAX_STREAM - len(said)]

    done = sandbox.exec(
        check.run,
        envs=clean_environment(sandbox.home),
        cwd=sandbox.workdir,
        timeout=task.verify_timeout_s,
        on_output=feed,
        max_output=1024,
    )
    output = _Output(done, streams, problem=crash_of(done, task.verify_timeout_s))
    if output.problem is None and check.keep:
        sandbox.stop_processes()  # nothing writes while it is taken
        try:
            output.files = _kept(sandbox, check.keep, folder, min(MAX_KEPT, worktree_limit(task.limits)))
        except SandboxGone:
            raise
        except (SandboxTreeError, UnusableWorktree, OSError) as exc:
            output.problem = f"left what cannot be kept: {exc}"
    return output


def _kept(sandbox: Sandbox, keep: tuple[str, ...], folder: Path, left: int) -> dict[str, bytes]:
    """Take files out of a sandbox whose user nobody trusts: regular ones, by their paths, within a size."""
    found: dict[str, bytes] = {}
    for path, kind in zip(keep, run_own(sandbox, ["/bin/sh", "-c", _KINDS, "sh", sandbox.workdir, *keep]), strict=True):
        inside = posixpath.join(sandbox.workdir, path)
        taken: dict[str, bytes] = {}
        if kind == "f":
            taken = {path: sandbox.read_bytes(inside, max_bytes=left + 1)}
        elif kind == "d":
            archive = folder / "kept.tar"
            sandbox.pack(inside, archive, max_bytes=2 * left)
            taken = {f"{path}/{name}": content for name, content in files_of(archive, max_bytes=left).items()}
        left -= sum(map(len, taken.values()))
        if left < 0:
            raise SandboxTreeError(f"'{path}' is too large")
        found.update(taken)
    return found


def _judge_part(case: VerificationCase, check: Check, sandbox: Sandbox, output: _Output, folder: Path) -> CommandResult:
    task = case.task
    lay_files_over(sandbox, task.verify_files)
    place = posixpath.join(sandbox.home, OUTPUT)
    _lay_output(sandbox, output, place, folder / "output.tar")
    if "isolation" in case.backend.features:  # elsewhere somebody has to be able to remove the folder
        run_own(sandbox, ["chmod", "-R", "a-w", "--", place])
    envs = clean_environment(sandbox.home, {"OUTPUT": place})
    done = sandbox.exec(
        check.judge, envs=envs, cwd=sandbox.workdir, timeout=task.verify_timeout_s, max_output=MAX_OUTPUT
    )
    result = CommandResult(
        cmd=check.judge,
        exit_code=done.exit_code,
        stdout=done.stdout,
        stderr=done.stderr,
        duration_s=done.duration_s,
        run_own=output.result(check),
    )
    crash = crash_of(done, task.verify_timeout_s)
    if crash is not None:
        raise JudgeCrash(crash, result)
    score = None if task.reward_file is False else read_reward(sandbox)
    return result.model_copy(update={"score": score})


def _lay_output(sandbox: Sandbox, output: _Output, place: str, archive: Path) -> None:
    """Lay out what is judged: plain files that can be read, and neither written nor run_own."""
    given: dict[str, bytes] = {str(name): bytes(said) for name, said in output.streams.items()}
    given["exit_code"] = f"{output.done.exit_code}\n".encode()
    given |= {f"files/{name}": content for name, content in output.files.items()}
    with tarfile.open(archive, "w:", format=tarfile.PAX_FORMAT) as out:
        top = tarfile.TarInfo("files")
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        out.addfile(top)
        for name, content in given.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o444
            out.addfile(entry, io.BytesIO(content))
    run_own(sandbox, ["rm", "-rf", "--", place])
    sandbox.unpack(archive, place)
    archive.unlink()


@dataclass(slots=True)
class Verdict:
    """What the verifier found. `crash` says why there is no reward although there are checks."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    sandbox_id: str = ""
    ignored_reward_file: bool = False
    """A reward file was written, but the task does not say that it counts, or code of the agent may have written it."""


def verify(
    task: Task,
    backend: Sandboxes,
    *,
    worktree: Path | None,
    baseline: Path | None,
    home: str = HOME,
    cancel: Cancellation | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Verdict:
    """Run a task's checks over a work tree.

    Args:
        worktree: The merged work tree; None leaves the work folder as the setup made it.
        baseline: The home as the setup left it, or None.
        home: Where the home is inside.

    Raises:
        SandboxError: a sandbox of the verifier did not start. One that dies later is a `crash`.
    """
    verdict = Verdict()
    if not task.verify:
        return verdict
    case = VerificationCase(task, backend, worktree, baseline, home, cancel or Cancellation())
    try:
        with scratch() as folder, LineChecks(case, folder) as lines:
            _run_checks(case, lines, folder, verdict, report)
            verdict.sandbox_id = verdict.sandbox_id or lines.sandbox_id
            if verdict.crash is None:
                _decide(lines, verdict, reads_file=reads_reward_file(task, baseline))
    except NotStarted as exc:
        raise exc.error from exc
    except SandboxGone as exc:
        verdict.crash = f"the verifier's sandbox ended: {exc.reason}"
    except (SandboxError, OSError) as exc:
        verdict.crash = f"the verifier's sandbox failed: {exc}"
    case.cancel.check()
    return verdict


def reads_reward_file(task: Task, baseline: Path | None = None) -> bool:
    """Say whether a reward file counts for this task: when it says so, or it or what its setup left names the file."""
    if task.reward_file is not None:
        return task.reward_file
    texts = [*task.verify_texts(), *task.setup, *task.verify_files.values(), *task.files.values()]
    if any("reward.txt" in text for text in texts):
        return True
    return baseline is not None and _names_reward_file(baseline)


def _run_checks(
    case: VerificationCase, lines: LineChecks, folder: Path, verdict: Verdict, report: Callable[[str], None]
) -> None:
    checks = case.task.verify
    for number, check in enumerate(checks, 1):
        try:
            if isinstance(check, str):
                result = lines.run(check)
            else:
                said = partial(_said, report, f"check {number} of {len(checks)}: ")
                result, sandbox_id = run_and_judge(case, check, folder, said)
                verdict.sandbox_id = verdict.sandbox_id or sandbox_id
        except LineCrash as exc:
            verdict.results.append(exc.result)
            verdict.crash = f"verify line {number} {exc}"
            return
        except JudgeCrash as exc:
            verdict.results.append(exc.result)
            verdict.crash = f"the judge of check {number} {exc}"
            return
        verdict.results.append(result)
        why = "" if result.note is None else f" ({result.note})"
        report(f"check {number} of {len(checks)}: exit code {result.exit_code}{why}")


def _said(report: Callable[[str], None], start: str, message: str) -> None:
    report(start + message)


def _decide(lines: LineChecks, verdict: Verdict, *, reads_file: bool) -> None:
    given = lines.reward()
    if given is not None and reads_file and not lines.refused:
        verdict.reward = given
        return
    verdict.ignored_reward_file = given is not None
    scores = [float(one.exit_code == 0) if one.score is None else one.score for one in verdict.results]
    verdict.reward = sum(scores) / len(scores)


def _names_reward_file(archive: Path) -> bool:
    name, before = b"reward.txt", b""
    with archive.open("rb") as file:
        while chunk := file.read(1024 * 1024):
            if name in before + chunk:
                return True
            before = chunk[-len(name) :]
    return False
