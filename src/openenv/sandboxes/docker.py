"""Sandboxes in containers, through the `docker` or `podman` command line.

Each is one hardened container without a network, whose first process only waits, reaps and ends in time; every command
is an `exec` into it. Knows how such a container is started and ended; what is done inside is `shell`'s.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv import settings
from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes.base import Mount, Sandboxes, SandboxSpec
from openenv.sandboxes.docker_engine import Engine, EngineName, find_engine
from openenv.sandboxes.docker_image import HOST_IMAGE, ensure_host_image, host_environment, host_mounts
from openenv.sandboxes.marked_processes import kill_marked_outside, pid_namespace
from openenv.sandboxes.netns import listen_in
from openenv.sandboxes.owners import Owner
from openenv.sandboxes.relay import Exposure, Relay
from openenv.sandboxes.shell import ShellSandbox
from openenv.sandboxes.shell_run import Channel, ShellRun
from openenv.sandboxes.shell_script import READ_SCRIPT, framed, mark_kb

DEFAULT_IMAGE = "python:3.12-slim"
OWNER_LABEL = "openenv.owner"
BACKEND_LABEL = "openenv.backend"
_USER = "1000:1000"
_TMPFS = "rw,exec,nosuid,nodev"
_PULL_S = 600.0
_OVERHEAD_MB = 16
_DOUBTS = 5
_REMOVE_S = 20.0

# The first process is another user's than the commands, without any capability: they cannot signal it or look into it.
# `wait` reaps every orphan; and if its `sleep` is killed for want of memory, it goes on for the rest of the time.
_HOLD = """end=$(($(date +%s)+$1))
while r=$((end-$(date +%s))); [ $r -gt 0 ]; do sleep $r & wait; done"""


class DockerSandboxes(Sandboxes):
    """Starts sandboxes as containers.

    Args:
        image: Name of the image, which needs `/bin/sh` and `tar`; `host` shows the host's own system read-only.
            By default `OPENENV_SANDBOX_IMAGE` or `python:3.12-slim`.
        engine: `docker`, `podman`, or the first of them that is installed.
        host: The engine's address, as the engine's own option takes it.
        run_args: More options of `docker run`, put before the image.
    """

    name = "docker"

    def __init__(
        self,
        image: str | None = None,
        *,
        engine: EngineName = "auto",
        host: str | None = None,
        run_args: Sequence[str] = (),
    ) -> None:
        self.image = image or settings.sandbox_image() or DEFAULT_IMAGE
        self._engine_name: EngineName = engine
        self._host = host
        self._run_args = tuple(run_args)
        self._lock = threading.Lock()
        self._ready: _Ready | None = None
        self._relay = Relay()
        self._id = secrets.token_hex(8)
        self._open: set[str] = set()

    def check(self) -> None:
        """Return when containers can be started here; raise `SandboxUnavailable` with what to do when not."""
        self._prepare()

    def open(self, spec: SandboxSpec | None = None) -> DockerSandbox:
        """Start a container."""
        spec = spec or SandboxSpec()
        ready = self._prepare()
        name = f"openenv-{secrets.token_hex(8)}"
        self._open.add(name)
        try:
            ready.engine.tell(*self._run(ready, name, spec))
        except BaseException:
            self._remove(name)
            raise
        return DockerSandbox(ready.engine, name, spec, relay=self._relay, remove=self._remove)

    def leftovers(self) -> list[str]:
        """List the containers that this backend started and that should be gone."""
        if self._ready is None:
            return []
        label = f"label={BACKEND_LABEL}={self._id}"
        names = self._ready.engine.tell("ps", "-a", "--filter", label, "--format", "{{.Names}}").split()
        return sorted(set(names) - self._open)

    def _remove(self, name: str) -> None:
        """Remove a container, and return when it is gone."""
        engine = self._prepare().engine
        deadline = time.monotonic() + _REMOVE_S
        engine.ask("rm", "-f", "-v", name)
        while engine.ask("inspect", name).returncode == 0 and time.monotonic() < deadline:
            time.sleep(0.05)  # it ended by itself just now, and the engine is about to remove it
            engine.ask("rm", "-f", "-v", name)
        self._open.discard(name)

    def sweep(self) -> list[str]:
        """Remove the containers whose owner is dead, and return their ids; those of living owners stay."""
        engine = find_engine(self._engine_name, self._host)
        ids = engine.tell("ps", "-aq", "--no-trunc", "--filter", f"label={OWNER_LABEL}").split()
        if not ids:
            return []
        form = '{{.Id}} {{index .Config.Labels "' + OWNER_LABEL + '"}}'
        listed = engine.ask("inspect", "--format", form, *ids).stdout.decode("utf-8", "replace")
        dead = []
        for line in listed.splitlines():
            container, _, label = line.partition(" ")
            owner = Owner.parse(label.strip())
            if owner is not None and owner.is_dead():
                engine.ask("rm", "-f", "-v", container)
                dead.append(container)
        return dead

    def _prepare(self) -> _Ready:
        with self._lock:
            if self._ready is None:
                engine = find_engine(self._engine_name, self._host)
                engine.check()
                image = self.image
                mounts: tuple[Mount, ...] = ()
                envs = {"USER": "user", "LOGNAME": "user"}
                if image == HOST_IMAGE:
                    image, mounts = ensure_host_image(engine), host_mounts()
                    envs |= host_environment()
                else:
                    _ensure_image(engine, image)
                self.sweep()
                self._ready = _Ready(engine, image, mounts, envs, _cpus(engine))
            return self._ready

    def _run(self, ready: _Ready, name: str, spec: SandboxSpec) -> list[str]:
        limits = spec.limits
        uid, gid = _USER.split(":")
        owned = f"mode=0755,uid={uid},gid={gid}" if ready.engine.kind == "docker" else "mode=1777"  # podman has no uid=
        home, rest = max(1, limits.disk_mb * 3 // 4), max(1, limits.disk_mb // 8)
        memory = f"{limits.memory_mb + limits.disk_mb + _OVERHEAD_MB}m"  # files lie in memory, too
        labels = {OWNER_LABEL: str(Owner.current()), BACKEND_LABEL: self._id}
        labels |= {f"openenv.metadata.{key}": text for key, text in spec.metadata.items()}
        mounts = [*ready.mounts, *spec.mounts]
        return [
            *("run", "--detach", "--rm", "--pull", "never", "--name", name, "--hostname", "sandbox"),
            *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--pids-limit", str(limits.pids), "--cpus", f"{min(limits.cpus, ready.cpus):g}"),
            *("--memory", memory, "--memory-swap", memory, "--shm-size", f"{rest}m"),
            *("--user", "0:0", "--workdir", "/", "--log-driver", "none", "--ulimit", "core=0"),
            *("--stop-timeout", "0"),  # it ends at once or not at all, for it handles no signal
            *("--tmpfs", f"{spec.home}:{_TMPFS},size={home}m,{owned}"),
            *("--tmpfs", f"/tmp:{_TMPFS},size={rest}m,mode=1777"),
            *(word for key, text in ready.envs.items() for word in ("--env", f"{key}={text}")),
            *(word for mount in mounts for word in ("--mount", bind_option(mount))),
            *(word for key, text in labels.items() for word in ("--label", f"{key}={text}")),
            *self._run_args,
            *("--entrypoint", "/bin/sh", ready.image, "-c", _HOLD, "sh"),
            str(max(1, math.ceil(spec.timeout_s))),
        ]


@dataclass(frozen=True, slots=True)
class _Ready:
    """What was found out about the engine, and what its containers get."""

    engine: Engine
    image: str
    mounts: tuple[Mount, ...]
    envs: dict[str, str]
    cpus: float


class DockerSandbox(ShellSandbox):
    """One container."""

    oom_counters = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

    def __init__(
        self, engine: Engine, name: str, spec: SandboxSpec, *, relay: Relay, remove: Callable[[str], None]
    ) -> None:
        super().__init__(name, spec)
        self._engine = engine
        self._expires = time.monotonic() + spec.timeout_s
        self._relay = relay
        self._remove = remove
        self._exposures: list[Exposure] = []

    def _channel(self, script: str, *, has_input: bool) -> Channel:
        channel = self._engine.open_channel(
            "exec", "-i", "--user", _USER, self.sandbox_id, "/bin/sh", "-c", READ_SCRIPT
        )
        channel.send(framed(script))  # all of it is read before anything is answered
        return channel

    def _why_gone(self) -> str | None:
        for _ in range(_DOUBTS):
            done = self._engine.ask("inspect", "--format", "{{.State.Running}}", self.sandbox_id)
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
        """Kill a command and every process that it started: from outside where that can be done."""
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
            raise OSError("the container has no processes of its own")
        kill_marked_outside(namespace, mark=mark, lowest=lowest, spare=pid)

    def expose(self, socket: Path, *, port: int) -> str:
        """Let `http://127.0.0.1:PORT` inside reach a unix socket of the host.

        With the rights of root, the port is opened from outside and nothing runs inside for it. Otherwise a small relay
        runs inside, which needs `python3` there.
        """
        self._require_alive()
        try:
            listener = listen_in(self._network(), host="127.0.0.1", port=port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SandboxError(f"Port {port} is taken in sandbox '{self.sandbox_id}'.") from error
            return self._expose_by_tunnel(socket, port)
        self._exposures.append(self._relay.add(listener, socket))
        return f"http://127.0.0.1:{port}"

    def _network(self) -> Path:
        """Return the network namespace of the container, where its processes are of this machine."""
        there = Path(f"/proc/{self._first_process()}/ns/net")
        if there.stat().st_ino == os.stat("/proc/self/ns/net").st_ino:
            raise OSError("the container has no network of its own")
        return there

    def _first_process(self) -> int:
        """Return the host's pid of the container's first process; OSError where it is not of this machine."""
        if not self._engine.is_local:
            raise OSError("the engine runs elsewhere")
        done = self._engine.ask("inspect", "--format", "{{.State.Pid}} {{.Id}}", self.sandbox_id)
        pid, _, container = done.stdout.decode().strip().partition(" ")
        if not container or container not in Path(f"/proc/{pid}/cgroup").read_text():
            raise OSError("the container is no process of this machine")
        return int(pid)


def _ensure_image(engine: Engine, image: str) -> None:
    if engine.ask("image", "inspect", image).returncode == 0:
        return
    pulled = engine.ask("pull", image, timeout=_PULL_S)
    if pulled.returncode != 0:
        words = pulled.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no reason given"]
        raise SandboxUnavailable(
            f"The image '{image}' is not here and cannot be pulled ({words[0]}). Get it: {engine.kind} pull {image}. "
            f"Without a registry, name an image that you loaded, or use image='{HOST_IMAGE}', the host's own system."
        )


def _cpus(engine: Engine) -> float:
    form = "{{.NCPU}}" if engine.kind == "docker" else "{{.Host.CPUs}}"
    try:
        return float(engine.tell("info", "--format", form))
    except (SandboxError, ValueError):
        return float(os.cpu_count() or 1)


def bind_option(mount: Mount) -> str:
    """Return how `--mount` is told of a folder."""
    source, target = str(mount.source), mount.target
    fields = ["type=bind", f"source={source}", f"target={target}", "readonly"]
    return ",".join(f'"{field}"' if "," in field else field for field in fields)
