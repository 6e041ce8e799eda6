"""Control groups of local sandboxes, version 1 and 2: find a writable place, create, read and remove groups.

    <parent>/openenv~<boot and pid namespace>_<pid>_<start time>~<sandbox>      one folder in version 2,
                                                                                 one per controller in version 1

The middle of the name is the `ProcessOwner`, so that a later process removes exactly the groups of crashed owners.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes.base import Limits
from openenv.sandboxes.host import ProcessOwner

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_MOUNTS = Path("/proc/self/mountinfo")
_NAME = re.compile(r"openenv~(?P<owner>[^~]+)~\w+")
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_OVERHEAD_MB = 24
"""For PID 1 inside and the kernel's bookkeeping: files live in memory, and a full disk must not mean out of memory."""
_OVERHEAD_PIDS = 4
_SOCKETS = 64 * 1024 * 1024
_SOCKETS_FILE = "memory.kmem.tcp.limit_in_bytes"
"""The buffers of sockets. Version 1 counts them in no other limit, and the machine has one for all (`tcp_mem`)."""


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox: one folder in version 2, one for each controller in version 1."""

    folders: tuple[Path, ...]
    version: int

    def entry_files(self) -> list[str]:
        """Return the files to which a process with one thread writes `0` to enter.

        In version 1 that is `tasks`: a thread that moves itself need not wait for the rest of the system, which costs
        some 10 ms in `cgroup.procs`.
        """
        name = "cgroup.procs" if self.version == 2 else "tasks"
        return [f"{folder}/{name}" for folder in self.folders]

    def oom_kills(self) -> int:
        """Return how many processes were killed because memory ran out."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for folder in self.folders:
            try:
                file = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)  # `open` costs three times as much
            except OSError:
                continue
            try:
                kills = _OOM_KILLS.search(os.read(file, 4096))
            finally:
                os.close(file)
            return int(kills[1]) if kills else 0
        return 0

    def remove(self, *, within_s: float = 15.0) -> None:
        """Kill the remaining processes and remove it; the kernel may need some time after the last process."""
        for folder in self.folders:
            _remove(folder, time.monotonic() + within_s)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The places for groups of this process."""

    version: int
    parents: tuple[Path, ...]

    def create(self, owner: ProcessOwner, tail: str, limits: Limits) -> Group:
        """Make a group with these limits."""
        name = group_name(owner, tail)
        group = Group(tuple(parent / name for parent in self.parents), self.version)
        try:
            for folder in group.folders:
                os.mkdir(folder)
            for path, value in _settings(self, group, limits):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.write(file, value.encode())
                finally:
                    os.close(file)
        except OSError as error:
            group.remove()
            raise SandboxError(f"The control group {name} cannot be made: {error}") from error
        return group

    def names(self) -> Iterator[tuple[str, ProcessOwner]]:
        """Yield the sandboxes' groups that exist here, with their owners."""
        seen = set()
        for parent in self.parents:
            for folder in parent.glob("openenv~*"):
                name = _NAME.fullmatch(folder.name)
                owner = ProcessOwner.parse(name["owner"].replace("_", "/")) if name else None
                if owner is not None and folder.name not in seen:
                    seen.add(folder.name)
                    yield folder.name, owner

    def sweep(self) -> list[str]:
        """Remove the empty groups of dead owners and return their names."""
        swept = []
        for name in [name for name, owner in self.names() if owner.is_dead()]:
            try:
                Group(tuple(parent / name for parent in self.parents), self.version).remove(within_s=1.0)
            except SandboxError:  # its last processes are still ending: a later sweep removes it
                continue
            swept.append(name)
        return swept


def group_name(owner: ProcessOwner, tail: str) -> str:
    """Return the name of an owner's group."""
    return f"openenv~{str(owner).replace('/', '_')}~{tail}"


def find(cgroup: Path = Path("/proc/self/cgroup"), mounts: Path = _MOUNTS) -> Hierarchy:
    """Find a place for groups that limit memory, processes and cpu.

    Raises:
        SandboxUnavailable: This process cannot create groups; the text contains a remedy.
    """
    try:
        places, roots = _own_groups(cgroup.read_text()), _mounts(mounts.read_text())
    except OSError as error:
        raise SandboxUnavailable(f"Control groups cannot be found: {error}") from None
    if all(name in roots for name in CONTROLLERS):
        parents = [_inside(roots[name], places.get(name, "/")) for name in CONTROLLERS]
        refused = [str(parent) for parent in parents if not _can_make(parent)]
        if not refused:
            return Hierarchy(1, tuple(parents))
        raise SandboxUnavailable(_advice(f"no right to make control groups in {', '.join(refused)}"))
    if "" in roots:
        mount, _ = roots[""]
        parent = _version_2_parent(mount, _inside(roots[""], places.get("", "/")))
        if parent is not None:
            return Hierarchy(2, (parent,))
        raise SandboxUnavailable(_advice(f"no right to make control groups with limits below {mount}"))
    raise SandboxUnavailable(_advice("no control groups are mounted"))


def limit_sockets(pid: int) -> None:
    """Limit the memory of sockets in the control group of a process; version 2 does so without this.

    Raises:
        OSError: no right to do that.
    """
    places, roots = _own_groups(Path(f"/proc/{pid}/cgroup").read_text()), _mounts(_MOUNTS.read_text())
    if "memory" in roots and "memory" in places:
        file = _inside(roots["memory"], places["memory"]) / _SOCKETS_FILE
        if file.exists():
            file.write_text(str(_SOCKETS))


def _advice(problem: str) -> str:
    return (
        f"The limits of local sandboxes need control groups: {problem}. Run as root; or, as a user of a machine with "
        "systemd, start the program with 'systemd-run --user --scope -p Delegate=yes -- PROGRAM'; or do without limits "
        "for memory, processes and cpu: LocalSandboxes(require_cgroup=False)."
    )


def _settings(hierarchy: Hierarchy, group: Group, limits: Limits) -> Iterator[tuple[str, str]]:
    memory = str((limits.memory_mb + limits.disk_mb + _OVERHEAD_MB) * 1024 * 1024)  # tmpfs files live in memory, too
    pids = str(limits.pids + _OVERHEAD_PIDS)
    quota = max(1000, round(limits.cpus * _PERIOD_US))
    if hierarchy.version == 2:
        (folder,) = group.folders
        yield f"{folder}/memory.max", memory
        if os.path.exists(f"{folder}/memory.swap.max"):
            yield f"{folder}/memory.swap.max", "0"
        yield f"{folder}/pids.max", pids
        yield f"{folder}/cpu.max", f"{quota} {_PERIOD_US}"
        return
    in_memory, in_pids, in_cpu = group.folders
    yield f"{in_memory}/memory.limit_in_bytes", memory
    if os.path.exists(f"{in_memory}/memory.memsw.limit_in_bytes"):
        yield f"{in_memory}/memory.memsw.limit_in_bytes", memory
    if os.path.exists(f"{in_memory}/{_SOCKETS_FILE}"):
        yield f"{in_memory}/{_SOCKETS_FILE}", str(_SOCKETS)
    yield f"{in_pids}/pids.max", pids
    yield f"{in_cpu}/cpu.cfs_period_us", str(_PERIOD_US)
    yield f"{in_cpu}/cpu.cfs_quota_us", str(quota)


def _own_groups(text: str) -> dict[str, str]:
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _mounts(text: str) -> dict[str, tuple[Path, str]]:
    """Map each controller, and "" for version 2, to its mount point and the group that is mounted there."""
    mounted: dict[str, tuple[Path, str]] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if kind == "cgroup2":
            mounted.setdefault("", (Path(fields[4]), fields[3]))
        elif kind == "cgroup":
            for option in options.split(","):
                mounted.setdefault(option, (Path(fields[4]), fields[3]))
    return mounted


def _inside(mount: tuple[Path, str], group: str) -> Path:
    point, root = mount
    if root != "/" and (group == root or group.startswith(root + "/")):
        group = group[len(root) :]
    elif group.startswith("/.."):
        group = "/"
    return point / group.lstrip("/")


def _can_make(parent: Path) -> bool:
    return os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)


def _version_2_parent(mount: Path, own: Path) -> Path | None:
    """Return our group or the nearest ancestor whose children can have the controllers.

    A group that contains processes cannot enable controllers for its children (the "no internal processes" rule of
    version 2), so it is mostly one above.
    """
    for parent in (own, *own.parents):
        if not parent.is_relative_to(mount):
            break
        if _can_make(parent) and _gives_controllers(parent):
            return parent
    return None


def _gives_controllers(parent: Path) -> bool:
    try:
        missing = set(CONTROLLERS) - set((parent / "cgroup.subtree_control").read_text().split())
        if missing - set((parent / "cgroup.controllers").read_text().split()):
            return False
        if missing:
            (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))
    except OSError:
        return False
    return True


def _remove(folder: Path, deadline: float) -> None:
    while True:
        try:
            os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise SandboxError(f"The control group {folder} cannot be removed: {error}") from error
        for pid in _members(folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.002)


def _members(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split() if line != "0"]
    except OSError:
        return []
