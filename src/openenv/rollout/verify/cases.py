"""The sandboxes of one verification: which sandbox each part of a check needs, how it starts, and which files it gets.

Knows tasks, archives and backends. Must not know how checks are judged.
"""

# A check, or a part of one, asks for a sandbox with a `SandboxNeed`:
#
#   source    files in the work folder                          used for
#   work      merged.tar: the agent's work, made safe           verify lines, `run` of a check
#   setup     the baseline: the task's files after its setup    judges, reference runs
#   solved    the baseline, then the task's solution lines      reference runs, if the task has a solution
#
# Starting a sandbox takes longer than most checks, so a thread opens the next one while a check runs:
#
#   begin(check, following)     plan: the judge of this check, then the sandbox of the following one
#   use(need)                   take the prepared sandbox, or open one   ->   prepare the next planned one
#   end of the `with` block     close it; or keep it for the next line, if the line only read data
#
# At most two sandboxes exist at a time, except for checks with a port, which need two at once and prepare none.

from __future__ import annotations

import hashlib
import logging
import posixpath
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

from openenv.errors import SandboxError
from openenv.rollout.store.archives import ancestors, unpack_home, write_archive
from openenv.rollout.store.verdict import Source, VerifierInput
from openenv.rollout.tasks.task import MAX_OUTPUT, Check, Task, lay_files, lay_outer_files, sandbox_spec
from openenv.rollout.verify.lookups import Texts
from openenv.rollout.verify.trust import trust_of
from openenv.rollout.verify.worktree import VerifierHome, write_home
from openenv.rollout.verify.worktree_guard import SetupTree, run_files
from openenv.sandboxes.base import ExecResult, Mount, Sandbox, Sandboxes

logger = logging.getLogger(__name__)

_SLACK_S = 300.0
_MAY_WRITE = re.compile(r"(?<![\w.])(?:ba)?sh |python|pytest|reward")


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
    """Whether Python starts in the verifier's place (`VerifierPlace`)."""


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
        self.cancel, self.report = given.cancel, given.report
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
        # The sandbox may wait while the check before it runs, is retried and has its reference runs.
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
                texts=self.task.texts(),
            )
            self._place = VerifierPlace(
                self._given.places or self.folder / "places", content, mounts="mounts" in self.backend.features
            )
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


def only_reads(line: str, task: Task) -> bool:
    """Return whether a plain line leaves its sandbox as it was, so that the next line may use it."""
    return _MAY_WRITE.search(line) is None and trust_of(line, task)[0] == "isolated"


def _close(sandbox: Sandbox) -> None:
    try:
        sandbox.close()
    except (SandboxError, OSError) as exc:
        logger.warning("the verifier's sandbox %s could not be closed: %s", sandbox.sandbox_id, exc)


def _relative(path: str, root: str) -> str:
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else path


# ---- the verifier's own commands in a sandbox ----
#
# The agent's code may have run in the same sandbox, so any output can be wrong or missing.
#
# script            used for
# ----------------  --------------------------------------------------------------------------------------------
# clear_paths.sh    remove links and odd files before the verifier's files are written over the agent's tree
# path_kinds.sh     decide which paths of `Check.keep` can be taken out of the sandbox
# is_plain.sh       refuse a reward file that the agent closed, or replaced by a link
# processes.sh      find processes that outlive a verify line
# file_states.sh    find changed verifier files (read by `verify_lines`)
#
# All of them run in `/bin/sh`, on images without Python as well.

_DEAD_STATES = "ZX"
"""The states of processes that have ended: zombie and dead."""


@cache
def _script(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def run_script(sandbox: Sandbox, name: str, *args: str, timeout: float | None = None) -> ExecResult:
    """Run one of the shell scripts beside this file."""
    argv = ["/bin/sh", "-c", _script(name), "sh", *args]
    return sandbox.exec(argv, cwd="/") if timeout is None else sandbox.exec(argv, cwd="/", timeout=timeout)


def run_command(sandbox: Sandbox, argv: list[str]) -> str:
    """Run a command and return its output.

    Raises:
        SandboxError: the command failed.
    """
    return _output(sandbox.exec(argv, cwd="/"), argv[0])


def path_kinds(sandbox: Sandbox, paths: tuple[str, ...]) -> str:
    """Return one letter for each path below the work folder: `f` file, `d` folder, `-` anything else.

    Raises:
        SandboxError: the script failed.
    """
    return _output(run_script(sandbox, "path_kinds.sh", sandbox.workdir, *paths), "path_kinds.sh")


def _output(done: ExecResult, command: str) -> str:
    if done.exit_code != 0:
        raise SandboxError(f"'{command}' failed in the verifier's sandbox: {done.stderr.strip()}")
    return done.stdout


def is_plain(sandbox: Sandbox, file: str) -> bool:
    """Return whether a file is writable and not reached through a link.

    Links above the home are part of the image and allowed.
    """
    top = sandbox.home if file.startswith(f"{sandbox.home}/") else "/"
    return run_script(sandbox, "is_plain.sh", top, posixpath.relpath(file, top), timeout=30).exit_code == 0


def lay_files_over(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files over the agent's tree, after removing links and odd files that are in the way.

    Raises:
        SandboxError: a path cannot be cleared.
    """
    targets = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in files]
    if not targets:
        return
    below = f"{sandbox.workdir}/"
    parents: set[str] = set()
    for path in targets:
        while (path := posixpath.dirname(path)).startswith(below):
            parents.add(path)
    done = run_script(sandbox, "clear_paths.sh", *sorted(parents), "--", *targets)
    if done.exit_code != 0:
        raise SandboxError(f"The verifier's files cannot be written over the work tree: {done.stderr.strip()}")
    lay_files(sandbox, files)


def processes_in(sandbox: Sandbox) -> set[tuple[int, int]]:
    """Return the processes in a sandbox as (number, start time), without this command and its parents.

    Raises:
        SandboxError: the list is cut or garbled: processes hide, or leave no room for another one.
    """
    done = run_script(sandbox, "processes.sh", timeout=30)
    *lines, shell = done.stdout.splitlines() or [""]
    parents: dict[int, int] = {}
    starts: dict[int, int] = {}
    for line in lines:
        # "12 (a (b) c) S 1 ...": a process chooses its name, so look for the last parenthesis
        pid, _, rest = line.partition(" (")
        fields = rest.rpartition(") ")[2].split()
        if not pid.isdigit() or len(fields) < 20:
            raise SandboxError("its processes cannot be listed")
        if fields[0] not in _DEAD_STATES:
            parents[int(pid)], starts[int(pid)] = int(fields[1]), int(fields[19])
    if not shell.isdigit():
        raise SandboxError("its processes cannot be listed")
    chain = [int(shell)]
    while parents.get(chain[-1], 0) > 1:
        chain.append(parents[chain[-1]])
    # If this shell descends from PID 1, the other children of PID 1 supervise commands; they are not commands.
    is_supervised = parents.get(chain[-1]) == 1
    skipped = {1, *chain} | {
        pid for pid, parent in parents.items() if parent == int(shell) or (is_supervised and parent == 1)
    }
    return {(pid, start) for pid, start in starts.items() if pid not in skipped}


def clean_environment(home: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a check's commands; no variable points into the work tree.

    PATH stays as it was for the setup and the agent, so the checks use the same Python.
    """
    # Git must not run commands that a repository in the work tree configures.
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


# ---- the verifier's place: a folder with code that every Python of a check runs first ----
#
# It is mounted read-only if the backend can mount; otherwise it is copied into the home.
#
# /opt/openenv                       read-only
#   sitecustomize.py                 found through PYTHONPATH: guards the imports (`openenv_imports`)
#   openenv_imports.py, openenv_proof.py
#   root                             the folders of the agent's files, one per line
#   known                            modules of the setup in them, which may come before installed modules
#   lib/python3.N/site-packages/     found through PYTHONUSERBASE: the same guard for a script or a Makefile that
#     openenv.pth                    sets PYTHONPATH itself. Python without either (`-I`, `env -i`) has no guard
#
# The order of imports in a check's Python:
#
#   without the guard    work folder (agent's `json.py`!)  ->  standard library  ->  site-packages
#   with the guard       standard library  ->  site-packages  ->  work folder
#                        but modules in `known` come from the work folder first: the task's `app.py` is one

MOUNTED_AT = "/opt/openenv"
IN_HOME = ".openenv"
OUTPUT = "logs/output"
"""The folder that `$OUTPUT` names, below the home of a judge's sandbox."""
_MODULES = ("openenv_imports.py", "openenv_proof.py")
_MINORS = range(8, 21)
_PATHS = re.compile(r"(?<![\w$])PYTHONPATH=(?=(\s|$)?)")
_CODE = re.compile(r"(?:py|pyc|(?:[\w-]+\.)?so)")
_SITECUSTOMIZE = """\
import os

import openenv_imports

_place = os.path.dirname(os.path.abspath(__file__))
openenv_imports.install(_place)
openenv_imports.run_other_sitecustomize(_place)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceContent:
    """The facts about a task that its place needs.

    Args:
        root: The work folder inside.
        home: The home inside.
        setup: The work folder after the setup.
        verify_files: The verifier's files, relative to the work folder.
        texts: The texts of the task. The agent may write any module that they name.
    """

    root: str
    home: str
    setup: SetupTree
    verify_files: Collection[str]
    texts: Sequence[str]


class VerifierPlace:
    """The files of one verification, and the way a check's commands find them.

    Args:
        parent: A folder of the host. The files of a place are in one below it, which equal places share: nothing
            changes them, because sandboxes mount them read-only.
        content: The facts about the task.
        mounts: Whether the backend can mount.
    """

    def __init__(self, parent: Path, content: PlaceContent, *, mounts: bool) -> None:
        self.mounts = mounts
        self._root, self._home = content.root, content.home
        setup = content.setup
        self._environments = sorted(name for name in setup.folders if f"{name}/pyvenv.cfg" in setup.files)
        self._modules = local_modules(content)
        self._folder = self._written(parent) if mounts else parent

    @property
    def mount(self) -> tuple[Mount, ...]:
        """The mounts of sandboxes; empty if the backend cannot mount."""
        return (Mount(self._folder, MOUNTED_AT),) if self.mounts else ()

    def lay(self, sandbox: Sandbox, archive: Path) -> None:
        """Copy the files into a sandbox that has not mounted them, through an archive on the host."""
        if not self.mounts:
            files = self._files(self.path(sandbox), sandbox.workdir, sandbox.home)
            write_archive(archive, {name: text.encode() for name, text in files.items()}, mode=0o444)
            sandbox.unpack(archive, self.path(sandbox))

    def path(self, sandbox: Sandbox) -> str:
        """Return the folder of the files inside."""
        return MOUNTED_AT if self.mounts else posixpath.join(sandbox.home, IN_HOME)

    def environment(self, sandbox: Sandbox) -> dict[str, str]:
        """Return the variables that lead every Python to the files."""
        return {"PYTHONPATH": self.path(sandbox), "PYTHONUSERBASE": self.path(sandbox)}

    def command(self, line: str, sandbox: Sandbox) -> str:
        """Return the line with the place in front of every PYTHONPATH that the line sets."""
        place = self.path(sandbox)
        return _PATHS.sub(lambda match: f"PYTHONPATH={place}{'' if match[1] is not None else ':'}", line)

    def _written(self, parent: Path) -> Path:
        """Return the folder with the files, after writing them if no other verification has."""
        # Everything that differs between the places of an engine.
        facts = repr((self._root, self._home, self._environments, sorted(self._modules)))
        folder = parent / hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        if folder.is_dir():
            return folder
        files = self._files(MOUNTED_AT, self._root, self._home)
        parent.mkdir(exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=parent, prefix=".draft-"))
        for file, text in files.items():
            path = draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, errors="surrogateescape")
            path.chmod(0o644)
        for each in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            each.chmod(0o755)  # the sandbox has another user
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(draft)  # another thread was first
        return folder

    def _files(self, place: str, root: str, home: str) -> Mapping[str, str]:
        load = f"sys.path.insert(0, {place!r}); import openenv_imports; sys.path.remove({place!r})"
        start = f"import sys; {load}; openenv_imports.install({place!r})\n"
        return {
            "sitecustomize.py": _SITECUSTOMIZE,
            "root": "\n".join([root, f"{home}/{OUTPUT}", *self._environments]),
            "known": "\n".join(sorted(self._modules)),
            **_guard_modules(),
            **{f"lib/python3.{minor}/site-packages/openenv.pth": start for minor in _MINORS},
        }


@cache
def _guard_modules() -> Mapping[str, str]:
    source = resources.files(__package__)
    return {name: source.joinpath(name).read_text("utf-8") for name in _MODULES}


def local_modules(content: PlaceContent) -> set[str]:
    """Return the modules that imports may find in the work folder before an installed module of that name.

    Each is `folder/name`, relative to the work folder, or `*/name` for any folder.
    """
    setup, verify_files = content.setup, {*content.verify_files}
    modules: set[str] = set()
    sources = [text for text in content.texts if ".py" in text]  # the others name no module
    if sources:
        texts = Texts(asked=sources, root=content.root)
        modules |= {f"*/{name}" for name in texts.modules}
        verify_files |= texts.python_files
    for file in (*setup.files, *verify_files):
        folder, base = posixpath.split(file)
        stem, _, ending = base.partition(".")
        if _CODE.fullmatch(ending):
            modules.add(f"{folder}/{stem}")
    verify_folders = {above for file in verify_files for above in ancestors(file)}
    for name in (setup.folders | verify_folders) - {""}:
        folder, base = posixpath.split(name)
        modules.add(f"{folder}/{base}")
    return {name for name in modules if "\n" not in name}
