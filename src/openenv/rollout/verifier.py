"""Verification: every check of a task in fresh sandboxes that the agent never touched, and the reward they earn.

Knows sandboxes, archives, tasks and the two kinds of checks. Must not know agents, models or stores, so that a stored
work tree can be verified again.
"""

# What the agent can reach, and what it cannot:
#
#   agent's sandbox (closed before the verifier starts)
#        |
#        |  worktree.tar, made by the sandbox's own tar; the host reads it and never unpacks it
#        v
#   merged.tar = the agent's files, minus what `worktree.merge` removes (protected patterns, modules that shadow
#        |       Python's, links to the verifier's files), plus the protected files as the setup left them
#        v
#   a verify LINE ("pytest -q")                     a CHECK in two parts
#   +-------------------------------------+         +-----------------------+       +---------------------------+
#   | baseline.tar, merged.tar,           |         | `run`: baseline.tar,  | data  | `judge`: baseline.tar, all|
#   | verify_files, one after the other   |         | merged.tar, the files | ----> | verify_files, and $OUTPUT |
#   | The agent's code runs in the same   |         | that `run` names      |       | (read-only, no code)      |
#   | process tree as the check.          |         +-----------------------+       | The agent's code is not   |
#   +-------------------------------------+           gone before `judge` starts    | here at all.              |
#                                                                                   +---------------------------+
#
# The agent's code can still do harm where it runs beside a check, so an exit code of 0 counts only if
#   - the line proved that it came to its own end (`proof.py`): `os._exit(0)` in the agent's module does not pass;
#   - the verifier's scripts have the same content as before it ran.
# A line that dies (timeout, signal, memory) is run once more on what the setup left. If it ends there, the agent's work
# killed it and the check fails; if it dies there too, the check is broken and there is no verdict (`grader_failed`).

from __future__ import annotations

import hashlib
import math
import mmap
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError
from openenv.rollout.live_check import LiveRun
from openenv.rollout.outcome import CommandResult
from openenv.rollout.progress import Cancellation
from openenv.rollout.proof import Evidence, Proof, could_not_load, proves_itself, runs_pytest, with_wrapper
from openenv.rollout.scratch import scratch
from openenv.rollout.task import Check, Task
from openenv.rollout.trust import Trust, trust_of, weakest
from openenv.rollout.worktree import Patterns, UnusableWorktree, files_of, worktree_limit, write_archive
from openenv.sandboxes.base import HOME, ExecResult, Sandbox, Sandboxes, SandboxSpec, Stream

REWARD_FILE = "logs/verifier/reward.txt"
"""Below the home of a verifier's sandbox."""
OUTPUT = "logs/output"
"""Below the home of a judge's sandbox: the folder that `$OUTPUT` names."""
MAX_OUTPUT = 256 * 1024
MAX_STREAM = 16 * 1024 * 1024
"""So much of what `run` prints on either stream reaches the judge."""
MAX_KEPT = 64 * 1024 * 1024
_SLACK_S = 120.0
_KILLED = 137
_REFUSED = 1
"""The exit code of a line that exited with 0 and does not count."""
_OUT_OF_MEMORY = "ran out of memory with its sandbox"
_SCRIPTS = frozenset({".py", ".sh", ".bash", ".js", ".mjs", ".cjs", ".ts", ".rb", ".pl", ".ini", ".cfg", ".toml", ""})
_ESCAPED = frozenset("\\\n\r")
"""Characters that sha256sum does not print as they are."""
_WORDS = re.compile(r"[^\s'\"<>|;&()=,`]+")

_CLEAR = """
while [ "$1" != -- ]; do
  if [ -L "$1" ] || { [ -e "$1" ] && [ ! -d "$1" ]; }; then rm -f -- "$1" || exit 1; fi
  shift
done
shift
for file in "$@"; do rm -rf -- "$file" || exit 1; done
"""
"""Removes links and odd files among the folders before `--`, and whatever is at the paths after it."""
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
"""Prints for each path `f` for a file, `d` for a folder, `-` for nothing to keep; a link on the way is the latter."""


@dataclass(slots=True)
class Verdict:
    """What the checks came to. `crash` is the reason why there is no reward although there are checks."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    sandbox_id: str = ""
    trust: Trust | None = None
    """How far the reward can be trusted: as far as the weakest check."""
    ignored_reward_file: bool = False
    """A reward file was written, but the task does not count it, or the agent's code may have written it."""


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
    if not task.verify:
        return Verdict()
    trusts = _trusts(task, backend)
    verdict = Verdict(trust=weakest(trusts))
    try:
        with scratch() as folder:
            case = VerificationCase(task, backend, worktree, baseline, folder, home, cancel or Cancellation())
            with LineChecks(case) as lines:
                _run_checks(case, lines, verdict, report, trusts)
                if verdict.crash is None:
                    _set_reward(verdict, lines, reads_file=reads_reward_file(task, baseline))
    except _NotStarted as exc:
        raise exc.error from exc
    except SandboxGone as exc:
        verdict.crash = f"the verifier's sandbox ended: {exc.reason}"
    except (SandboxError, OSError) as exc:
        verdict.crash = f"the verifier's sandbox failed: {exc}"
    if cancel is not None:
        cancel.check()
    return verdict


def _trusts(task: Task, backend: Sandboxes) -> list[Trust]:
    """Return the trust of each check; without isolation, code of the agent may still run beside all of them."""
    if "isolation" not in backend.features:
        return ["shared"] * len(task.verify)
    return [trust_of(check, task)[0] for check in task.verify]


def _run_checks(
    case: VerificationCase,
    lines: LineChecks,
    verdict: Verdict,
    report: Callable[[str], None],
    trusts: list[Trust],
) -> None:
    checks = case.task.verify
    for number, check in enumerate(checks, 1):
        label = f"check {number} of {len(checks)}: "
        try:
            result = lines.run(check) if isinstance(check, str) else _run_and_judge(case, check, report, label)
        except _CheckCrash as exc:
            what = f"verify line {number}" if isinstance(check, str) else f"the judge of check {number}"
            result, verdict.crash = exc.result, f"{what} {exc}"
        verdict.sandbox_id = case.first_sandbox_id
        verdict.results.append(result.model_copy(update={"trust": trusts[number - 1]}))
        if verdict.crash is not None:
            return
        why = "" if result.note is None else f" ({result.note})"
        report(f"{label}exit code {result.exit_code}{why}")


def _set_reward(verdict: Verdict, lines: LineChecks, *, reads_file: bool) -> None:
    written = lines.reward()
    if written is not None and reads_file and not lines.refused:
        verdict.reward = written
        return
    verdict.ignored_reward_file = written is not None
    scores = [float(result.exit_code == 0) if result.score is None else result.score for result in verdict.results]
    verdict.reward = sum(scores) / len(scores)


def reads_reward_file(task: Task, baseline: Path | None = None) -> bool:
    """Return whether a reward file counts: the task says so, or the task or what its setup left names the file."""
    if task.reward_file is not None:
        return task.reward_file
    texts = [*task.verify_texts(), *task.setup, *task.verify_files.values(), *task.files.values()]
    if any("reward.txt" in text for text in texts):
        return True
    return baseline is not None and _contains(baseline, b"reward.txt")


def _contains(archive: Path, name: bytes) -> bool:
    if not archive.stat().st_size:  # nothing that could be mapped
        return False
    with archive.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0


class _NotStarted(Exception):
    """A sandbox did not start. Not a `SandboxError` itself, which during a check means that the check crashed."""

    def __init__(self, error: SandboxError) -> None:
        super().__init__(str(error))
        self.error = error


class _CheckCrash(Exception):
    """A line or a judge died, and not because of the agent's work: there is no verdict."""

    def __init__(self, why: str, result: CommandResult) -> None:
        super().__init__(why)
        self.result = result


# ---- sandboxes of the verifier, and commands in them ----


@dataclass(slots=True)
class VerificationCase:
    """What is verified, and the fresh sandboxes in which that is done."""

    task: Task
    backend: Sandboxes
    worktree: Path | None
    baseline: Path | None
    folder: Path
    """A folder of the host for archives."""
    home: str
    cancel: Cancellation
    first_sandbox_id: str = ""

    @contextmanager
    def sandbox(self, *, with_work: bool, seconds: float) -> Iterator[Sandbox]:
        """Start a fresh sandbox that holds what the setup left and, `with_work`, what the agent made of it.

        Raises:
            _NotStarted: the sandbox did not start.
            SandboxError: its files could not be laid out.
        """
        self.cancel.check()
        spec = SandboxSpec(limits=self.task.limits, timeout_s=seconds + _SLACK_S, home=self.home)
        try:
            opened = self.backend.open(spec)
        except SandboxError as exc:
            self.cancel.check()
            raise _NotStarted(exc) from exc
        with opened as sandbox, self.cancel.on_cancel(sandbox.kill):
            self.first_sandbox_id = self.first_sandbox_id or sandbox.sandbox_id
            self._prepare(sandbox, self.worktree if with_work else None)
            yield sandbox

    def _prepare(self, sandbox: Sandbox, worktree: Path | None) -> None:
        if self.baseline is not None:
            sandbox.unpack(self.baseline, sandbox.home)
        if worktree is not None:
            if self.baseline is not None:
                # The setup may have taken rights on a folder away; files that the agent deleted must be gone.
                closed = ["-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
                _run_own(sandbox, ["find", sandbox.workdir, *closed])
                _run_own(sandbox, ["find", sandbox.workdir, "-mindepth", "1", "-delete"])
            sandbox.unpack(worktree, sandbox.workdir)
        outside = {path: text for path, text in self.task.files.items() if _is_outside(path, sandbox.home)}
        lay_files(sandbox, outside)  # the baseline has only the home
        rewards = posixpath.join(sandbox.home, posixpath.dirname(REWARD_FILE))
        _run_own(sandbox, ["/bin/sh", "-c", 'rm -rf -- "$1" && mkdir -p -- "$1"', "sh", rewards])


@dataclass(frozen=True, slots=True)
class LineRun:
    """What a shell line did."""

    result: CommandResult
    crash: str | None = None
    """Why the line came to no result of its own, or None when it did."""
    timed_out: bool = False
    evidence: Evidence | None = None
    """What a line that has to prove its end proved."""


def run_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str] | None = None, cmd: str | None = None
) -> LineRun:
    """Run a shell line in the work folder; `cmd` is what the result shows in its place."""
    done = sandbox.exec(line, envs=envs, cwd=sandbox.workdir, timeout=timeout, max_output=MAX_OUTPUT)
    result = CommandResult(
        cmd=cmd or line, exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, duration_s=done.duration_s
    )
    return LineRun(result, _crash(done, timeout), done.timed_out)


def lay_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files, relative paths below the work folder."""
    for path, text in files.items():
        sandbox.write_text(posixpath.join(sandbox.workdir, path), text)


def _lay_files_over(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files over a tree that cannot be trusted: links and odd files in the way are removed first."""
    targets = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in files]
    if not targets:
        return
    below = f"{sandbox.workdir}/"
    parents: set[str] = set()
    for path in targets:
        while (path := posixpath.dirname(path)).startswith(below):
            parents.add(path)
    done = sandbox.exec(["/bin/sh", "-c", _CLEAR, "sh", *sorted(parents), "--", *targets], cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"The verifier's files could not be laid out: {done.stderr.strip()}")
    lay_files(sandbox, files)


def clean_environment(home: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of verify lines: nothing in it points into the work tree.

    PATH is the sandbox's own, as it was for the setup and the agent: the checks run on the same Python.
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


def _crash(done: ExecResult, timeout: float) -> str | None:
    if done.timed_out:
        return f"did not end within {timeout:g} s"
    if 128 < done.exit_code <= 192:
        return f"was ended by signal {done.exit_code - 128}"
    return None


def _read_reward(sandbox: Sandbox) -> float | None:
    """Return the number in a sandbox's reward file, or None where there is none."""
    try:
        reward = float(sandbox.read_bytes(posixpath.join(sandbox.home, REWARD_FILE), max_bytes=1024))
    except SandboxGone:
        raise
    except (SandboxError, OSError, ValueError):  # nothing there, or no file, or no number
        return None
    return reward if math.isfinite(reward) else None


def _run_own(sandbox: Sandbox, argv: list[str]) -> str:
    """Run a command of the verifier's own; return what it printed.

    Raises:
        SandboxError: it failed.
    """
    done = sandbox.exec(argv, cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"'{argv[0]}' failed in the verifier's sandbox: {done.stderr.strip()}")
    return done.stdout


def _is_outside(path: str, home: str) -> bool:
    return path.startswith("/") and not posixpath.normpath(path).startswith(f"{home}/")


# ---- verify lines ----


class LineChecks:
    """Runs the verify lines of a case. A context manager: they share a sandbox, which is started with the first."""

    def __init__(self, case: VerificationCase) -> None:
        self._case = case
        self._stack = ExitStack()
        self._sandbox: Sandbox | None = None
        self.refused = False
        """Whether a line was refused or killed: the agent's code may have written the reward file then."""

    def __enter__(self) -> LineChecks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def run(self, line: str) -> CommandResult:
        """Run a line and return its result; the exit code is 0 only where the check is passed.

        Raises:
            _CheckCrash: it died, as it does on what the setup left.
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
            self._close()
            attempt = LineRun(CommandResult(cmd=line, exit_code=_KILLED), _OUT_OF_MEMORY)
        if attempt.crash is not None:
            return self._killed(line, attempt.result, attempt.crash)
        return attempt.result

    def reward(self) -> float | None:
        """Return what a line wrote as the reward, or None."""
        return None if self._sandbox is None else _read_reward(self._sandbox)

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            task = self._case.task
            seconds = 4 * len(task.verify) * task.verify_timeout_s
            self._sandbox = self._stack.enter_context(self._case.sandbox(with_work=True, seconds=seconds))
        return self._sandbox

    def _close(self) -> None:
        self._stack.close()
        self._sandbox = None

    def _must_prove(self, line: str) -> bool:
        task = self._case.task
        if task.proof is not None:
            return task.proof
        if runs_pytest(line) or with_wrapper(line, task.verify_files) != line:
            return True
        named = (text for path, text in task.verify_files.items() if posixpath.basename(path) in line)
        return any(proves_itself(text) for text in (line, *named))

    def _attempt(self, sandbox: Sandbox, line: str, *, proves: bool) -> LineRun:
        task = self._case.task
        _lay_files_over(sandbox, task.verify_files)  # again for each line: the one before ran the agent's code
        if proves:
            proof = Proof(line, sandbox.home, sandbox.workdir, task.verify_files)
            proof.lay(sandbox, self._case.folder / "proof.tar")
            envs = clean_environment(sandbox.home, proof.environment())
            attempt = run_line(sandbox, proof.command(), timeout=task.verify_timeout_s, envs=envs, cmd=line)
            attempt = replace(attempt, evidence=proof.read(sandbox))
        else:
            attempt = run_line(sandbox, line, timeout=task.verify_timeout_s, envs=clean_environment(sandbox.home))
        if attempt.crash is None and attempt.result.exit_code == 0:
            changed = _changed(sandbox, task.verify_files)
            if changed is not None:
                attempt = replace(attempt, result=self._refuse(attempt.result, f"{changed} was changed while it ran"))
        return attempt

    def _proven(self, sandbox: Sandbox, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line that exits with 0 and does not prove its end, unless it cannot prove anything."""
        evidence, result = attempt.evidence, attempt.result
        if evidence is None or evidence.problem is None:
            return attempt
        unloaded = result.exit_code != 0 and could_not_load(result.stdout + result.stderr)
        if self._case.task.proof is None and not evidence.seen and (result.exit_code == 0 or unloaded):
            control = self._control(line, proves=True)
            if control.evidence is None or not control.evidence.seen:  # the line hides its pytest in any case
                return self._attempt(sandbox, line, proves=False) if unloaded else attempt
        if result.exit_code != 0:
            return attempt
        return LineRun(self._refuse(result, evidence.problem))

    def _refuse(self, result: CommandResult, why: str) -> CommandResult:
        self.refused = True
        return result.model_copy(update={"exit_code": _REFUSED, "note": f"exited with 0, but {why}"})

    def _killed(self, line: str, result: CommandResult, crash: str) -> CommandResult:
        if self._control(line, proves=False).crash is not None:
            raise _CheckCrash(crash, result)
        self.refused = True
        note = f"{crash}; on what the setup left it ends by itself, so the agent's work is what killed it"
        return result.model_copy(update={"exit_code": result.exit_code or _REFUSED, "note": note})

    def _control(self, line: str, *, proves: bool) -> LineRun:
        """Run a line where the agent has done nothing."""
        task = self._case.task
        try:
            with self._case.sandbox(with_work=False, seconds=2 * task.verify_timeout_s) as sandbox:
                return self._attempt(sandbox, line, proves=proves)
        except SandboxGone as exc:
            self._case.cancel.check()
            return LineRun(CommandResult(cmd=line, exit_code=_KILLED), f"lost its sandbox: {exc.reason}")


def _changed(sandbox: Sandbox, files: Mapping[str, str]) -> str | None:
    """Return one of the verifier's scripts that is not as it was laid out, or None."""
    expected = {
        posixpath.normpath(posixpath.join(sandbox.workdir, path)): hashlib.sha256(text.encode()).hexdigest()
        for path, text in files.items()
        if (posixpath.splitext(path)[1] in _SCRIPTS or text.startswith("#!")) and not _ESCAPED & set(path)
    }
    if not expected:
        return None
    done = sandbox.exec(["sha256sum", "--", *expected], cwd="/", timeout=60)
    if done.exit_code == 127:  # no such program: one by one
        actual = {path: _digest(sandbox, path) for path in expected}
    else:
        actual = {line[66:]: line[:64] for line in done.stdout.splitlines()}
    return next((path for path, digest in expected.items() if actual.get(path) != digest), None)


def _digest(sandbox: Sandbox, path: str) -> str:
    try:
        return hashlib.sha256(sandbox.read_bytes(path)).hexdigest()
    except OSError:
        return ""


# ---- checks in two parts ----


@dataclass(slots=True)
class _RunOutput:
    """What came of a check's `run`, as data."""

    exit_code: int = _KILLED
    duration_s: float = 0.0
    streams: dict[Stream, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    files: dict[str, bytes] = field(default_factory=dict)
    problem: str | None = None
    """Why there is nothing to judge: the agent's work did not come to an end, or left what cannot be taken."""

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


def _run_and_judge(case: VerificationCase, check: Check, report: Callable[[str], None], label: str) -> CommandResult:
    """Run both parts of a check; return what the judge did, with what `run` did in it.

    Where `run` died there is no judge: the result has its exit code.

    Raises:
        _CheckCrash: the judge died.
        SandboxError: a sandbox failed.
    """
    if check.port is not None:
        return _run_live(case, check, check.port)
    try:
        with case.sandbox(with_work=True, seconds=2 * case.task.verify_timeout_s) as sandbox:
            output = _run_part(case, check, sandbox)
    except SandboxGone as exc:
        case.cancel.check()
        if "memory" not in exc.reason:
            raise
        output = _RunOutput(problem=_OUT_OF_MEMORY)
    ran = output.result(check)
    if output.problem is not None:
        note = f"not judged: its run {output.problem}"
        return CommandResult(cmd=check.judge, exit_code=ran.exit_code or 1, run=ran, note=note)
    report(f"{label}ran with exit code {output.exit_code}, judging")
    with case.sandbox(with_work=False, seconds=case.task.verify_timeout_s) as sandbox:
        return _judge_part(case, check, sandbox, output, ran)


def _run_live(case: VerificationCase, check: Check, port: int) -> CommandResult:
    """Run both parts of a check at once. A judge that dies is run again over what the setup left, as a line is."""
    judged = _live_attempt(case, check, port, with_work=True)
    if judged.crash is None:
        return judged.result
    if _live_attempt(case, check, port, with_work=False).crash is not None:
        raise _CheckCrash(judged.crash, judged.result)
    note = (
        f"its judge {judged.crash}; with what the setup left it ends by itself, so the agent's work is what killed it"
    )
    return judged.result.model_copy(update={"exit_code": judged.result.exit_code or _REFUSED, "note": note})


def _live_attempt(case: VerificationCase, check: Check, port: int, *, with_work: bool) -> LineRun:
    task = case.task
    seconds = task.verify_timeout_s
    with (
        case.sandbox(with_work=with_work, seconds=2 * seconds) as running,
        case.sandbox(with_work=False, seconds=2 * seconds) as judging,
    ):
        _lay_files_over(running, needed(check, task.verify_files, running.workdir))
        _lay_files_over(judging, {**task.verify_files, **check.files})
        with LiveRun(
            running,
            judging,
            line=check.run,
            port=port,
            folder=case.folder,
            envs=clean_environment(running.home),
            seconds=seconds,
            isolated="isolation" in case.backend.features,
        ) as live:
            judged = run_line(judging, check.judge, timeout=seconds, envs=live.judge_environment)
            result = judged.result.model_copy(update={"run": live.result()})
        if judged.crash is None and task.reward_file is not False:
            result = result.model_copy(update={"score": _read_reward(judging)})
        return replace(judged, result=result)


def needed(check: Check, verify_files: Mapping[str, str], workdir: str) -> dict[str, str]:
    """Return the verifier's files that a check's `run` sees."""
    verify_files = {**verify_files, **check.files}
    if check.needs is not None:
        patterns = Patterns(check.needs)
        return {path: text for path, text in verify_files.items() if patterns.cover(posixpath.normpath(path))}
    words = {posixpath.normpath(posixpath.join(workdir, word)) for word in _WORDS.findall(check.run)}
    return {path: text for path, text in verify_files.items() if posixpath.join(workdir, path) in words}


def _run_part(case: VerificationCase, check: Check, sandbox: Sandbox) -> _RunOutput:
    task, output = case.task, _RunOutput()
    _lay_files_over(sandbox, needed(check, task.verify_files, sandbox.workdir))
    done = sandbox.exec(
        check.run,
        envs=clean_environment(sandbox.home),
        cwd=sandbox.workdir,
        timeout=task.verify_timeout_s,
        on_output=output.feed,
        max_output=1024,
    )
    output.exit_code, output.duration_s = done.exit_code, done.duration_s
    output.problem = _crash(done, task.verify_timeout_s)
    if output.problem is None and check.keep:
        sandbox.stop_processes()  # nothing may write while files are taken
        try:
            output.files = _kept(sandbox, check.keep, case.folder, min(MAX_KEPT, worktree_limit(task.limits)))
        except SandboxGone:
            raise
        except (SandboxTreeError, UnusableWorktree, OSError) as exc:
            output.problem = f"left what cannot be kept: {exc}"
    return output


def _kept(sandbox: Sandbox, keep: tuple[str, ...], folder: Path, room: int) -> dict[str, bytes]:
    """Take files out of a sandbox that cannot be trusted: regular ones, by their paths, within a size."""
    kept: dict[str, bytes] = {}
    kinds = _run_own(sandbox, ["/bin/sh", "-c", _KINDS, "sh", sandbox.workdir, *keep])
    for path, kind in zip(keep, kinds, strict=True):
        inside = posixpath.join(sandbox.workdir, path)
        files: dict[str, bytes] = {}
        if kind == "f":
            files = {path: sandbox.read_bytes(inside, max_bytes=room + 1)}
        elif kind == "d":
            archive = folder / "kept.tar"
            sandbox.pack(inside, archive, max_bytes=2 * room)
            files = {f"{path}/{name}": content for name, content in files_of(archive, max_bytes=room).items()}
        room -= sum(map(len, files.values()))
        if room < 0:
            raise SandboxTreeError(f"'{path}' is too large")
        kept.update(files)
    return kept


def _judge_part(
    case: VerificationCase, check: Check, sandbox: Sandbox, output: _RunOutput, ran: CommandResult
) -> CommandResult:
    task = case.task
    _lay_files_over(sandbox, {**task.verify_files, **check.files})
    place = posixpath.join(sandbox.home, OUTPUT)
    _lay_output(sandbox, output, place, case.folder / "output.tar")
    if "isolation" in case.backend.features:  # without isolation the backend must be able to remove the folder later
        _run_own(sandbox, ["chmod", "-R", "a-w", "--", place])
    envs = clean_environment(sandbox.home, {"OUTPUT": place})
    judged = run_line(sandbox, check.judge, timeout=task.verify_timeout_s, envs=envs)
    result = judged.result.model_copy(update={"run": ran})
    if judged.crash is not None:
        raise _CheckCrash(judged.crash, result)
    return result.model_copy(update={"score": None if task.reward_file is False else _read_reward(sandbox)})


def _lay_output(sandbox: Sandbox, output: _RunOutput, place: str, archive: Path) -> None:
    """Lay out what is judged as plain files that can be read, and neither written nor run."""
    contents: dict[str, bytes] = {str(name): bytes(received) for name, received in output.streams.items()}
    contents["exit_code"] = f"{output.exit_code}\n".encode()
    contents |= {f"files/{name}": content for name, content in output.files.items()}
    write_archive(archive, contents, mode=0o444, folder="files")
    _run_own(sandbox, ["rm", "-rf", "--", place])
    sandbox.unpack(archive, place)
    archive.unlink()
