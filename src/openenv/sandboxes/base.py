"""The sandbox protocol: the operations inside (`Sandbox`), the backends that start sandboxes (`Sandboxes`), and names.

`SandboxHandle`, `SandboxBackend` and `BgJob` are the narrow, structural shapes that existing code is written for;
`Sandbox` is the whole protocol, and each of ours is also a `SandboxHandle`. Everything is synchronous and may be called
from any thread; `kill` from another thread ends a running `exec` at once.
"""

from __future__ import annotations

import importlib
import math
import os
import posixpath
import shutil
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from openenv._lazy import UnknownPluginError, load_plugin
from openenv.errors import SandboxError, SandboxUnsupported
from openenv.sandboxes import trees
from openenv.sandboxes.host import ProcessOwner

HOME = "/home/user"
WORKDIR = "/home/user/workdir"
TIMED_OUT = 124
"""The exit code of a command that was killed because its time was over, as in timeout(1)."""

MAX_TREE = 512 * 1024 * 1024
"""The default size limit of anything copied out of a sandbox: a file inside can claim any size."""

FEATURES = frozenset({"isolation", "limits", "trees", "mounts", "ports", "expiry", "snapshots"})
"""Optional features of a backend: isolation from host and network, limits, killing whole process trees even when they
hide, mounts, exposed ports that nothing outside can reach, an end by itself when the time is over, snapshots."""

IMAGES = frozenset({"images", "network"})
"""What only backends of containers offer: an image and a work folder per sandbox, and sandboxes with a network."""

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]
Command = str | Sequence[str]
"""A shell line (`/bin/sh -c`), or an argument list without a shell."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command.

    A command ended by signal N has exit code 128 + N. If it could not be started, the code is 127 (no such program) or
    126 (not executable, no such folder to start in), with the reason in `stderr`.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """A stream was longer than `max_output` bytes; its beginning is kept."""
    duration_s: float = 0.0
    oom: bool = False
    """The sandbox ran out of memory while the command ran, and the kernel killed a process in it."""


@runtime_checkable
class BgJob(Protocol):
    """A command that runs in the background of a sandbox."""

    @property
    def pid(self) -> int:
        """Return the process id inside the sandbox."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutError when it is not there in time."""
        ...

    def kill(self) -> None:
        """Kill the job and every process that it started."""
        ...


@runtime_checkable
class SandboxHandle(Protocol):
    """The narrow shape of a sandbox that existing code is written for."""

    @property
    def sandbox_id(self) -> str:
        """Return a name that is unique on this machine."""
        ...

    def exec(
        self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float | None = 60
    ) -> ExecResult:
        """Run a shell line to its end."""
        ...

    def start_bg(self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None) -> BgJob:
        """Start a shell line and return at once."""
        ...

    def write_text(self, path: str, content: str) -> None:
        """Write a file, with its parent folders."""
        ...

    def read_text(self, path: str) -> str:
        """Return a file's text."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists at the path."""
        ...

    def kill(self) -> None:
        """End the sandbox and everything in it."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """The narrow shape of a backend."""

    def create(
        self, *, timeout_s: int = 900, envs: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None
    ) -> SandboxHandle:
        """Start a sandbox that ends after `timeout_s` seconds, without a call."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources of the host that a sandbox may use."""

    memory_mb: int = 2048
    pids: int = 512
    cpus: float = 2.0
    disk_mb: int = 2048
    """Size of the writable file systems: home, /tmp and the rest, together or each."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "pids", "cpus", "disk_mb"):
            _check_limit(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that is visible inside, read-only; all users must be able to read it."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Properties of a sandbox. A backend that cannot provide one of them raises `SandboxUnsupported`."""

    limits: Limits = field(default_factory=Limits)
    mounts: tuple[Mount, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    home: str = HOME
    timeout_s: float = 900.0
    """The sandbox ends after this many seconds, even if its owner is dead."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    from_snapshot: SandboxSnapshot | None = None
    """The initial files: those of another sandbox of the same backend and home."""
    image: str | None = None
    """The image to start instead of the backend's."""
    build: Path | None = None
    """A folder with a Dockerfile, to build `image` if the engine does not have it."""
    build_timeout_s: float = 600.0
    workdir: str | None = None
    """The folder that commands start in, which is writable; by default `workdir` in the home."""
    fills_workdir: bool = False
    """Whether the work folder begins with the image's content at that path; otherwise it begins empty."""
    folders: tuple[str, ...] = ()
    """Further folders that can be written; they begin empty."""
    network: bool = False
    """Whether the sandbox can reach the network of the engine."""

    def __post_init__(self) -> None:
        _check_text(self.envs)
        for folder in (*self.folders, *([] if self.workdir is None else [self.workdir])):
            check_folder(folder)
        if self.workdir is not None and f"{self.workdir}/".startswith(f"{self.home}/"):
            raise ValueError(f"the work folder {self.workdir} must be outside of the home, or be left out")
        _check_limit("timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command with all arguments of `Sandbox.exec` or `start_bg`, as backends get it."""

    cmd: Command
    envs: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    stdin: bytes | None = None
    on_output: OnOutput | None = None
    max_output: int | None = None
    """Bytes of each stream to keep; None for all."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("the argument list is empty; name a program")
        _check_text(self.envs, *self.argv, self.cwd or "")

    @property
    def argv(self) -> list[str]:
        """The argument list; a shell line becomes that of `/bin/sh`."""
        return ["/bin/sh", "-c", self.cmd] if isinstance(self.cmd, str) else list(self.cmd)


def _check_limit(name: str, value: float) -> None:
    """Raise ValueError for a limit that limits nothing, or leaves nothing."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number greater than 0, not {value!r}")


def check_folder(path: str) -> None:
    """Return if a separate folder can be mounted at a path inside.

    Raises:
        ValueError: The path is not absolute, not normalised, or a system folder.
    """
    if not path.startswith("/") or posixpath.normpath(path) != path or set(path) & set(":,\n\0"):
        raise ValueError(f"{path!r} must be an absolute path without '..', ':' and ','")
    if path in _SYSTEM_FOLDERS or path.startswith(("/proc/", "/sys/", "/dev/")):
        raise ValueError(f"{path!r} belongs to the system of the sandbox; choose a folder such as /app")


_SYSTEM_FOLDERS = frozenset(
    ["/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/tmp", "/usr", "/var"]
)


def _check_text(envs: Mapping[str, str], *words: str) -> None:
    """Raise ValueError for variables and words that no process can have."""
    if any("\0" in text for text in (*words, *envs, *envs.values())):
        raise ValueError("A command, its arguments, its folder and its environment cannot hold a NUL character.")
    for name in envs:
        if not name or "=" in name:
            raise ValueError(f"{name!r} is not the name of an environment variable.")


class SandboxSnapshot:
    """The files of a sandbox at one moment, in archives on the host. Also a context manager.

    The archives are removed by `close`, at the latest when this process ends. Those of a process that was killed are
    removed when the next snapshot is taken.

    Args:
        backend: The name of the sandbox's backend.
        home: The home of its user.
        folder: The folder of the archives.
        archives: The archive of each tree that is not empty, by its path inside.
    """

    def __init__(self, backend: str, home: str, folder: Path, archives: Mapping[str, Path]) -> None:
        self.backend = backend
        self.home = home
        self.archives = dict(archives)
        self._folder = folder
        self._free = weakref.finalize(self, _remove_as, os.getpid(), folder)

    @property
    def size(self) -> int:
        """The bytes that it takes on the host."""
        return sum(archive.stat().st_size for archive in self.archives.values())

    def fill(self, sandbox: Sandbox, backend: str) -> None:
        """Write everything into a fresh sandbox, which is closed if that fails; for backends.

        Raises:
            SandboxUnsupported: It is of another backend, or has another home: paths in files would not be right.
            SandboxError: The snapshot was closed, or the sandbox is too small for it.
        """
        try:
            if (backend, sandbox.home) != (self.backend, self.home):
                raise SandboxUnsupported(
                    f"The snapshot is of a sandbox of the backend {self.backend} with its home at {self.home}, not of "
                    f"one of {backend} at {sandbox.home}."
                )
            for path, archive in self.archives.items():
                try:
                    sandbox.unpack(archive, path)
                except OSError as error:
                    reason = str(error) if self._free.alive else "it was closed"
                    raise SandboxError(f"The snapshot cannot be unpacked: {reason}") from error
            sandbox.from_snapshot = self
        except BaseException:
            sandbox.close()
            raise

    def close(self) -> None:
        """Remove the archives."""
        self._free()

    def __enter__(self) -> SandboxSnapshot:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _remove_as(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # a forked child has no snapshots: those are its parent's
        shutil.rmtree(folder, ignore_errors=True)


class Sandbox(ABC):
    """A place to run commands that can reach only the files and sockets you pass in. Also a context manager.

    Paths inside are absolute, or relative to `workdir`. A backend implements the abstract methods, `_exec` and
    `_start_bg`.
    """

    sandbox_id: str
    home: str
    from_snapshot: SandboxSnapshot | None = None
    """The snapshot that it was opened from."""
    own_processes: int = 1
    """The number of processes inside that are the sandbox's own, and run all the time."""

    @property
    def workdir(self) -> str:
        """Return the folder that commands start in; it exists from the beginning."""
        return f"{self.home}/workdir"

    def exec(
        self,
        cmd: Command,
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = 60,
        stdin: bytes | None = None,
        on_output: OnOutput | None = None,
        max_output: int = 10 * 1024 * 1024,
    ) -> ExecResult:
        """Run a command to its end, with no input unless `stdin` is set.

        After `timeout` seconds the command and every process it started are killed, and the result has `timed_out`,
        exit code 124 and the output so far. A background process that outlives the command does not delay the result.
        `on_output` gets every byte as it comes, also those beyond `max_output`.

        Raises:
            SandboxGone: the sandbox ended, before or during the command.
        """
        return self._exec(CommandSpec(cmd, dict(envs or {}), cwd, stdin, on_output, max_output), timeout)

    def start_bg(
        self,
        cmd: Command,
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_output: OnOutput | None = None,
    ) -> BgJob:
        """Start a command and return at once; its output goes to `on_output`, from a thread, or nowhere."""
        return self._start_bg(CommandSpec(cmd, dict(envs or {}), cwd, None, on_output, 0))

    def _exec(self, command: CommandSpec, timeout: float | None) -> ExecResult:
        raise NotImplementedError

    def _start_bg(self, command: CommandSpec) -> BgJob:
        raise NotImplementedError

    @abstractmethod
    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return a file's content, at most `max_bytes` of it; FileNotFoundError, IsADirectoryError as usual."""

    @abstractmethod
    def write_bytes(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the sandbox's user, with its parent folders."""

    def read_text(self, path: str) -> str:
        """Return a file's text; bytes that are not UTF-8 become replacement characters."""
        return self.read_bytes(path).decode("utf-8", "replace")

    def write_text(self, path: str, content: str) -> None:
        """Write a text file as the sandbox's user, with its parent folders."""
        self.write_bytes(path, content.encode())

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists at the path."""

    def is_alive(self) -> bool:
        """Return whether the sandbox can still be used."""
        try:
            return self.exists("/")
        except SandboxError:
            return False

    def open_root(self) -> int:
        """Open the root folder inside from this machine, and return the descriptor, which the caller closes.

        Only a reader with `O_NOFOLLOW` at every step may use it: links inside lead to files of this machine.

        Raises:
            SandboxUnsupported: The sandbox is on another machine, or this process may not read it.
        """
        raise SandboxUnsupported(f"the files of a {type(self).__name__} cannot be read from outside")

    def count_entries(self, path: str, *, most: int) -> int:
        """Return the number of entries below a folder of the home, after restoring the user's access to both.

        Stops counting at `most + 1`. The user may have taken its own access away.

        Raises:
            NotADirectoryError: The folder is gone, or something else is in its place.
        """
        where = posixpath.join(self.workdir, path)
        done = self.exec(["/bin/sh", "-c", _COUNT, "sh", self.home, where, str(most + 2)], cwd="/")
        if done.exit_code != 0:
            raise NotADirectoryError(f"{path} is not a folder")
        try:
            return int(done.stdout) - 1  # `find` lists the folder itself
        except ValueError:
            raise SandboxError(f"The entries of {path} cannot be counted: {done.stdout[:100]!r}") from None

    @abstractmethod
    def pack(self, path: str, archive: Path, *, max_bytes: int = MAX_TREE) -> None:
        """Write the tree at `path` into a tar file of the host. Links stay links; devices and sockets are left out.

        Raises:
            SandboxError: the tree holds more than `max_bytes`.
        """

    @abstractmethod
    def unpack(self, archive: Path, path: str) -> None:
        """Unpack a tar file of the host below `path`, inside, as the sandbox's user: a hostile one harms only it."""

    def upload(self, source: Path, path: str) -> None:
        """Copy a file or a tree of the host into the sandbox."""
        if not source.is_dir():
            self.write_bytes(path, source.read_bytes(), mode=source.stat().st_mode & 0o777)
            return
        with _scratch_archive(source) as archive:
            with archive.open("wb") as file:
                trees.pack(str(source), file)
            self.unpack(archive, path)

    def download(self, path: str, target: Path) -> None:
        """Copy a file or a tree to the host. No entry lands outside `target`, even if the sandbox planted links."""
        try:
            content = self.read_bytes(path)
        except IsADirectoryError:
            with _scratch_archive(path) as archive:
                self.pack(path, archive)
                with archive.open("rb") as file:
                    trees.unpack(file, str(target), keep_outer_links=False, max_bytes=MAX_TREE)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(content)

    def snapshot(self, *, max_bytes: int = MAX_TREE) -> SandboxSnapshot:
        """Keep the files written in this sandbox so far, for a `SandboxSpec(from_snapshot=...)`.

        Keeps files, folders, links, their modes, and the times of files to the second. Hard links become separate
        files. Sockets are left out, because their processes are gone.

        Args:
            max_bytes: The most that a tree (the home, /tmp, /dev/shm) may hold.

        Raises:
            SandboxUnsupported: The backend has no snapshots, or something is in the sandbox that a snapshot would not
                have: a command in the background, a named pipe.
            SandboxTreeError: A tree holds more than `max_bytes`.
            SandboxGone: The sandbox has ended.
            OSError: The temporary folder of the host is full.
        """
        raise SandboxUnsupported(f"{type(self).__name__} has no snapshots; the backends local and docker do.")

    @abstractmethod
    def expose(self, socket: Path, *, port: int) -> str:
        """Let `http://127.0.0.1:PORT` inside reach a unix socket of the host, and nothing else; return that URL."""

    @abstractmethod
    def stop_processes(self) -> None:
        """Kill every process inside, also daemons that hide; files stay, new commands can be run."""

    @abstractmethod
    def kill(self) -> None:
        """End the sandbox and everything in it, from any thread; calls under way raise `SandboxGone`."""

    def close(self) -> None:
        """End the sandbox and free its processes, mounts, control groups and files on the host."""
        self.kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def _scratch_archive(tree: str | Path) -> Iterator[Path]:
    """Return a path for the archive of a tree; a ValueError of the block becomes a `SandboxError`."""
    with tempfile.TemporaryDirectory(prefix="openenv-tree-") as folder:
        try:
            yield Path(folder, "tree.tar")
        except ValueError as error:
            raise SandboxError(f"{tree}: {error}") from error


_COUNT = """
chmod u+rwx "$1"
[ -d "$2" ] && [ ! -L "$2" ] && chmod u+rwx "$2" || exit 1
find "$2" 2> /dev/null | head -n "$3" | wc -l
"""


# Prints everything that a snapshot cannot keep: processes other than the first one, this shell and its parents, and the
# first named pipe in each of the trees ($@).
_NOT_KEPT = """
chain=' 1 '; p=$$
while [ "$p" -gt 1 ]; do
  chain="$chain$p "; q=0
  while read -r key value rest; do [ "$key" = PPid: ] && q=$value; done < /proc/$p/status
  p=$q
done
for d in /proc/[0-9]*; do
  p=${d#/proc/}; name=; state=
  case "$chain" in *" $p "*) continue;; esac
  [ -O "$d" ] || continue
  while read -r key value rest; do
    case "$key" in Name:) name=$value;; State:) state=$value;; esac
  done < "$d/status" 2> /dev/null
  [ -z "$name" ] || [ "$state" = Z ] || echo "process $p ($name)"
done
for d; do
  find "$d" -type p 2> /dev/null | while read -r path; do echo "the named pipe $path"; break; done
done
"""


def root_of(pid: int) -> int:
    """Open the root folder of a process; for `Sandbox.open_root`.

    Raises:
        SandboxUnsupported: The process has ended, or this process may not read its files.
    """
    try:
        return os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxUnsupported(f"the files of a sandbox cannot be read from outside: {error.strerror}") from error


def refuse_snapshot(spec: SandboxSpec, backend: str) -> None:
    """Raise `SandboxUnsupported` for a spec with a snapshot; for backends without snapshots."""
    if spec.from_snapshot is not None:
        raise SandboxUnsupported(f"The backend {backend} has no snapshots; local and docker do.")


def refuse_image(spec: SandboxSpec, backend: str) -> None:
    """Raise `SandboxUnsupported` for a spec with an image, folders or a network; for backends without images."""
    if spec.image is not None or spec.workdir is not None or spec.folders:
        raise SandboxUnsupported(
            f"The backend {backend} starts no images and has no folders of a task's own; docker and kubernetes do."
        )
    if spec.network:
        raise SandboxUnsupported(f"The backend {backend} opens no network; docker and kubernetes do.")


def spec_from(spec: SandboxSpec | None, snapshot: SandboxSnapshot | None) -> SandboxSpec:
    """Return a spec with the snapshot of `open(from_snapshot=...)`; for backends."""
    spec = spec or SandboxSpec()
    return spec if snapshot is None else replace(spec, from_snapshot=snapshot)


def take_snapshot(sandbox: Sandbox, backend: str, *, max_bytes: int) -> SandboxSnapshot:
    """Pack the writable trees of a sandbox, if it has no other state; for backends.

    A snapshot consists of archives. Layers of an overlay would not work: if each sandbox has a different user ID, the
    next one could not change their files. `docker commit` would not work either, because it omits tmpfs.
    """
    places = [sandbox.home, "/tmp", "/dev/shm"]
    if not sandbox.workdir.startswith(f"{sandbox.home}/"):
        places.append(sandbox.workdir)
    _require_files_only(sandbox, places)
    sweep_snapshots()
    owner = str(ProcessOwner.current()).replace("/", "_")
    folder = Path(tempfile.mkdtemp(prefix=f"{_SNAPSHOT_FOLDER}{owner}~"))
    archives: dict[str, Path] = {}
    try:
        for number, path in enumerate(places):
            archive = folder / f"{number}.tar"
            sandbox.pack(path, archive, max_bytes=max_bytes)
            # /tmp and /dev/shm belong to root, so their own modes cannot be set inside.
            if path in (sandbox.home, sandbox.workdir) or trees.drop_root(archive):
                archives[path] = archive
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return SandboxSnapshot(backend, sandbox.home, folder, archives)


def _require_files_only(sandbox: Sandbox, places: Sequence[str]) -> None:
    deadline = time.monotonic() + _GRACE_S
    while True:
        look = sandbox.exec(["/bin/sh", "-c", _NOT_KEPT, "sh", *places], cwd="/")
        if look.exit_code != 0:
            raise SandboxError(f"The sandbox cannot be searched: exit code {look.exit_code}, {look.stderr.strip()}")
        if not look.stdout:
            return
        if time.monotonic() > deadline:
            what = ", ".join(look.stdout.splitlines()[:5])
            raise SandboxUnsupported(f"A snapshot has files, folders and links. In the sandbox there is also: {what}.")
        time.sleep(0.05)


_GRACE_S = 1.0
"""Time for processes to end: the parent of the last command does, and a `git gc` that a clone has started."""
_SNAPSHOT_FOLDER = "openenv-snapshot~"


def sweep_snapshots() -> None:
    """Remove the snapshots of processes that were killed; `rmtree` follows no links, and fails for other users'."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SNAPSHOT_FOLDER}*~*"):
        owner = ProcessOwner.parse(folder.name.split("~")[1].replace("_", "/"))
        if owner is not None and owner.is_dead():
            shutil.rmtree(folder, ignore_errors=True)


class Sandboxes(ABC):
    """A backend: starts sandboxes of one kind. Also a `SandboxBackend`."""

    name: str
    features: frozenset[str] = FEATURES
    """The `FEATURES` that this backend offers; `self_check` checks no others."""

    @abstractmethod
    def check(self) -> None:
        """Return if this backend can run here; otherwise raise `SandboxUnavailable` with the packages to install."""

    def require(self, spec: SandboxSpec) -> None:
        """Return if this backend can open such sandboxes, as far as that can be decided before a start.

        Raises:
            SandboxUnsupported: This backend supports no images, folders or networks.
            SandboxUnavailable: something that they need is missing here.
        """
        if not self.features >= IMAGES:
            refuse_image(spec, self.name)

    def fingerprint(self, spec: SandboxSpec) -> str:
        """Return a text that changes if commands could behave differently in such sandboxes.

        Results of checks on a task's initial files are kept under it. Backends add what they know of their images.

        Raises:
            SandboxUnavailable: the image of the spec cannot be got.
        """
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return " ".join((kind, self.name, *sorted(self.features), spec.image or ""))

    @abstractmethod
    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Start a sandbox."""

    def create(
        self, *, timeout_s: int = 900, envs: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None
    ) -> Sandbox:
        """Start a sandbox with default limits: the call of `SandboxBackend`."""
        return self.open(SandboxSpec(timeout_s=timeout_s, envs=dict(envs or {}), metadata=dict(metadata or {})))

    def leftovers(self) -> list[str]:
        """List what ended sandboxes of this process left on the host; normally nothing."""
        return []


BACKENDS = "openenv.sandboxes"
"""The entry-point group of backends. Another package adds a backend by registering its class here."""


def backend(name: str, **options: Any) -> Sandboxes:
    """Return the backend of that name.

    Args:
        name: A registered name (`local`, `docker`, `kubernetes`, `e2b`, `daytona`, `process`, or one that an installed
            package adds), or a class as `module:Class`. `process` isolates nothing and requires
            `i_know_there_is_no_isolation=True`. `module:Class` imports the module: never pass a name from an
            untrusted source.
        **options: Arguments for the class of the backend.

    Raises:
        ValueError: The name is not registered, or is not the name of a backend class.
        SandboxUnavailable: `process` without that option, or a package is missing.
    """
    if ":" in name:
        place, _, attribute = name.partition(":")
        backend_class = _imported(name, place, attribute)
    else:
        try:
            backend_class = load_plugin(BACKENDS, name, kind="sandbox backend")
        except UnknownPluginError as error:
            raise UnknownPluginError(f"{error}, or pass a class as module:Class") from None
    if not (isinstance(backend_class, type) and issubclass(backend_class, Sandboxes)):
        raise ValueError(f"{name} is not a sandbox backend; name a subclass of `openenv.sandboxes.Sandboxes`")
    return backend_class(**options)


def _imported(name: str, place: str, attribute: str) -> object:
    """Import an attribute of a module; None if the module does not have it."""
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module exists, and one of its imports fails
        raise ValueError(f"cannot import {place!r} for the sandbox backend {name!r}: no such module") from None
    return getattr(module, attribute, None)
