"""The sandboxes of one verification: which sandbox each part of a check needs, how it starts, and which files it gets.

Knows tasks, archives and backends. Must not know how checks are judged.
"""

# A check, or a part of one, asks for a sandbox with a `SandboxNeed`:
#
#   source    files in the work folder                          used for
#   work      merged.tar: the agent's work, made safe           verify lines, `run` of a check
#   setup     the baseline: the task's files after its setup    judges, control attempts
#   solved    the baseline, then the task's solution lines      control attempts, if the task has a solution
#
# Starting a sandbox takes longer than most checks, so a thread opens the next one while a check runs:
#
#   begin(check, following)     plan: the judge of this check, then the sandbox of the following one
#   use(need)                   take the prepared sandbox, or open one   ->   prepare the next planned one
#   end of the `with` block     close it; or keep it for the next line, if the line only read data
#
# At most two sandboxes exist at a time, except for checks with a port, which need two at once and prepare none.

from __future__ import annotations

import logging
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from openenv.errors import SandboxError
from openenv.rollout.store.archives import unpack_home
from openenv.rollout.store.verdict import VerifierInput
from openenv.rollout.tasks.commands import MAX_OUTPUT, lay_files, lay_outer_files, sandbox_spec
from openenv.rollout.tasks.task import Check, Task
from openenv.rollout.verify.inside import PlaceContent, VerifierPlace
from openenv.rollout.verify.lookups import Texts
from openenv.rollout.verify.sandbox_commands import lay_files_over, processes_in, run_command
from openenv.rollout.verify.trust import only_reads
from openenv.rollout.verify.worktree import VerifierHome, write_home
from openenv.rollout.verify.worktree_guard import Patterns
from openenv.sandboxes.base import Sandbox, Sandboxes

logger = logging.getLogger(__name__)

_SLACK_S = 300.0
_WORDS = re.compile(r"[^\s'\"<>|;&()=,`]+")

Source = Literal["work", "setup", "solved"]
"""The files that a check runs over: the agent's work, the baseline, or the baseline with the task's solution."""


class SandboxNotStarted(Exception):
    """A sandbox did not start. Not a `SandboxError`: those are blamed on the agent while a check runs."""

    def __init__(self, error: SandboxError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class SandboxNeed:
    """The sandbox that a part of a check needs."""

    source: Source
    files: frozenset[tuple[str, str]]
    """The verifier's files in it: absolute paths and texts."""
    is_guarded: bool = False
    """Whether Python starts in the verifier's place (`inside.py`)."""


@dataclass(slots=True)
class ReadySandbox:
    """A sandbox with all its files, and the stack that closes it."""

    sandbox: Sandbox
    stack: ExitStack
    processes: set[tuple[int, int]]
    """The processes in it before a check runs there."""
    is_unchanged: bool = False
    """Whether the check ended and left no known change, so that the next line may use the sandbox as well."""


class VerificationCase:
    """One work tree, the checks of its task, and fresh sandboxes for them. A context manager.

    Args:
        task: The task.
        backend: Where sandboxes are opened.
        given: The work tree.
        folder: A folder of the host for archives.
    """

    def __init__(self, task: Task, backend: Sandboxes, given: VerifierInput, folder: Path) -> None:
        self.task, self.backend, self.folder = task, backend, folder
        self.cancel = given.cancel
        self.counts_processes = False
        """Whether to list the processes in a sandbox before a line runs there."""
        self.first_sandbox_id = ""
        self._given = given
        self._root = task.workdir or f"{given.home}/workdir"
        self._planned: list[SandboxNeed] = []
        self._reusable: SandboxNeed | None = None
        self._next: tuple[SandboxNeed, Future[ReadySandbox]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="openenv-verify")
        self._lock = threading.Lock()  # archives are written by both threads
        self._archives: dict[SandboxNeed, Path] = {}
        self._place: VerifierPlace | None = None
        self._has_mounted = False

    def __enter__(self) -> VerificationCase:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._drop_next()
        self._pool.shutdown()

    def need(self, check: str | Check, source: Source = "work") -> SandboxNeed:
        """Return the first sandbox that a check needs."""
        if isinstance(check, str):
            return SandboxNeed(source, self._absolute(self.task.verify_sources), is_guarded=True)
        return SandboxNeed(source, self._absolute(run_files(check, self.task.verify_sources, self._root)))

    def judges_need(self, check: Check) -> SandboxNeed:
        """Return the sandbox that a judge needs."""
        # Guarded, because a judge may enter the folder of the agent's output.
        return SandboxNeed("setup", self._absolute({**self.task.verify_sources, **check.files}), is_guarded=True)

    def _absolute(self, files: Mapping[str, str]) -> frozenset[tuple[str, str]]:
        return frozenset((posixpath.normpath(posixpath.join(self._root, path)), text) for path, text in files.items())

    def begin(self, check: str | Check, following: str | Check | None) -> None:
        """Plan the sandboxes of a check and of the one after it."""
        self._planned, self._reusable = [], None
        if isinstance(check, str) and isinstance(following, str) and only_reads(check, self.task):
            # `grep` leaves its sandbox as it was, and a new sandbox takes ten times as long as `grep`.
            self._reusable = self.need(check)
        elif isinstance(check, str) or check.port is None:  # a check with a port uses two at the same time
            self._planned += [] if isinstance(check, str) else [self.judges_need(check)]
            self._planned += [] if following is None else [self.need(following)]
        if self._next is not None and self._next[0] != self.need(check):
            self._drop_next()

    @contextmanager
    def use(self, need: SandboxNeed) -> Iterator[ReadySandbox]:
        """Take a fresh sandbox, and start to prepare the next one.

        Raises:
            SandboxNotStarted: the sandbox did not start.
            SandboxError, OSError: its files could not be written.
        """
        self.cancel.check()
        if self._next is not None and self._next[0] == need:
            future, self._next = self._next[1], None
            ready = future.result()
        else:
            ready = self._open(need)
        with ready.stack:
            self.first_sandbox_id = self.first_sandbox_id or ready.sandbox.sandbox_id
            if self._planned and self._next is None:
                following = self._planned.pop(0)
                self._next = following, self._pool.submit(self._open, following)
            yield ready
            if ready.is_unchanged and need == self._reusable and self._next is None:
                reused: Future[ReadySandbox] = Future()
                reused.set_result(replace(ready, stack=ready.stack.pop_all(), is_unchanged=False))
                self._next = need, reused

    def place(self) -> VerifierPlace:
        """Return the verifier's place in guarded sandboxes.

        Raises:
            SandboxError: no sandbox was prepared yet.
        """
        if self._place is None:
            raise SandboxError("no sandbox was prepared")
        return self._place

    def is_broken(self, dies: Callable[[Source], bool]) -> bool:
        """Return whether a check loses its sandbox without the agent's work, too.

        The baseline is not enough: if the task is to repair a program that kills its machine, every check of it does
        so there. So if the task has a solution, the sandbox must be lost with the solution as well.
        """
        return dies("setup") and (not self.task.solution or dies("solved"))

    def _drop_next(self) -> None:
        if self._next is None:
            return
        _, future = self._next
        self._next = None
        try:
            future.result().stack.close()
        except Exception as exc:  # nothing needs this sandbox any more
            logger.debug("a prepared sandbox could not be opened or closed: %s", exc)

    def _open(self, need: SandboxNeed) -> ReadySandbox:
        self.cancel.check()
        with self._lock:
            archive = self._archive(need)
        with ExitStack() as stack:
            sandbox = self._start(need)
            stack.callback(_close, sandbox)
            stack.enter_context(self.cancel.on_cancel(sandbox.kill))
            self._lay_out(sandbox, need, archive)
            processes = processes_in(sandbox) if need.is_guarded and self.counts_processes else set()
            return ReadySandbox(sandbox, stack.pop_all(), processes)

    def _start(self, need: SandboxNeed) -> Sandbox:
        # The sandbox may wait while the check before it runs, is retried and is run on both controls.
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
                place.mounts = False  # a container engine on another machine cannot mount this folder: copy it
                return self._open_sandbox(lifetime, place)
        except SandboxError as exc:
            self.cancel.check()
            raise SandboxNotStarted(exc) from exc

    def _open_sandbox(self, lifetime: float, place: VerifierPlace | None) -> Sandbox:
        mounts = () if place is None else place.mount
        spec = replace(sandbox_spec(self.task, verifies=True), timeout_s=lifetime, home=self._given.home, mounts=mounts)
        sandbox = self.backend.open(spec)
        self._has_mounted = self._has_mounted or bool(mounts)
        return sandbox

    def _archive(self, need: SandboxNeed) -> Path:
        """Return the home of a sandbox as an archive; checks with equal needs share one."""
        need = replace(need, is_guarded=False)
        if need.source == "solved":
            need = SandboxNeed("setup", frozenset())  # the solution runs before the verifier's files are there
        if need in self._archives:
            return self._archives[need]
        path = self.folder / f"home-{len(self._archives)}.tar"
        below = f"{self._root}/"
        home = VerifierHome(
            baseline=self._given.baseline,
            worktree=self._given.worktree if need.source == "work" else None,
            files={f"workdir/{file[len(below) :]}": text for file, text in need.files if file.startswith(below)},
            empty=posixpath.dirname(Task.model_fields["reward_path"].default),
            date=int(time.time()),
        )
        setup = write_home(path, home)
        if self._place is None:
            content = PlaceContent(
                root=self._root,
                home=self._given.home,
                setup=setup,
                verify_files=[
                    file[len(below) :] for file, _ in self._absolute(self.task.verify_sources) if file.startswith(below)
                ],
                texts=Texts(asked=self.task.texts(), root=self._root),
            )
            self._place = VerifierPlace(self.folder / "inside", content, mounts="mounts" in self.backend.features)
        self._archives[need] = path
        return path

    def _lay_out(self, sandbox: Sandbox, need: SandboxNeed, archive: Path) -> None:
        unpack_home(sandbox, archive)
        lay_outer_files(sandbox, self.task)
        if self.task.reward_path.startswith("/"):
            run_command(sandbox, ["mkdir", "-p", "--", posixpath.dirname(self.task.reward_path)])
        files = dict(need.files)
        if need.source == "solved":
            self._solve(sandbox)
        else:  # the archive has the files below the work folder
            files = {file: text for file, text in files.items() if not file.startswith(f"{self._root}/")}
        lay_files_over(sandbox, {_relative(file, self._root): text for file, text in files.items()})
        if need.is_guarded and self._place is not None:
            self._place.lay(sandbox, self.folder / f"inside-{sandbox.sandbox_id}.tar")

    def _solve(self, sandbox: Sandbox) -> None:
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


def run_files(check: Check, verify_files: Mapping[str, str], workdir: str) -> dict[str, str]:
    """Return the verifier's files that the `run` of a check sees: by `needs`, or by the words of the line."""
    verify_files = {**verify_files, **check.files}
    if check.needs is not None:
        patterns = Patterns(check.needs)
        return {path: text for path, text in verify_files.items() if patterns.cover(posixpath.normpath(path))}
    words = {posixpath.normpath(posixpath.join(workdir, word)) for word in _WORDS.findall(check.run)}
    return {path: text for path, text in verify_files.items() if posixpath.join(workdir, path) in words}


def _close(sandbox: Sandbox) -> None:
    try:
        sandbox.close()
    except (SandboxError, OSError) as exc:
        logger.warning("the verifier's sandbox %s could not be closed: %s", sandbox.sandbox_id, exc)


def _relative(path: str, root: str) -> str:
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else path
