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
#   merged.tar = the agent's files, with everything that could steer a check as the setup left it (`worktree.merge`)
#        |
#        v
#   a verify LINE ("pytest -q"), each in a         a CHECK in two parts
#   sandbox of its own (see `begin`)               +-----------------------+       +---------------------------+
#   +-------------------------------------+        | `run`: what the setup | data  | `judge`: what the setup   |
#   | what the setup left, merged.tar,    |        | left, merged.tar, the | ----> | left, all verify_files,   |
#   | verify_files; Python starts in the  |        | files that `run`      |       | and $OUTPUT (read-only)   |
#   | verifier's own place (`inside`).    |        | names                 |       | The agent's code is not   |
#   | The agent's code runs in the same   |        +-----------------------+       | here at all.              |
#   | process tree as the check.          |          gone before `judge` starts    +---------------------------+
#   +-------------------------------------+
#
# The agent's code can still do harm where it runs beside a check, so an exit code of 0 counts only if
#   - the line proved that it came to its own end (`proof.py`): `os._exit(0)` in the agent's module does not pass;
#   - the verifier's files are as before it ran: their content, and also inode and date of the last change, which show
#     what was put back; a line that changes its own files without the agent's work as well is excused.
#
# Whatever goes wrong with the agent's work in the sandbox is the agent's: a line that is killed, a sandbox that dies, a
# tree that does not fit. Unless it goes wrong without that work as well, on what the setup left (and, where the task
# has one, on the solution): then the check is broken, and there is no verdict (`grader_failed`).

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError
from openenv.rollout.cancellation import Cancellation
from openenv.rollout.scratch import scratch
from openenv.rollout.store.archives import UnusableWorktree, files_of, unpack_home, worktree_limit, write_archive
from openenv.rollout.tasks.commands import (
    MAX_OUTPUT,
    CommandResult,
    CommandRun,
    crash_of,
    lay_files,
    lay_outer_files,
    run_line,
    sandbox_spec,
)
from openenv.rollout.tasks.task import Check, Task, as_texts
from openenv.rollout.tasks.trust_levels import Trust, weakest
from openenv.rollout.verify.inside import OUTPUT, VerifierPlace
from openenv.rollout.verify.live_check import LiveRun
from openenv.rollout.verify.lookups import Texts, ancestors
from openenv.rollout.verify.proof import Evidence, Proof, could_not_load, proves_itself, runs_pytest, with_wrapper
from openenv.rollout.verify.trust import only_reads, trust_of
from openenv.rollout.verify.worktree import Merged, Patterns, merge, write_home
from openenv.sandboxes.base import HOME, Sandbox, Sandboxes, Stream

logger = logging.getLogger(__name__)

MAX_STREAM = 16 * 1024 * 1024
"""So much of what `run` prints on either stream reaches the judge."""
MAX_KEPT = 64 * 1024 * 1024
_SLACK_S = 300.0
_REWARD_BYTES = 64 * 1024
_KILLED = 137
_REFUSED = 1
"""The exit code of a line that exited with 0 and does not count."""
_OUT_OF_MEMORY = "ran out of memory with its sandbox"
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


_IS_PLAIN = """
cd -- "$1" || exit 1
path=$2
if [ ! -f "$path" ] || [ ! -w "$path" ]; then exit 1; fi
while [ "$path" != . ]; do
  if [ -L "$path" ]; then exit 1; fi
  path=$(dirname -- "$path")
done
"""
"""Returns whether a file below a folder can be written, and is not behind a link."""
_PROCESSES = "cat /proc/[0-9]*/stat 2> /dev/null; echo $$"
_STATES = """
stat -c '%i %z %F %n' -- "$@" 2> /dev/null
echo --
count=$#
for path do
  if [ -f "$path" ] && [ ! -L "$path" ]; then set -- "$@" "$path"; fi
done
shift "$count"
[ $# = 0 ] || exec sha256sum -- "$@"
"""
"""Prints inode, date of the last change, kind and name of each path, and below a line `--` the hashes of files."""

Source = Literal["work", "setup", "solved"]
"""What a check runs over: the agent's work, what the setup left, or that with the task's solution."""


@dataclass(slots=True)
class Verdict:
    """What the checks came to. `crash` is the reason why there is no reward although there are checks."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    sandbox_id: str = ""
    trust: Trust | None = None
    """How far the reward can be trusted: as far as the weakest check."""
    rewards: dict[str, float] = field(default_factory=dict)
    """All numbers of the reward file that counts, by their names."""
    ignored_reward_file: bool = False
    """A reward file was written, but the task does not count it, or the agent's code may have written it."""


def merge_for(task: Task, work: Path, baseline: Path | None, target: Path, *, root: str, max_bytes: int) -> Merged:
    """Write an agent's work tree as the verifier of a task is to see it; see `worktree.merge`.

    Raises:
        UnusableWorktree: it is no archive, or larger than `max_bytes`.
    """
    files = dict(task.verify_sources)
    for check in task.verify:
        files |= {} if isinstance(check, str) else check.files
    return merge(
        work,
        baseline,
        target,
        protected=task.protected,
        verify_files=files,
        named=task.texts(),
        checks=(*task.verify_texts(), *files.values()),
        asked=(task.instruction, *task.solution, *as_texts(task.solution_files).values()),
        root=root,
        max_bytes=max_bytes,
    )


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
        worktree: The work tree as `merge_for` wrote it; None leaves the work folder as the setup made it.
        baseline: The home as the setup left it, or None.
        home: Where the home is inside.

    Raises:
        SandboxError: a sandbox of the verifier did not start. One that dies later is a `crash`, or the agent's doing.
    """
    if not task.verify:
        return Verdict()
    trusts = _trusts(task, backend)
    verdict = Verdict(trust=weakest(trusts))
    try:
        with scratch() as folder, VerificationCase(task, backend, worktree, baseline, folder, home, cancel) as case:
            lines = LineChecks(case, reads_file=reads_reward_file(task, baseline))
            _run_checks(case, lines, verdict, report, trusts)
            if verdict.crash is None:
                _set_reward(verdict, lines)
    except _NotStarted as exc:
        raise exc.error from exc
    except (SandboxError, OSError) as exc:
        verdict.crash = f"the verifier failed: {exc}"
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
    judged = JudgedChecks(case)
    for number, check in enumerate(checks, 1):
        label = f"check {number} of {len(checks)}: "
        case.begin(check, None if number == len(checks) else checks[number])
        try:
            if isinstance(check, str):
                result = lines.run(check, trusts[number - 1])
            else:
                result = judged.run(check, report, label)
        except _CheckCrash as exc:
            what = f"verify line {number}" if isinstance(check, str) else f"{exc.part} of check {number}"
            result, verdict.crash = exc.result, f"{what} {exc}"
        verdict.sandbox_id = case.first_sandbox_id
        verdict.results.append(result.model_copy(update={"trust": trusts[number - 1]}))
        if verdict.crash is not None:
            return
        why = "" if result.note is None else f" ({result.note})"
        report(f"{label}exit code {result.exit_code}{why}")


def _set_reward(verdict: Verdict, lines: LineChecks) -> None:
    scores = [float(result.exit_code == 0) if result.score is None else result.score for result in verdict.results]
    share = sum(scores) / len(scores)
    written = lines.reward(share)
    verdict.reward = share if written is None else written
    verdict.rewards = dict(lines.written) if written is not None else {}
    verdict.ignored_reward_file = lines.ignored_file


def reads_reward_file(task: Task, baseline: Path | None = None) -> bool:
    """Return whether a reward file counts: the task says so, or the task or what its setup left names the file."""
    if task.reward_file is not None:
        return task.reward_file
    texts = [*task.verify_texts(), *task.setup, *task.verify_sources.values(), *as_texts(task.files).values()]
    if any("reward.txt" in text for text in texts):
        return True
    return baseline is not None and _contains(baseline, b"reward.txt")


def _contains(archive: Path, name: bytes) -> bool:
    if not archive.stat().st_size:  # nothing that could be mapped
        return False
    with archive.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0


class _NotStarted(Exception):
    """A sandbox did not start. Not a `SandboxError` itself, which during a check is the agent's doing."""

    def __init__(self, error: SandboxError) -> None:
        super().__init__(str(error))
        self.error = error


class _CheckCrash(Exception):
    """A line, or a part of a check, dies without the agent's work too: there is no verdict."""

    def __init__(self, why: str, result: CommandResult, *, part: str = "the judge") -> None:
        super().__init__(why)
        self.result = result
        self.part = part


# ---- sandboxes of the verifier, and commands in them ----


@dataclass(frozen=True, slots=True)
class _Need:
    """Which sandbox a part of a check needs: over what it runs, and which of the verifier's files it sees."""

    source: Source
    files: frozenset[tuple[str, str]]
    """Their absolute paths, and their texts."""
    is_guarded: bool = False
    """Whether Python in it starts in the verifier's place."""


@dataclass(slots=True)
class _Ready:
    """A sandbox that is laid out, and what frees it."""

    sandbox: Sandbox
    stack: ExitStack
    processes: set[tuple[int, int]]
    """The processes in it before a check runs there."""
    is_unchanged: bool = False
    """Whether all that ran in it came to its end, and changed nothing that is known."""


class VerificationCase:
    """What is verified, and the fresh sandboxes in which that is done. A context manager.

    While one sandbox is in use, a thread prepares the next that the checks need; there are never more than two.
    """

    def __init__(
        self,
        task: Task,
        backend: Sandboxes,
        worktree: Path | None,
        baseline: Path | None,
        folder: Path,
        home: str,
        cancel: Cancellation | None,
    ) -> None:
        self.task, self.backend, self.folder = task, backend, folder
        self.cancel = cancel or Cancellation()
        self.counts_processes = False
        """Whether to count the processes in a sandbox before a line runs there."""
        self.first_sandbox_id = ""
        self._later: list[_Need] = []
        self._kept: _Need | None = None
        self._lock = threading.Lock()
        self._has_mounted = False
        self._worktree, self._baseline, self._home = worktree, baseline, home
        self._root = task.workdir or f"{home}/workdir"
        self._archives: dict[_Need, Path] = {}
        self._place: VerifierPlace | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="openenv-verify")
        self._next: tuple[_Need, Future[_Ready]] | None = None

    def __enter__(self) -> VerificationCase:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._drop_next()
        self._pool.shutdown()

    def need(self, check: str | Check, source: Source = "work") -> _Need:
        """Return the first sandbox that a check needs."""
        if isinstance(check, str):
            return _Need(source, self._absolute(self.task.verify_sources), is_guarded=True)
        return _Need(source, self._absolute(needed(check, self.task.verify_sources, self._root)))

    def judges_need(self, check: Check) -> _Need:
        """Return the sandbox that a judge needs."""
        # Guarded, because a judge may enter the folder of the agent's output.
        return _Need("setup", self._absolute({**self.task.verify_sources, **check.files}), is_guarded=True)

    def _absolute(self, files: Mapping[str, str]) -> frozenset[tuple[str, str]]:
        return frozenset((posixpath.normpath(posixpath.join(self._root, path)), text) for path, text in files.items())

    def begin(self, check: str | Check, following: str | Check | None) -> None:
        """Plan the sandboxes of a check, and of the one after it.

        A line that only reads leaves its sandbox as it was, so it is kept for a line that follows: to start another
        takes ten times as long as `grep`.
        """
        self._later, self._kept = [], None
        if isinstance(check, str) and isinstance(following, str) and only_reads(check, self.task):
            self._kept = self.need(check)
        elif isinstance(check, str) or check.port is None:  # a check with a port uses two at the same time
            self._later += [] if isinstance(check, str) else [self.judges_need(check)]
            self._later += [] if following is None else [self.need(following)]
        if self._next is not None and self._next[0] != self.need(check):
            self._drop_next()

    @contextmanager
    def use(self, need: _Need) -> Iterator[_Ready]:
        """Take a fresh sandbox, and let the next one be prepared meanwhile.

        Raises:
            _NotStarted: the sandbox did not start.
            SandboxError, OSError: its files could not be laid out.
        """
        self.cancel.check()
        if self._next is not None and self._next[0] == need:
            future, self._next = self._next[1], None
            ready = future.result()
        else:
            ready = self._open(need)
        with ready.stack:
            self.first_sandbox_id = self.first_sandbox_id or ready.sandbox.sandbox_id
            if self._later and self._next is None:
                following = self._later.pop(0)
                self._next = following, self._pool.submit(self._open, following)
            yield ready
            if ready.is_unchanged and need == self._kept and self._next is None:
                kept: Future[_Ready] = Future()
                kept.set_result(replace(ready, stack=ready.stack.pop_all(), is_unchanged=False))
                self._next = need, kept

    def place(self) -> VerifierPlace:
        """Return where Python starts in sandboxes that are guarded."""
        if self._place is None:
            raise SandboxError("no sandbox was prepared")
        return self._place

    def is_broken(self, dies: Callable[[Source], bool]) -> bool:
        """Return whether a check dies without the agent's work, too.

        A program that hangs or crashes until it is repaired kills a check on what the setup left, and is no broken
        check; so the solution, where there is one, has the last word.
        """
        return dies("setup") and (not self.task.solution or dies("solved"))

    def _drop_next(self) -> None:
        if self._next is None:
            return
        _, future = self._next
        self._next = None
        try:
            future.result().stack.close()
        except Exception as exc:  # of a sandbox that nothing needs any more
            logger.debug("a sandbox that was prepared is not used: %s", exc)

    def _open(self, need: _Need) -> _Ready:
        self.cancel.check()
        with self._lock:
            archive = self._archive(need)
        with ExitStack() as stack:
            sandbox = self._start(need)
            stack.callback(_close, sandbox)
            stack.enter_context(self.cancel.on_cancel(sandbox.kill))
            self._lay_out(sandbox, need, archive)
            processes = _processes(sandbox) if need.is_guarded and self.counts_processes else set()
            return _Ready(sandbox, stack.pop_all(), processes)

    def _start(self, need: _Need) -> Sandbox:
        # It may wait while the check before it runs, and is run again.
        lifetime = (8 + len(self.task.verify)) * self.task.verify_timeout_s + _SLACK_S
        lifetime += self.task.agent_timeout_s if need.source == "solved" else 0
        place = self._place if need.is_guarded else None
        try:
            try:
                return self._open_sandbox(lifetime, place)
            except SandboxError:
                self.cancel.check()
                if place is None or not place.mounts or self._has_mounted:
                    raise
                place.mounts = False  # an engine on another machine cannot mount: then it is laid into the home
                return self._open_sandbox(lifetime, place)
        except SandboxError as exc:
            self.cancel.check()
            raise _NotStarted(exc) from exc

    def _open_sandbox(self, lifetime: float, place: VerifierPlace | None) -> Sandbox:
        mounts = () if place is None else place.mount
        spec = replace(sandbox_spec(self.task, verifies=True), timeout_s=lifetime, home=self._home, mounts=mounts)
        sandbox = self.backend.open(spec)
        self._has_mounted = self._has_mounted or bool(mounts)
        return sandbox

    def _archive(self, need: _Need) -> Path:
        """Return the home of a sandbox as an archive; those that several checks use are written once."""
        need = replace(need, is_guarded=False)
        if need.source == "solved":
            need = _Need("setup", frozenset())  # the solution runs before the verifier's files are there
        if need in self._archives:
            return self._archives[need]
        path = self.folder / f"home-{len(self._archives)}.tar"
        below = f"{self._root}/"
        setup = write_home(
            path,
            baseline=self._baseline,
            worktree=self._worktree if need.source == "work" else None,
            files={f"workdir/{file[len(below) :]}": text for file, text in need.files if file.startswith(below)},
            empty=posixpath.dirname(Task.model_fields["reward_path"].default),
            date=int(time.time()),
        )
        if self._place is None:
            self._place = VerifierPlace(
                self.folder / "inside",
                root=self._root,
                home=self._home,
                setup=setup,
                verify_files=[
                    file[len(below) :] for file, _ in self._absolute(self.task.verify_sources) if file.startswith(below)
                ],
                texts=Texts(asked=self.task.texts(), root=self._root),
                mounts="mounts" in self.backend.features,
            )
        self._archives[need] = path
        return path

    def _lay_out(self, sandbox: Sandbox, need: _Need, archive: Path) -> None:
        unpack_home(sandbox, archive)
        lay_outer_files(sandbox, self.task)
        if self.task.reward_path.startswith("/"):
            _run_own(sandbox, ["mkdir", "-p", "--", posixpath.dirname(self.task.reward_path)])
        files = dict(need.files)
        if need.source == "solved":
            lay_files(sandbox, self.task.solution_files)
            for line in self.task.solution:
                done = sandbox.exec(
                    line,
                    envs=self.task.solution_env,
                    cwd=sandbox.workdir,
                    timeout=self.task.agent_timeout_s,
                    max_output=MAX_OUTPUT,
                )
                if done.exit_code != 0:
                    raise SandboxError(f"the solution fails with exit code {done.exit_code}")
            sandbox.stop_processes()
        else:
            files = {file: text for file, text in files.items() if not file.startswith(f"{self._root}/")}
        _lay_files_over(sandbox, {_relative(file, self._root): text for file, text in files.items()})
        if need.is_guarded and self._place is not None:
            self._place.lay(sandbox, self.folder / f"inside-{sandbox.sandbox_id}.tar")


def _close(sandbox: Sandbox) -> None:
    try:
        sandbox.close()
    except (SandboxError, OSError) as exc:
        logger.warning("the verifier's sandbox %s could not be closed: %s", sandbox.sandbox_id, exc)


def _relative(path: str, root: str) -> str:
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else path


def _processes(sandbox: Sandbox) -> set[tuple[int, int]]:
    """Return the processes in a sandbox, as their number and time of start, without those that look.

    Raises:
        SandboxError: the processes hide, or leave no room to look.
    """
    done = sandbox.exec(["/bin/sh", "-c", _PROCESSES], cwd="/", timeout=30)
    *lines, own = done.stdout.splitlines() or [""]
    parents: dict[int, int] = {}
    starts: dict[int, int] = {}
    for line in lines:
        # "12 (a (b) c) S 1 ...": a process chooses its name, so look for the last parenthesis
        pid, _, rest = line.partition(" (")
        fields = rest.rpartition(") ")[2].split()
        if not pid.isdigit() or len(fields) < 20:
            raise SandboxError("its processes cannot be listed")
        if fields[0] not in "ZX":
            parents[int(pid)], starts[int(pid)] = int(fields[1]), int(fields[19])
    if not own.isdigit():
        raise SandboxError("its processes cannot be listed")
    chain = [int(own)]
    while parents.get(chain[-1], 0) > 1:
        chain.append(parents[chain[-1]])
    # Where our own shell descends from PID 1, what else does are supervisors of commands, not commands.
    is_supervised = parents.get(chain[-1]) == 1
    skipped = {1, *chain} | {
        pid for pid, parent in parents.items() if parent == int(own) or (is_supervised and parent == 1)
    }
    return {(pid, start) for pid, start in starts.items() if pid not in skipped}


@dataclass(frozen=True, slots=True)
class WrittenReward:
    """What is in a reward file; `value` is None where that is no number in the task's range."""

    text: str
    value: float | None
    file: str = ""
    """Its path inside."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All numbers in it, by their names."""


_Change = tuple[str, Literal["inode", "date", "content", "entries"]]
"""One of the verifier's files, or a folder of theirs, and what of it is another than before."""


@dataclass(frozen=True, slots=True)
class LineRun(CommandRun):
    """One run of a check's shell line, and the traces that it left."""

    evidence: Evidence | None = None
    """The proof that the line reached its end, if it had to prove that."""
    written: WrittenReward | None = None
    """The reward file after the line."""
    left_processes: bool = False
    changes: frozenset[_Change] = frozenset()
    """The changes of the verifier's files while the line ran."""
    is_lost: bool = False
    """Its sandbox failed, which may be an accident."""


def attempt_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str], cmd: str | None = None
) -> LineRun:
    """Run a check's line; the result shows `cmd` instead of `line` if it is set."""
    ran = run_line(sandbox, line, timeout=timeout, envs=envs, cmd=cmd)
    return LineRun(ran.result, ran.crash, ran.timed_out)


def lost_line(line: str, error: Exception) -> LineRun:
    """Return what is known of a line whose sandbox failed."""
    if isinstance(error, SandboxGone) and "memory" in error.reason:
        return LineRun(CommandResult(cmd=line, exit_code=_KILLED), _OUT_OF_MEMORY)
    return LineRun(CommandResult(cmd=line, exit_code=_KILLED), f"lost its sandbox: {error}", is_lost=True)


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
    # A repository in the work tree must not bring commands along.
    git = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "safe.bareRepository": "explicit"}
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_COUNT": str(len(git)),
        **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(git)},
        **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(git.values())},
        **(more or {"PYTHONNOUSERSITE": "1"}),
    }


def _read_reward(sandbox: Sandbox, task: Task) -> WrittenReward | None:
    """Return what is in a sandbox's reward file, or None where there is none."""
    path = posixpath.join(sandbox.home, task.reward_path)
    numbers = posixpath.splitext(path)[0] + ".json"
    # Code of the agent that a check runs must not be able to write the file that counts before the verifier's.
    named = (*task.verify_texts(), *task.verify_sources.values())
    for file in (numbers, path) if any("reward.json" in text for text in named) else (path, numbers):
        try:
            content = sandbox.read_bytes(file, max_bytes=_REWARD_BYTES)
        except FileNotFoundError:
            continue
        except SandboxGone:
            raise
        except (SandboxError, OSError) as exc:
            return WrittenReward(f"what cannot be read ({exc})", None, file)
        text = content.decode("utf-8", "replace").strip()
        low, high = task.reward_range
        rewards: dict[str, float] = {}
        try:
            rewards = _rewards_of_json(text) if file != path else {"reward": float(text)}
            value = _chosen_reward(rewards, task.reward_key)
        except ValueError:
            value = math.nan
        return WrittenReward(repr(text[:80]), value if low <= value <= high else None, file, rewards)
    return None


def _rewards_of_json(text: str) -> dict[str, float]:
    """Return the numbers of a `reward.json`.

    Raises:
        ValueError: it holds something else.
    """
    value = json.loads(text)
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not all(type(each) in (int, float) for each in rewards.values()):
        raise ValueError("no numbers")
    return {name: float(each) for name, each in rewards.items()}


def _chosen_reward(rewards: Mapping[str, float], key: str | None) -> float:
    """Return the one of several rewards that counts; to combine them would invent a reward.

    Raises:
        ValueError: none does.
    """
    if key is None:
        key = next(iter(rewards)) if len(rewards) == 1 else "reward"
    for name in (key, *(part.strip() for part in key.split(","))):
        if name in rewards:
            return rewards[name]
    raise ValueError(f"no reward {key}")


def _is_plain(sandbox: Sandbox, file: str) -> bool:
    """Return whether a file can be written over, and is not behind a link below the home, or at all outside of it."""
    above = sandbox.home if file.startswith(f"{sandbox.home}/") else "/"
    below = posixpath.relpath(file, above)
    done = sandbox.exec(["/bin/sh", "-c", _IS_PLAIN, "sh", above, below], cwd="/", timeout=30)
    return done.exit_code == 0


def _run_own(sandbox: Sandbox, argv: list[str]) -> str:
    """Run a command of the verifier's own; return what it printed.

    Raises:
        SandboxError: it failed.
    """
    done = sandbox.exec(argv, cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"'{argv[0]}' failed in the verifier's sandbox: {done.stderr.strip()}")
    return done.stdout


# ---- verify lines ----


@dataclass(slots=True)
class _LineReward:
    """What a line is worth beyond its exit code."""

    line: str
    value: float | None
    has_passed: bool
    is_isolated: bool
    """Whether it runs nothing of the agent's."""


class LineChecks:
    """Runs the verify lines of a case, each in a sandbox of its own.

    Args:
        case: What is verified.
        reads_file: Whether a reward file counts.
    """

    def __init__(self, case: VerificationCase, *, reads_file: bool) -> None:
        self._case = case
        self._reads_file = reads_file
        # Without isolation, the processes that can be seen are the host's.
        case.counts_processes = reads_file and {"isolation", "trees"} <= case.backend.features
        self._rewards: list[_LineReward] = []
        self.written: Mapping[str, float] = {}
        """All numbers of the last reward file that counts."""
        self.ignored_file = False
        """Whether a reward file was written that does not count."""

    def run(self, line: str, trust: Trust) -> CommandResult:
        """Run a line and return its result; the exit code is 0 only where the check is passed.

        Raises:
            _CheckCrash: it dies, or writes no valid reward, without the agent's work too.
            _NotStarted: a sandbox did not start.
        """
        attempt = _again(lambda: self._attempt(line, "work", proves=self._must_prove(line)))
        if attempt.crash is None:
            attempt = self._proven(line, attempt)
        if attempt.crash is None:
            attempt = self._with_own_files(line, attempt)
        if attempt.crash is not None:
            attempt = self._killed(line, attempt, attempt.crash)
        elif self._reads_file:
            attempt = self._with_valid_reward(line, attempt)
        value = attempt.written.value if attempt.written is not None and self._reads_file else None
        if attempt.written is not None and value is not None:
            self.written = attempt.written.rewards
        self.ignored_file = self.ignored_file or (attempt.written is not None and not self._reads_file)
        self._rewards.append(_LineReward(line, value, attempt.result.exit_code == 0, trust == "isolated"))
        return attempt.result

    def reward(self, share: float) -> float | None:
        """Return the reward that the last line with a reward file wrote, or None where the share of checks counts.

        A line that wrote none, and would have without the agent's work, counts as the lowest: to keep the verifier from
        writing is not worth more than what it would have written.
        """
        low = self._case.task.reward_range[0]
        if not self._reads_file:
            return None
        for number, one in reversed(list(enumerate(self._rewards))):
            if one.value is not None:
                return one.value
            before = any(other.value is not None for other in self._rewards[:number])
            if (before or share > low) and self._is_withheld(one):
                return low
        return None

    def _is_withheld(self, reward: _LineReward) -> bool:
        """Return whether a line without a reward would have written one if it were not for the agent's work."""
        if not reward.has_passed:
            return self._writes_reward(reward.line)
        # A line may write a reward only where it fails: `make test || echo 0 > reward.txt`. The solution shows what it
        # does where it passes; one that runs nothing of the agent's has shown it.
        source: Source = "solved" if self._case.task.solution else "setup"
        return not reward.is_isolated and self._writes_reward(reward.line, source)

    def _writes_reward(self, line: str, source: Source = "setup") -> bool:
        return self._attempt(line, source, proves=False).written is not None

    def _must_prove(self, line: str) -> bool:
        task = self._case.task
        if task.proof is not None:
            return task.proof
        if runs_pytest(line) or with_wrapper(line, task.verify_sources) != line:
            return True
        named = (text for path, text in task.verify_sources.items() if posixpath.basename(path) in line)
        return any(proves_itself(text) for text in (line, *named))

    def _attempt(self, line: str, source: Source, *, proves: bool) -> LineRun:
        """Run a line in a fresh sandbox, and read what it left there."""
        try:
            with self._case.use(self._case.need(line, source)) as ready:
                return self._run_in(ready, line, proves=proves)
        except (SandboxError, OSError) as exc:
            self._case.cancel.check()
            return lost_line(line, exc)

    def _run_in(self, ready: _Ready, line: str, *, proves: bool) -> LineRun:
        task, place, sandbox = self._case.task, self._case.place(), ready.sandbox
        envs, command, proof = place.environment(sandbox), line, None
        if proves:
            proof = Proof(line, sandbox.home, sandbox.workdir, task.verify_sources)
            proof.lay(sandbox, self._case.folder / "proof.tar")
            envs, command = {**envs, **proof.environment()}, proof.command()
        before = _file_states(sandbox, task.verify_sources)
        attempt = attempt_line(
            sandbox,
            place.command(command, sandbox),
            timeout=task.verify_timeout_s,
            envs={**task.verify_env, **clean_environment(sandbox.home, envs)},
            cmd=line,
        )
        left = self._case.counts_processes and self._left_processes(ready)
        sandbox.stop_processes()  # nothing may write while the rest is read
        evidence = None if proof is None else proof.read(sandbox)
        written = _read_reward(sandbox, task)
        if written is not None and self._reads_file and not _is_plain(sandbox, written.file):
            # The agent's code can close the file that it wrote, or make it a link to one that holds a 1.
            written = WrittenReward("a link, or a closed file,", None)
        changes = _changes(before, _file_states(sandbox, task.verify_sources))
        ready.is_unchanged = attempt.crash is None and proof is None and not changes
        return replace(attempt, evidence=evidence, left_processes=left, written=written, changes=changes)

    def _left_processes(self, ready: _Ready) -> bool:
        """Return whether a process of a line lives longer than the line."""
        try:
            return bool(_processes(ready.sandbox) - ready.processes)
        except SandboxGone:
            raise
        except SandboxError:
            return True

    def _proven(self, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line that exits with 0 and does not prove its end, unless it cannot prove anything."""
        evidence, result = attempt.evidence, attempt.result
        if evidence is None or evidence.problem is None:
            return attempt
        unloaded = result.exit_code != 0 and could_not_load(result.stdout + result.stderr)
        if self._case.task.proof is None and not evidence.seen and (result.exit_code == 0 or unloaded):
            control = self._attempt(line, "setup", proves=True)
            if control.evidence is None or not control.evidence.seen:  # the line hides its pytest in any case
                return self._attempt(line, "work", proves=False) if unloaded else attempt
        if result.exit_code != 0:
            return attempt
        return self._refused(attempt, evidence.problem)

    def _with_own_files(self, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line while which the verifier's files were changed, unless it does that without the agent's work."""
        if not attempt.changes or (attempt.result.exit_code != 0 and attempt.written is None):
            return attempt
        # Something new in a folder changes its date. To move it away and back changes that of the folder above, too.
        changes = frozenset(
            (path, what)
            for path, what in attempt.changes
            if what != "entries" or (posixpath.dirname(path), "entries") in attempt.changes
        )
        controls: list[Source] = ["setup", "solved"] if self._case.task.solution else ["setup"]
        for source in controls:
            if changes:
                changes -= self._attempt(line, source, proves=False).changes
        if not changes:
            return attempt
        return self._refused(attempt, f"{min(changes)[0]} was changed while it ran")

    def _with_valid_reward(self, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line whose reward file is not valid, or may have been written or removed after its end."""
        written = attempt.written
        if attempt.left_processes and (written is not None or self._writes_reward(line)):
            return self._refused(attempt, "a process that it started outlived it, and could write the reward")
        if written is None or written.value is not None:
            return attempt

        def is_invalid(source: Source) -> bool:
            control = self._attempt(line, source, proves=False)
            return control.crash is not None or (control.written is not None and control.written.value is None)

        low, high = self._case.task.reward_range
        why = f"wrote {written.text} as its reward, which is no number from {low:g} to {high:g}"
        if self._case.is_broken(is_invalid):
            raise _CheckCrash(why, attempt.result)
        return self._refused(attempt, why)

    def _refused(self, attempt: LineRun, why: str) -> LineRun:
        """Return a line that is not passed, and whose reward file does not count."""
        self.ignored_file = self.ignored_file or attempt.written is not None
        code = attempt.result.exit_code
        note = f"exited with {code}, but {why}"
        result = attempt.result.model_copy(update={"exit_code": code or _REFUSED, "note": note})
        return replace(attempt, result=result, written=None)

    def _killed(self, line: str, attempt: LineRun, crash: str) -> LineRun:
        if self._case.is_broken(lambda source: self._attempt(line, source, proves=False).crash is not None):
            raise _CheckCrash(crash, attempt.result)
        self.ignored_file = self.ignored_file or attempt.written is not None
        note = f"{crash}; without the agent's work it ends by itself, so that work is what killed it"
        result = attempt.result.model_copy(update={"exit_code": attempt.result.exit_code or _REFUSED, "note": note})
        return replace(attempt, result=result, written=None)


@dataclass(frozen=True, slots=True)
class _FileState:
    """What tells whether a file was changed, and put back: no user can choose the number or the date of the change."""

    inode: str = ""
    """With the kind: a link in the place of a file is another."""
    date: str = ""
    content: str = ""
    """Its hash; none for a folder."""


def _file_states(sandbox: Sandbox, files: Mapping[str, str]) -> dict[str, _FileState]:
    """Return the states of the verifier's files and of the folders above them, as far as the work folder."""
    root = sandbox.workdir
    paths = [posixpath.normpath(posixpath.join(root, path)) for path in files if not _ESCAPED & set(path)]
    if not paths:
        return {}
    below = [path for path in paths if path.startswith(f"{root}/")]
    folders = {f"{root}/{above}".rstrip("/") for path in below for above in ancestors(path[len(root) + 1 :])}
    done = sandbox.exec(["/bin/sh", "-c", _STATES, "sh", *folders, *paths], cwd="/", timeout=60)
    about, _, hashes = f"\n{done.stdout}".partition("\n--\n")
    digests = {line[66:]: line[:64] for line in hashes.splitlines()}
    if done.exit_code == 127:  # no sha256sum
        digests = {path: _digest(sandbox, path) for path in paths}
    states = {path: _FileState(content=digest) for path, digest in digests.items()}
    for line in about.splitlines():  # 123 2026-11-16 13:48:12.123456789 +0000 regular file /home/user/workdir/check.sh
        state, _, path = line.partition(" /")
        inode, date, clock, zone, kind = (*state.split(" ", 4), *[""] * 5)[:5]
        content = digests.get(f"/{path}", "")
        states[f"/{path}"] = _FileState(f"{inode} {kind}", f"{date} {clock} {zone}", content)
    return states


def _changes(before: Mapping[str, _FileState], after: Mapping[str, _FileState]) -> frozenset[_Change]:
    """Return what is another than before with the verifier's files and their folders."""
    changes: set[_Change] = set()
    for path, old in before.items():
        new = after.get(path, _FileState())
        changes |= {(path, "inode")} if old.inode != new.inode else set()
        changes |= {(path, "content")} if old.content != new.content else set()
        changes |= {(path, "date" if old.content else "entries")} if old.date != new.date else set()
    return frozenset(changes)


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
    is_lost: bool = False
    """Its sandbox failed, which may be an accident."""

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
    """Runs the checks of a case that have two parts."""

    def __init__(self, case: VerificationCase) -> None:
        self._case = case

    def run(self, check: Check, report: Callable[[str], None], label: str) -> CommandResult:
        """Run both parts of a check; return what the judge did, with what `run` did in it.

        Where `run` died there is no judge: the result has its exit code.

        Raises:
            _CheckCrash: a part dies without the agent's work too.
            _NotStarted: a sandbox did not start.
        """
        if check.port is not None:
            return self._verdict(check, _again(lambda: self._both_parts(check, "work")))
        output = self._run_part(check, "work")
        if output.is_lost:
            output = self._run_part(check, "work")
        if output.problem is not None:
            ran = output.result(check)
            result = CommandResult(cmd=check.judge, exit_code=ran.exit_code or 1, run=ran, score=self._lowest())
            if output.is_lost and self._case.is_broken(lambda source: self._run_part(check, source).is_lost):
                raise _CheckCrash(output.problem, result, part="the run")
            return result.model_copy(update={"note": f"not judged: its run {output.problem}"})
        report(f"{label}ran with exit code {output.exit_code}, judging")
        return self._verdict(check, _again(lambda: self._judge_part(check, output)))

    def _verdict(self, check: Check, judged: LineRun) -> CommandResult:
        problem = self._problem(judged)
        if problem is None:
            score = None if judged.written is None else judged.written.value
            return judged.result.model_copy(update={"score": score})
        if self._case.is_broken(lambda source: self._problem(self._both_parts(check, source)) is not None):
            raise _CheckCrash(problem, judged.result)
        note = f"its judge {problem}; without the agent's work it does not, so that work is the reason"
        code = judged.result.exit_code or _REFUSED
        return judged.result.model_copy(update={"exit_code": code, "note": note, "score": self._lowest()})

    def _lowest(self) -> float | None:
        """Return what a check earns that is not judged, where a judge could have written less than 0."""
        low = self._case.task.reward_range[0]
        return low if low < 0 else None

    def _problem(self, judged: LineRun) -> str | None:
        """Return why what a judge did is no verdict, or None."""
        if judged.crash is not None or judged.written is None or judged.written.value is not None:
            return judged.crash
        low, high = self._case.task.reward_range
        return f"wrote {judged.written.text} as its reward, which is no number from {low:g} to {high:g}"

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


def _again(attempt: Callable[[], LineRun]) -> LineRun:
    """Try once more where a sandbox failed: accidents do not happen twice."""
    first = attempt()
    return attempt() if first.is_lost else first


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


def _judge_part(case: VerificationCase, check: Check, sandbox: Sandbox, output: _RunOutput) -> LineRun:
    task = case.task
    place = posixpath.join(sandbox.home, OUTPUT)
    _lay_output(sandbox, output, place, case.folder / "output.tar")
    if "isolation" in case.backend.features:  # without isolation the backend must be able to remove the folder later
        _run_own(sandbox, ["chmod", "-R", "a-w", "--", place])
    inside = case.place()
    clean = clean_environment(sandbox.home, {"OUTPUT": place, **inside.environment(sandbox)})
    envs = {**task.verify_env, **clean}
    line = inside.command(check.judge, sandbox)
    judged = attempt_line(sandbox, line, timeout=task.verify_timeout_s, envs=envs, cmd=check.judge)
    sandbox.stop_processes()
    return judged if task.reward_file is False else replace(judged, written=_read_reward(sandbox, task))


def _judge_live(case: VerificationCase, check: Check, port: int, running: Sandbox, judging: Sandbox) -> LineRun:
    """Run both parts of a check at once."""
    task = case.task
    with LiveRun(
        running,
        judging,
        line=check.run,
        port=port,
        folder=case.folder,
        envs={**task.verify_env, **clean_environment(running.home)},
        seconds=task.verify_timeout_s,
        isolated="isolation" in case.backend.features,
    ) as live:
        judged = attempt_line(judging, check.judge, timeout=task.verify_timeout_s, envs=live.judge_environment)
        result = judged.result.model_copy(update={"run": live.result()})
    judging.stop_processes()
    written = None if task.reward_file is False else _read_reward(judging, task)
    return replace(judged, result=result, written=written)


def _lay_output(sandbox: Sandbox, output: _RunOutput, place: str, archive: Path) -> None:
    """Lay out what is judged as plain files that can be read, and neither written nor run."""
    contents: dict[str, bytes] = {str(name): bytes(received) for name, received in output.streams.items()}
    contents["exit_code"] = f"{output.exit_code}\n".encode()
    contents |= {f"files/{name}": content for name, content in output.files.items()}
    write_archive(archive, contents, mode=0o444, folder="files")
    _run_own(sandbox, ["rm", "-rf", "--", place])
    sandbox.unpack(archive, place)
    archive.unlink()
