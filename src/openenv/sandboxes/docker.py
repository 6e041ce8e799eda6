"""The backend `docker`: sandboxes in containers, through the `docker` or `podman` command line.

One sandbox is one hardened container; `ShellSandbox` does everything inside it through `exec`:

    this process ── docker exec -i NAME /bin/sh ──> a command      user 1000, no capabilities, read-only root
                                                    ...            tmpfs: home (3/4 of disk_mb), /tmp (1/8)
                 ── docker run (once) ────────────> PID 1          user 0: sleeps, reaps, exits after timeout_s
                                                    no network; a port is opened from outside (`expose`)

On the engine's machine, root does two jobs from outside instead, because a hostile container cannot slow them there:
killing the processes of a command (`kill_marked_outside`) and opening a port (`listen_in`); and limits are set that
engines do not have (`limit_from_outside`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openenv import settings
from openenv.errors import SandboxError, SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import seccomp
from openenv.sandboxes.base import (
    FEATURES,
    IMAGES,
    MAX_TREE,
    Mount,
    Sandboxes,
    SandboxSnapshot,
    SandboxSpec,
    root_of,
    spec_from,
    take_snapshot,
)
from openenv.sandboxes.container_cli import OWNER_LABEL, ContainerCli, EngineName, bind_option, first_engine
from openenv.sandboxes.exposed_ports import Exposure, Relay
from openenv.sandboxes.host import ProcessOwner, limit_inside, limit_terminals, listen_in
from openenv.sandboxes.local.cgroups import limit_sockets
from openenv.sandboxes.shell import ShellSandbox, clean_archive
from openenv.sandboxes.shell_command import READ_SCRIPT, Channel, ShellRun, framed, mark_kb

DEFAULT_IMAGE = "python:3.12-slim"
BACKEND_LABEL = "openenv.backend"
_USER = "1000:1000"
_TMPFS = "rw,exec,nosuid,nodev"
_PULL_S = 600.0
_OVERHEAD_MB = 16
_BUILD_LINES = 15
_DOUBTS = 5
_REMOVE_S = 20.0

# The first process is another user's than the commands, without any capability: they cannot signal it or look into it.
# `wait` reaps every orphan; if its `sleep` is killed for lack of memory, the loop continues for the remaining time.
_HOLD = """end=$(($(date +%s)+$1))
while r=$((end-$(date +%s))); [ $r -gt 0 ]; do sleep $r & wait; done"""


class DockerSandboxes(Sandboxes):
    """Starts sandboxes as containers.

    Args:
        image: Name of the image, which needs `/bin/sh` and `tar`; `host` shows the host's own system read-only.
            By default `OPENENV_SANDBOX_IMAGE` or `python:3.12-slim`.
        engine: `docker`, `podman`, or the first of them that answers.
        host: The engine's address, as for its `--host` or `--url`.
        run_args: More options of `docker run`, put before the image.
    """

    name = "docker"
    features = FEATURES | IMAGES

    def __init__(
        self,
        image: str | None = None,
        *,
        engine: EngineName = "auto",
        host: str | None = None,
        run_args: Sequence[str] = (),
    ) -> None:
        chosen = image or settings.sandbox_image()
        self.image = chosen or DEFAULT_IMAGE
        self._is_chosen = chosen is not None
        self._engine_name: EngineName = engine
        self._host = host
        self._run_args = tuple(run_args)
        self._lock = threading.Lock()
        self._ready: _PreparedEngine | None = None
        self._image_lock = threading.Lock()
        self._images: dict[str, _ReadyImage] = {}
        self._image_ids: dict[str, str] = {}
        self._trees: tempfile.TemporaryDirectory[str] | None = None
        self._work_trees: dict[tuple[str, str], Path | None] = {}
        self._relay = Relay()
        self._id = secrets.token_hex(8)
        self._open: set[str] = set()

    def check(self) -> None:
        """Return if containers can be started here; otherwise raise `SandboxUnavailable` with a remedy.

        Looks for an image only if one was chosen. The default image is prepared when a sandbox needs it, because tasks
        may bring their images.
        """
        self._prepare()
        if self._is_chosen:
            self._image(SandboxSpec())

    def require(self, spec: SandboxSpec) -> None:
        """Return if the backend's own image is there, or the spec names another; that one is got by `open`."""
        if spec.image is None:
            self._image(spec)

    def fingerprint(self, spec: SandboxSpec) -> str:
        """Return a text with the ID of the image; a spec's image is built or pulled first."""
        name = self._image(spec).name
        with self._image_lock:
            if name not in self._image_ids:
                inspect = ("image", "inspect", "--format", "{{.Id}}", name)
                self._image_ids[name] = self._prepare().engine.output(*inspect).strip()
            return f"{super().fingerprint(spec)} {self._image_ids[name]}"

    def open(self, spec: SandboxSpec | None = None, *, from_snapshot: SandboxSnapshot | None = None) -> DockerSandbox:
        """Start a container; `from_snapshot` is short for that field of the spec."""
        spec = spec_from(spec, from_snapshot)
        ready = self._prepare()
        image = self._image(spec)
        name = f"openenv-{secrets.token_hex(8)}"
        self._open.add(name)
        try:
            with _profile(ready) as options:
                ready.engine.output(*self._run(ready, image, name, spec, options))
            sandbox = DockerSandbox(ready.engine, name, spec, relay=self._relay, remove=self._remove)
            sandbox.limit_from_outside()
            if spec.fills_workdir and spec.workdir is not None and spec.from_snapshot is None:
                self._fill(sandbox, image.name)
            if spec.from_snapshot is not None:
                spec.from_snapshot.fill(sandbox, self.name)
            return sandbox
        except BaseException:
            self._remove(name)
            raise

    def rebuild(self, image: str, folder: Path, *, timeout: float) -> None:
        """Build an image again, without the engine's build cache.

        Raises:
            SandboxUnavailable: that fails.
        """
        engine = self._prepare().engine
        with self._image_lock:
            build_image(engine, image, folder, timeout=timeout, is_cached=False)
            self._work_trees = {key: tree for key, tree in self._work_trees.items() if key[0] != image}
            self._image_ids.pop(image, None)

    def leftovers(self) -> list[str]:
        """List the containers that this backend started and that should be gone."""
        if self._ready is None:
            return []
        label = f"label={BACKEND_LABEL}={self._id}"
        names = self._ready.engine.output("ps", "-a", "--filter", label, "--format", "{{.Names}}").split()
        return sorted(set(names) - self._open)

    def _remove(self, name: str) -> None:
        """Remove a container, and return when it is gone."""
        self._prepare().engine.remove(name, within_s=_REMOVE_S)
        self._open.discard(name)

    def sweep(self) -> list[str]:
        """Remove the containers of dead owners and return their IDs; containers of living owners stay."""
        return first_engine(self._engine_name, self._host).sweep()

    def _prepare(self) -> _PreparedEngine:
        with self._lock:
            if self._ready is None:
                # Another engine has other images and limits: an outage of the first must not move sandboxes there.
                engine = first_engine(self._engine_name, self._host)
                engine.sweep()
                self._ready = _PreparedEngine(engine, _cpus(engine), _takes_profiles(engine))
            return self._ready

    def _image(self, spec: SandboxSpec) -> _ReadyImage:
        """Return the image of a spec; build or pull it first if the engine does not have it.

        Raises:
            SandboxUnavailable: that fails.
        """
        wanted = spec.image or self.image
        if wanted in self._images:
            return self._images[wanted]
        engine = self._prepare().engine
        with self._image_lock:  # several rollouts of one task build it once
            if wanted not in self._images:
                self._images[wanted] = _ready_image(engine, wanted, spec)
            return self._images[wanted]

    def _fill(self, sandbox: DockerSandbox, image: str) -> None:
        """Copy the image's files at the work folder into it; the engine is asked once for each image."""
        key = (image, sandbox.workdir)
        with self._image_lock:
            if self._trees is None:
                self._trees = tempfile.TemporaryDirectory(prefix="openenv-images-")
            if key not in self._work_trees:
                target = Path(self._trees.name, f"{secrets.token_hex(4)}.tar")
                most = sandbox.spec.limits.disk_mb << 20
                is_there = copy_from_image(self._prepare().engine, image, sandbox.workdir, target, max_bytes=most)
                self._work_trees[key] = target if is_there else None
            tree = self._work_trees[key]
        if tree is not None:
            sandbox.unpack(tree, sandbox.workdir)

    def _run(
        self, ready: _PreparedEngine, image: _ReadyImage, name: str, spec: SandboxSpec, options: Sequence[str]
    ) -> list[str]:
        limits = spec.limits
        uid, gid = _USER.split(":")
        owned = f"mode=0755,uid={uid},gid={gid}" if ready.engine.kind == "docker" else "mode=1777"  # podman has no uid=
        home, rest = max(1, limits.disk_mb * 3 // 4), max(1, limits.disk_mb // 8)
        memory = f"{limits.memory_mb + limits.disk_mb + _OVERHEAD_MB}m"  # files lie in memory, too
        labels = {OWNER_LABEL: str(ProcessOwner.current()), BACKEND_LABEL: self._id}
        labels |= {f"openenv.metadata.{key}": text for key, text in spec.metadata.items()}
        mounts = [*image.mounts, *spec.mounts]
        sizes = {spec.home: home, **({} if spec.workdir is None else {spec.workdir: home})}
        sizes |= {folder: rest for folder in spec.folders}
        return [
            *("run", "--detach", "--rm", "--pull", "never", "--name", name, "--hostname", "sandbox"),
            *(() if spec.network else ("--network", "none")),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--pids-limit", str(limits.pids), "--cpus", f"{min(limits.cpus, ready.cpus):g}"),
            *("--memory", memory, "--memory-swap", memory, "--shm-size", f"{rest}m"),
            *("--user", "0:0", "--workdir", "/", "--log-driver", "none", "--ulimit", "core=0"),
            *self._file_limit(ready.engine, limits.pids),
            *("--stop-timeout", "0"),  # it handles no signal, so waiting is useless
            *(word for at, size in sizes.items() for word in ("--tmpfs", f"{at}:{_TMPFS},size={size}m,{owned}")),
            *("--tmpfs", f"/tmp:{_TMPFS},size={rest}m,mode=1777"),
            *(word for key, text in image.envs.items() for word in ("--env", f"{key}={text}")),
            *(word for mount in mounts for word in ("--mount", bind_option(mount))),
            *(word for key, text in labels.items() for word in ("--label", f"{key}={text}")),
            *options,
            *self._run_args,
            *("--entrypoint", "/bin/sh", image.name, "-c", _HOLD, "sh"),
            str(max(1, math.ceil(spec.timeout_s))),
        ]

    def _file_limit(self, engine: ContainerCli, processes: int) -> list[str]:
        """Return the option that limits a container's open files, if the engine runs on this machine."""
        if engine.kind != "docker" or not engine.is_local:  # podman may have no right to it
            return []
        most = limit_inside(processes)
        return ["--ulimit", f"nofile={min(1024, most)}:{most}"]


@dataclass(frozen=True, slots=True)
class _PreparedEngine:
    """Facts about the engine, and the options of its containers."""

    engine: ContainerCli
    cpus: float
    takes_profiles: bool
    """Whether its containers can use our system call filter."""


@dataclass(frozen=True, slots=True)
class _ReadyImage:
    """An image that the engine has, and the options of its containers."""

    name: str
    mounts: tuple[Mount, ...] = ()
    envs: dict[str, str] = field(default_factory=lambda: {"USER": "user", "LOGNAME": "user"})


def _ready_image(engine: ContainerCli, image: str, spec: SandboxSpec) -> _ReadyImage:
    if image == HOST_IMAGE:
        ready = _ReadyImage(ensure_host_image(engine), host_mounts())
        ready.envs.update(host_environment())
        return ready
    if engine.has_image(image):
        return _ReadyImage(image)
    if spec.build is not None:
        build_image(engine, image, spec.build, timeout=spec.build_timeout_s)
        return _ReadyImage(image)
    if (problem := engine.pull(image, timeout=_PULL_S)) is not None:
        raise SandboxUnavailable(
            f"{problem} Without a registry, name an image that you loaded, or use image='{HOST_IMAGE}', "
            "the host's own system."
        )
    return _ReadyImage(image)


def build_image(engine: ContainerCli, image: str, folder: Path, *, timeout: float, is_cached: bool = True) -> None:
    """Build an image from a folder with a Dockerfile.

    Raises:
        SandboxUnavailable: The Dockerfile is missing, or the build fails; the text ends with the engine's last lines.
    """
    if not (folder / "Dockerfile").is_file():
        raise SandboxUnavailable(f"the image '{image}' cannot be built: {folder} contains no Dockerfile")
    options = () if is_cached else ("--no-cache",)
    done = engine.run("build", "-t", image, *options, str(folder), timeout=timeout)
    if done.returncode != 0:
        text = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace").strip()
        last = "\n".join(text.splitlines()[-_BUILD_LINES:])
        raise SandboxUnavailable(f"The image '{image}' cannot be built from {folder}:\n{last}")


def copy_from_image(engine: ContainerCli, image: str, path: str, target: Path, *, max_bytes: int) -> bool:
    """Write the tree that an image holds at a path into a tar file; return whether it holds one there.

    Raises:
        SandboxError: the engine cannot copy it, or it is larger than `max_bytes`.
    """
    label = f"{OWNER_LABEL}={ProcessOwner.current()}"
    container = engine.output("create", "--pull", "never", "--label", label, "--entrypoint", "/bin/sh", image)
    raw = target.with_suffix(".raw")
    try:
        with raw.open("wb") as file:
            copy = subprocess.run(
                engine.argv("cp", f"{container}:{path}/.", "-"),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.PIPE,
                timeout=_PULL_S,
                check=False,
            )
        if copy.returncode != 0:
            reason = copy.stderr.decode("utf-8", "replace").strip()
            if "o such" in reason or "ould not find" in reason or "ot exist" in reason or "ot find" in reason:
                return False
            raise SandboxError(f"The folder {path} of the image '{image}' cannot be copied: {reason}")
        clean_archive(raw, target, max_bytes=max_bytes)
        return True
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"The folder {path} of the image '{image}' was not copied in {_PULL_S:g} s.") from error
    finally:
        raw.unlink(missing_ok=True)
        engine.remove(container, within_s=_REMOVE_S)


class DockerSandbox(ShellSandbox):
    """One container."""

    own_processes = 2  # the shell and the `sleep` of `_HOLD`
    oom_counters = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

    def __init__(
        self, engine: ContainerCli, name: str, spec: SandboxSpec, *, relay: Relay, remove: Callable[[str], None]
    ) -> None:
        super().__init__(name, spec, quota=relay.quota)
        self._engine = engine
        self._expires = time.monotonic() + spec.timeout_s
        self._relay = relay
        self._remove = remove
        self._exposures: list[Exposure] = []

    def _channel(self, script: str, *, has_input: bool) -> Channel:
        channel = self._engine.open_channel(
            "exec", "-i", "--user", _USER, self.sandbox_id, "/bin/sh", "-c", READ_SCRIPT
        )
        channel.send(framed(script))  # the shell reads all of it before it answers
        return channel

    def _why_gone(self) -> str | None:
        for _ in range(_DOUBTS):
            done = self._engine.run("inspect", "--format", "{{.State.Running}}", self.sandbox_id)
            if done.stdout.strip() != b"true":
                return "expired" if time.monotonic() > self._expires - 2 else "its container ended"
            if self._control_once(":").endswith("done"):
                return None
            time.sleep(0.2)  # it is too full for another command, or the engine has not yet noticed that it is dead
        return None

    def _destroy(self) -> None:
        for exposure in self._exposures:
            exposure.close()
        self._remove(self.sandbox_id)

    def kill_run(self, run: ShellRun) -> None:
        """Kill a command and all its descendants, from outside if possible."""
        try:
            self._kill_outside(run.mark, self._lowest)
        except OSError:
            super().kill_run(run)

    def _kill_all(self) -> None:
        try:
            self._kill_outside(mark_kb(0), mark_kb(0))  # every command's mark is lower
        except OSError:
            super()._kill_all()

    def _kill_outside(self, mark: int, lowest: int) -> None:
        self._require_alive()
        pid = self._first_process()
        namespace = pid_namespace(pid)
        if namespace == pid_namespace(os.getpid()):
            raise OSError("the container shares the processes of this machine")
        kill_marked_outside(namespace, mark=mark, lowest=lowest, spare=pid)

    def open_root(self) -> int:
        self._require_alive()
        try:
            return root_of(self._first_process())
        except OSError as error:
            raise SandboxUnsupported(f"the files of a container cannot be read from outside: {error}") from error

    def snapshot(self, *, max_bytes: int = MAX_TREE) -> SandboxSnapshot:
        return take_snapshot(self, DockerSandboxes.name, max_bytes=max_bytes)

    def expose(self, socket: Path, *, port: int) -> str:
        """Let `http://127.0.0.1:PORT` inside reach a unix socket of the host.

        With the rights of root, the port is opened from outside and nothing runs inside for it. Otherwise a small relay
        runs inside, which needs `python3` there.
        """
        self._require_alive()
        try:
            network = Path(f"/proc/{self._first_process()}/ns/net")
            if network.stat().st_ino == os.stat("/proc/self/ns/net").st_ino:
                raise OSError("the container shares the network of this machine")
            listener = listen_in(network, host="127.0.0.1", port=port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SandboxError(f"Port {port} is taken in sandbox '{self.sandbox_id}'.") from error
            return super().expose(socket, port=port)
        self._exposures.append(self._relay.add(listener, socket))
        return f"http://127.0.0.1:{port}"

    def limit_from_outside(self) -> None:
        """Limit terminals, and the memory of sockets on control groups of version 1, if this process has the rights."""
        if os.geteuid() != 0:
            return
        with contextlib.suppress(OSError):
            pid = self._first_process()
            limit_terminals(pid)
            limit_sockets(pid)

    def _first_process(self) -> int:
        """Return the host's PID of the container's first process; raise OSError if it runs on another machine."""
        if not self._engine.is_local:
            raise OSError("the engine runs on another machine")
        done = self._engine.run("inspect", "--format", "{{.State.Pid}} {{.Id}}", self.sandbox_id)
        pid, _, container = done.stdout.decode().strip().partition(" ")
        if not container or container not in Path(f"/proc/{pid}/cgroup").read_text():
            raise OSError("the container is not a process of this machine")
        return int(pid)


def _cpus(engine: ContainerCli) -> float:
    form = "{{.NCPU}}" if engine.kind == "docker" else "{{.Host.CPUs}}"
    try:
        return float(engine.output("info", "--format", form))
    except (SandboxError, ValueError):
        return float(os.cpu_count() or 1)


def _takes_profiles(engine: ContainerCli) -> bool:
    form = "{{json .SecurityOptions}}" if engine.kind == "docker" else "{{.Host.Security.SECCOMPEnabled}}"
    try:
        answer = engine.output("info", "--format", form)
    except SandboxError:
        return False
    # podman reads the file on the machine that it runs on
    return "name=seccomp" in answer if engine.kind == "docker" else answer == "true" and engine.is_local


@contextlib.contextmanager
def _profile(ready: _PreparedEngine) -> Iterator[list[str]]:
    """Write the system call filter into a file, which the engine's command line reads; return the option."""
    if not ready.takes_profiles:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", prefix="openenv-seccomp-", suffix=".json") as file:
        json.dump(seccomp.container_profile(), file)
        file.flush()
        yield ["--security-opt", f"seccomp={file.name}"]


# The image `host`, for machines that cannot pull one: it holds only empty folders, a user and links, and is made in a
# moment; the host's own /usr and libraries are bound into each container, read-only.


HOST_IMAGE = "host"
"""The name that asks for this image."""

_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr", "var", "var/tmp")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_FROM_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ca-certificates"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted"),
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def ensure_host_image(engine: ContainerCli) -> str:
    """Return the name of the image; build it first if the engine does not have it."""
    content = _rootfs()
    name = f"openenv-host:{hashlib.sha256(content).hexdigest()[:12]}"
    if not engine.has_image(name):
        engine.output("import", "-", name, data=content)
    return name


def host_mounts() -> tuple[Mount, ...]:
    """Return what containers of the image see of the host: its programs and libraries, and the running Python."""
    wanted = [Path("/usr"), *(Path("/", name) for name in _SYSTEM), *(Path("/etc", name) for name in _FROM_ETC)]
    paths = [path for path in wanted if path.exists() and not (path.is_symlink() and path.parent == Path("/"))]
    for place in dict.fromkeys([sys.base_prefix, sys.base_exec_prefix]):
        python = Path(place).resolve()
        if not any(python == path or path in python.parents for path in paths):
            paths.append(python)
    return tuple(Mount(path.resolve(), str(path)) for path in paths)


def host_environment() -> dict[str, str]:
    """Return the variables of the image's containers. PATH begins with the running Python if it is not in `/usr`."""
    python = Path(sys.base_prefix).resolve()
    elsewhere = Path("/usr") not in [python, *python.parents]
    return {"PATH": f"{python}/bin:{_PATH}" if elsewhere else _PATH, "LANG": "C.UTF-8"}


def _rootfs() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "var/tmp") else 0o755
            tar.addfile(folder)
        for name in _SYSTEM:
            here = Path("/", name)
            if here.is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(here)
                tar.addfile(link)
        for name, text in _FILES.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(text), 0o644
            tar.addfile(file, io.BytesIO(text.encode()))
    return out.getvalue()


# Killing a command from outside: what `shell_command.kill_marked` does inside, but not slowed by a container full
# of busy processes. Needs root, and an engine on this machine.


_PATIENCE_S = 20.0


def pid_namespace(pid: int) -> int:
    """Return the number of the pid namespace of a process.

    Raises:
        OSError: The process does not exist, or this process may not inspect it.
    """
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def kill_marked_outside(namespace: int, *, mark: int, lowest: int, spare: int) -> None:
    """Kill every process of a pid namespace with a mark (in KB), or with one below all marks in use; spare one process.

    All of them are stopped first, and killed when they cannot fork any more.

    Raises:
        OSError: This process may not do that, or may not inspect every process of the machine.
    """
    stopped: set[int] = set()
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        marked, some_vanished = _look(namespace, mark * 1024, lowest * 1024, spare)
        new = marked.keys() - stopped
        waiting = marked.keys() - killed
        if not marked and not some_vanished:
            return
        if new:
            stopped |= {pid for pid in new if _signal(pid, signal.SIGSTOP)}
        elif all(marked[pid] in "Tt" for pid in waiting) and not some_vanished:
            killed |= {pid for pid in waiting if _signal(pid, signal.SIGKILL)}
        else:
            time.sleep(0.001)
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _look(namespace: int, mark: int, lowest: int, spare: int) -> tuple[dict[int, str], bool]:
    """Return the marked processes that live, with their states, and whether some vanished before they were looked at.

    Those may have left children.
    """
    marked: dict[int, str] = {}
    some_vanished = False
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == spare:
            continue
        try:
            if pid_namespace(int(name)) != namespace:
                continue
            limit, state = _hard_limit(name), _state(name)
        except (FileNotFoundError, ProcessLookupError):
            some_vanished = True
            continue
        if state not in "ZX" and limit is not None and (limit == mark or limit < lowest):
            marked[int(name)] = state
    return marked, some_vanished


def _hard_limit(pid: str) -> int | None:
    with open(f"/proc/{pid}/limits", "rb") as file:
        for line in file:
            if line.startswith(b"Max resident set"):
                hard = line.split()[4]
                return int(hard) if hard.isdigit() else None
    raise ProcessLookupError(pid)


def _state(pid: str) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1].decode()


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
