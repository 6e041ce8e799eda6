"""The backend `local`: sandboxes on this machine, without a service, an image or an account.

    this process (owner)                      the sandbox: own pid, mount, net, ipc, uts and cgroup namespace
    ────────────────────                      ─────────────────────────────────────────────────────────────────
    LocalSandboxes.open ── spawns ──> sh ──exec──> bwrap ──> PID 1: init_process.py, as a separate user
    LocalSandbox ────── control socket (requests) ─────────>   │
                 <───── one reply channel per request ──────   ├─ supervisor of command 1 ── the command, its children
                                                               └─ supervisor of command 2 ── ...

    cgroup openenv~<owner>~<name>: memory, pids, cpu of everything on the right (`cgroups`)
    seccomp filter on everything on the right (`seccomp`); file system laid out by `bubblewrap`

When the control socket closes, because the owner closed it or died, PID 1 ends and the kernel kills the whole pid
namespace. Only the cgroup's empty folder can be left behind by a crash; the next backend that starts removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import secrets
import socket as sockets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from openenv import settings
from openenv.errors import SandboxError, SandboxGone, SandboxTreeError, SandboxUnavailable
from openenv.sandboxes import trees
from openenv.sandboxes.base import (
    FEATURES,
    MAX_TREE,
    CommandSpec,
    ExecResult,
    Sandbox,
    Sandboxes,
    SandboxSnapshot,
    SandboxSpec,
    refuse_image,
    spec_from,
    take_snapshot,
)
from openenv.sandboxes.exposed_ports import Relay
from openenv.sandboxes.host import ProcessOwner
from openenv.sandboxes.local import bubblewrap, cgroups
from openenv.sandboxes.local.bubblewrap import InitReply, LaunchKit, Processes, ReplyChannel, SandboxUser, launch
from openenv.sandboxes.local.cgroups import Hierarchy
from openenv.sandboxes.streams import Pipes, follow_output, run_to_end, slices

with contextlib.suppress(ImportError):  # Windows does not have it, and never uses it
    import fcntl

_KILLED = 128 + 9
_UID = 1000


def exit_code(status: int) -> int:
    """Return the exit code of a wait status: the program's code, or 128 plus the number of the signal."""
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF


class LocalJob:
    """A command that runs in the background."""

    def __init__(self, sandbox: LocalSandbox, number: int, pid: int, channel: ReplyChannel) -> None:
        self._sandbox = sandbox
        self._number = number
        self._pid = pid
        self._channel = channel
        self._lock = threading.Lock()
        self._code: int | None = None
        self.reader: threading.Thread | None = None
        """The thread that passes its output on."""

    @property
    def pid(self) -> int:
        return self._pid

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError("the job still runs")
        try:
            if self._code is None:  # one thread at a time may read the channel, and the exit code comes once
                reply = self._channel.receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
                code = self._sandbox.exit_code_in(reply)
                self._code = _KILLED if code is None else code
                self._channel.close()
        finally:
            self._lock.release()
        if self.reader is not None and self.reader is not threading.current_thread():
            self.reader.join(0.5)  # for the last output; a left-over process may hold the pipe open
        return self._code

    def kill(self) -> None:
        with contextlib.suppress(SandboxGone):  # then it is dead
            self._sandbox.kill_job(self._number)


_CHUNK = 256 * 1024
_SILENCE_S = 60.0
"""The longest silence of PID 1 while it works on a request."""


class LocalSandbox(Sandbox):
    """A sandbox made with bubblewrap."""

    def __init__(
        self, sandbox_id: str, spec: SandboxSpec, processes: Processes, path: str, relay: Callable[[], Relay]
    ) -> None:
        self.sandbox_id = sandbox_id
        self.home = spec.home
        self.spec = spec
        self._processes = processes
        self._relay = relay
        self._jobs = itertools.count(1)
        self._reason: str | None = None
        user = {"HOME": self.home, "USER": "user", "LOGNAME": "user", "SHELL": "/bin/sh"}
        self._environment = {"PATH": path, **user, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **spec.envs}
        self._free = weakref.finalize(self, processes.end)  # for a sandbox that is dropped and not closed

    # Commands

    def _exec(self, command: CommandSpec, timeout: float | None) -> ExecResult:
        kills = self._oom_kills()  # of the whole sandbox: the kernel does not count them by command
        job = next(self._jobs)
        with Pipes.open(with_stdin=command.stdin is not None) as pipes, self._start(job, command, pipes) as channel:
            result = run_to_end(
                command,
                timeout,
                pipes,
                end=channel.fileno(),
                exit_code=lambda: self.exit_code_in(channel.receive(_SILENCE_S)),
                kill=lambda: self.kill_job(job),
            )
        return replace(result, oom=True) if self._oom_kills() > kills else result

    def _start_bg(self, command: CommandSpec) -> LocalJob:
        number = next(self._jobs)
        pipes = Pipes.open(with_stdin=False) if command.on_output is not None else None
        with contextlib.ExitStack() as failing:
            if pipes is not None:
                failing.callback(pipes.close)
            channel = failing.enter_context(self._start(number, command, pipes))
            first = self._reply(channel)
            if first.kind == "e":
                raise SandboxError(f"The command cannot be started: {os.strerror(first.number)}.")
            failing.pop_all()
        job = LocalJob(self, number, first.number, channel)
        if pipes is not None and command.on_output is not None:
            job.reader = follow_output(pipes, command.on_output)
        return job

    def stop_processes(self) -> None:
        self._request({"op": "stop"})

    # Files

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        limit = MAX_TREE + 1 if max_bytes is None else max_bytes
        parts: list[bytes] = []
        self._copy({"op": "read", "limit": limit}, path, lambda end: _receive(end, parts.append))
        content = b"".join(parts)
        if max_bytes is None and len(content) > MAX_TREE:
            raise SandboxError(f"{path} holds more than {MAX_TREE} bytes; pass max_bytes to read the beginning.")
        return content

    def write_bytes(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._copy({"op": "write", "mode": mode}, path, lambda end: _send(end, content))

    def exists(self, path: str) -> bool:
        try:
            self._kind(path)
        except OSError:
            return False
        return True

    def open_root(self) -> int:
        root = self._processes.open_root()
        if (gone := self._gone()) is not None:  # then the kernel may have given its PID to another process
            os.close(root)
            raise gone
        return root

    def count_entries(self, path: str, *, most: int) -> int:
        where, home = self._path(path), os.fsencode(self.home)
        request = {"op": "count", "job": next(self._jobs), "path": where, "home": home, "most": most}
        reply = self._request(request)
        try:
            reply.raise_for_path(path)
        except FileNotFoundError as error:
            raise NotADirectoryError(error.errno, f"{path} is not a folder") from None
        return reply.number

    def pack(self, path: str, archive: Path, *, max_bytes: int = MAX_TREE) -> None:
        try:
            with archive.open("wb") as file:
                self._copy({"op": "pack"}, path, lambda end: _receive(end, file.write, max_bytes))
        except BaseException:
            archive.unlink(missing_ok=True)
            raise

    def unpack(self, archive: Path, path: str) -> None:
        with archive.open("rb") as file:
            self._copy({"op": "unpack"}, path, lambda end: end.sendfile(file))

    def upload(self, source: Path, path: str) -> None:
        # Streamed: neither memory nor the temporary folder of the host has to hold it.
        if source.is_dir():
            try:
                self._copy({"op": "unpack"}, path, lambda end: _send_tree(end, source))
            except ValueError as error:
                raise SandboxError(f"{source}: {error}") from error
            return
        with source.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            self._copy({"op": "write", "mode": mode}, path, lambda end: end.sendfile(file))

    def download(self, path: str, target: Path) -> None:
        if self._kind(path) == b"d":
            try:
                self._copy({"op": "pack"}, path, lambda end: _receive_tree(end, target))
            except ValueError as error:
                raise SandboxError(f"{path}: {error}") from error
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        try:
            with target.open("wb") as file:
                request = {"op": "read", "limit": MAX_TREE + 1}
                self._copy(request, path, lambda end: _receive(end, file.write, MAX_TREE))
        except (OSError, SandboxError):
            target.unlink(missing_ok=True)
            raise

    def snapshot(self, *, max_bytes: int = MAX_TREE) -> SandboxSnapshot:
        return take_snapshot(self, LocalSandboxes.name, max_bytes=max_bytes)

    # Ports

    def expose(self, socket: Path, *, port: int) -> str:
        """Let a port inside reach a unix socket of the host.

        The port is opened inside and accepted on outside, so that no process of the sandbox is in between.
        """
        with self._call({"op": "listen", "port": port}) as channel:
            reply, fd = channel.receive_fd(_SILENCE_S)
        if reply is None:
            raise self._gone() or SandboxError("The sandbox did not open the port.")
        if reply.kind != "o" or fd is None:
            raise SandboxError(f"Port {port} cannot be opened inside: {os.strerror(reply.number)}.")
        exposure = self._relay().add(sockets.socket(fileno=fd), socket)
        self._processes.exposures.append(exposure)
        if (gone := self._gone()) is not None:  # another thread may have ended it in between
            exposure.close()
            raise gone
        return f"http://127.0.0.1:{port}"

    # The end

    def is_alive(self) -> bool:
        return self._gone() is None

    def kill(self) -> None:
        self._end("killed")

    def close(self) -> None:
        self._end("closed")

    def abandon(self) -> None:
        """Close our end in a forked child of the owner: the sandbox belongs to the parent."""
        self._reason = "it belongs to the parent process"
        self._free.detach()
        self._processes.abandon()

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = self._reported_end() or reason  # it may have expired before it was closed
        self._processes.end()
        self._free.detach()

    def _gone(self) -> SandboxGone | None:
        """Return the error that says why the sandbox is gone; None while it is not."""
        if self._reason is None:
            self._reason = self._reported_end()
        return None if self._reason is None else SandboxGone(self.sandbox_id, self._reason)

    def _reported_end(self) -> str | None:
        reason = self._processes.control.end_reason()
        if reason is None or reason:  # it runs, or PID 1 sent "expired" as its last packet
            return reason
        return "out of memory" if self._oom_kills() else "its first process ended"

    def _oom_kills(self) -> int:
        group = self._processes.group
        return 0 if group is None else group.oom_kills()

    # Requests

    def _start(self, job: int, command: CommandSpec, pipes: Pipes | None) -> ReplyChannel:
        environment = {**self._environment, **command.envs}
        request = {
            "op": "exec",
            "job": job,
            "argv": [os.fsencode(part) for part in command.argv],
            "env": {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            "cwd": self._path(command.cwd or self.workdir),
            "stdio": (pipes is not None and pipes.stdin is not None, pipes is not None, pipes is not None),
        }
        try:
            return self._call(request, pipes.theirs if pipes is not None else [])
        finally:
            if pipes is not None:
                pipes.close_theirs()

    def exit_code_in(self, reply: InitReply | None) -> int | None:
        """Return the exit code in a reply; None for a reply before the end.

        Raises:
            SandboxGone: The sandbox ended before it replied.
            SandboxError: The command could not be started.
        """
        if reply is None:
            if (gone := self._gone()) is not None:
                raise gone
            return _KILLED  # a process inside killed its supervisor, and with it the command
        if reply.kind == "e":
            raise SandboxError(f"The command cannot be started: {os.strerror(reply.number)}.")
        return exit_code(reply.number) if reply.kind == "x" else None

    def kill_job(self, job: int) -> None:
        """Kill a command and every process that it started."""
        self._request({"op": "kill", "job": job})

    def _kill_quietly(self, job: int) -> None:
        with contextlib.suppress(SandboxError):
            self.kill_job(job)

    def _kind(self, path: str) -> bytes:
        request = {"op": "kind", "job": next(self._jobs), "path": self._path(path)}
        reply = self._request(request)
        reply.raise_for_path(path)
        return reply.value

    def _copy(self, request: Mapping[str, object], path: str, copy: Callable[[sockets.socket], object]) -> None:
        """Do a file operation through a socket. An error from the other side takes precedence over ours."""
        job = next(self._jobs)
        ours, theirs = sockets.socketpair()
        with ours:
            with theirs:
                channel = self._call({**request, "job": job, "path": self._path(path)}, [theirs.fileno()])
            with channel:
                ours.settimeout(_SILENCE_S)
                broken = False
                try:
                    copy(ours)
                except ConnectionError:
                    broken = True
                except BaseException as error:
                    self._kill_quietly(job)
                    if isinstance(error, TimeoutError):
                        raise SandboxError(f"{path}: the sandbox sends or takes nothing.") from error
                    raise
                ours.close()  # the end of the data
                self._reply(channel).raise_for_path(path)
                if broken:
                    raise SandboxError(f"{path}: the sandbox ended the transfer early")

    def _request(self, request: Mapping[str, object]) -> InitReply:
        with self._call(request) as channel:
            return self._reply(channel)

    def _reply(self, channel: ReplyChannel) -> InitReply:
        try:
            reply = channel.receive(_SILENCE_S)
        except TimeoutError:
            self._end("it does not reply")
            raise self._gone() or SandboxError("The sandbox does not reply.") from None
        if reply is None:
            raise self._gone() or SandboxError("The operation was interrupted from inside the sandbox.")
        return reply

    def _call(self, request: Mapping[str, object], fds: list[int] | None = None) -> ReplyChannel:
        if self._reason is not None:
            raise SandboxGone(self.sandbox_id, self._reason)
        try:  # a sandbox that has ended by itself takes no request
            return self._processes.control.call(request, fds or [])
        except OSError as error:
            raise self._gone() or SandboxError(f"The sandbox cannot be reached: {error}") from None

    def _path(self, path: str) -> bytes:
        return os.fsencode(os.path.join(self.workdir, path))


def _send(end: sockets.socket, content: bytes) -> None:
    for part in slices(content):  # `sendall` has one timeout for all of its bytes
        end.sendall(part)


def _send_tree(end: sockets.socket, source: Path) -> None:
    with end.makefile("wb") as stream:
        trees.pack(str(source), stream)


def _receive_tree(end: sockets.socket, target: Path) -> None:
    with end.makefile("rb") as stream:
        trees.unpack(stream, str(target), keep_outer_links=False, max_bytes=MAX_TREE)
        while stream.read(_CHUNK):
            pass  # the padding at the end of an archive


def _receive(end: sockets.socket, take: Callable[[bytes], object], max_bytes: int | None = None) -> None:
    left = max_bytes
    while data := end.recv(_CHUNK):
        if left is not None:
            left -= len(data)
            if left < 0:
                raise SandboxTreeError(f"There is more to read than {max_bytes} bytes.")
        take(data)


class LocalSandboxes(Sandboxes):
    """Sandboxes made with bubblewrap: private namespaces, limits, an unprivileged user and no network.

    Args:
        require_cgroup: Refuse to start sandboxes without limits for memory, processes and cpu. Without them, a
            sandbox can use the whole machine.
        uid: The user's number inside; the group's is the same. If root starts sandboxes, a range gives each of them a
            different number, so that they share none of the kernel's limits per user. By default
            `OPENENV_SANDBOX_UIDS`, or 70000-99999 for root and 1000 for other users.
    """

    name = "local"

    def __init__(self, *, require_cgroup: bool = True, uid: int | range | None = None) -> None:
        uid = settings.sandbox_uids() if uid is None else uid
        if uid is not None and (min(uid, default=0) if isinstance(uid, range) else uid) <= 0:
            raise ValueError("the user inside a sandbox must not be root")
        self._require_cgroup = require_cgroup
        self._uid = uid
        self._user_ids: UserIds | None = None
        self._lock = threading.Lock()
        self._kit: LaunchKit | None = None
        self._hierarchy: Hierarchy | None = None
        self._owner: ProcessOwner | None = None
        self._serial = itertools.count(1)
        self._tail = secrets.token_hex(3)
        self._relay: Relay | None = None
        self._open: weakref.WeakSet[LocalSandbox] = weakref.WeakSet()
        # Weak, because a registration lasts: it must not keep the backend alive.
        forget = weakref.WeakMethod(self._forget)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _call(forget))

    def check(self) -> None:
        """Start a sandbox and end it again; if that fails, raise `SandboxUnavailable` with a remedy."""
        with self.open() as sandbox:
            if sandbox.exec(["true"]).exit_code != 0:
                raise SandboxUnavailable("A local sandbox starts, but cannot run a command.")

    def fingerprint(self, spec: SandboxSpec) -> str:
        """Return a text that changes when programs or libraries of this machine are installed or removed."""
        folders = [
            os.stat(folder).st_mtime_ns
            for folder in ("/usr/bin", "/usr/lib", "/usr/local/bin")
            if os.path.isdir(folder)
        ]
        return " ".join((super().fingerprint(spec), platform.platform(), *map(str, folders)))

    def open(self, spec: SandboxSpec | None = None, *, from_snapshot: SandboxSnapshot | None = None) -> LocalSandbox:
        """Start a sandbox; `from_snapshot` is short for that field of the spec."""
        spec = spec_from(spec, from_snapshot)
        refuse_image(spec, self.name)
        kit = self._prepared()
        home = bubblewrap.checked_home(spec.home)
        name = f"{self._tail}x{next(self._serial)}"  # such as 3fa0c1x7: the 7th sandbox of this backend object
        with contextlib.ExitStack() as failing:
            group = None
            if self._hierarchy is not None and self._owner is not None:
                with kit.turn:
                    group = self._hierarchy.create(self._owner, name, spec.limits)
                failing.callback(group.remove)
            uid, user_ids = self._uid if isinstance(self._uid, int) else _UID, self._user_ids
            if user_ids is not None:
                uid = user_ids.take()
                failing.callback(user_ids.release, uid)
            user = SandboxUser(uid, uid, home, kit.is_privileged)
            processes = launch(kit, spec, user, group)
            failing.pop_all()
        if user_ids is not None:
            processes.on_end = partial(user_ids.release, uid)
        spec = spec if spec.home == home else replace(spec, home=home)
        sandbox = LocalSandbox(
            f"local-{os.getpid()}-{name}", spec, processes, kit.interpreter.search_path, self._shared_relay
        )
        self._open.add(sandbox)
        if spec.from_snapshot is not None:
            spec.from_snapshot.fill(sandbox, self.name)
        return sandbox

    def leftovers(self) -> list[str]:
        """List the control groups of ended sandboxes of this backend that are still there."""
        if self._hierarchy is None:
            return []
        living = {sandbox.sandbox_id.rpartition("-")[2] for sandbox in self._open if sandbox.is_alive()}
        own = [name for name, owner in self._hierarchy.names() if owner == self._owner and f"~{self._tail}x" in name]
        return [name for name in own if name.rpartition("~")[2] not in living]

    def abandoned(self) -> list[str]:
        """List the control groups of crashed owners; the next backend that starts removes them."""
        if self._hierarchy is None:
            return []
        return [name for name, owner in self._hierarchy.names() if owner.is_dead()]

    def _shared_relay(self) -> Relay:
        """Return the relay of all sandboxes; it exists as soon as one of them opens a port."""
        with self._lock:
            if self._relay is None:
                self._relay = Relay()
            return self._relay

    def _forget(self) -> None:
        """Close our ends in a forked child: sandboxes belong to the parent, and must end when it does."""
        self._lock = threading.Lock()
        self._relay = None
        self._user_ids = None  # closes this process's copy of the lock file; the parent keeps the locks
        for sandbox in list(self._open):
            sandbox.abandon()

    def _prepared(self) -> LaunchKit:
        with self._lock:
            if self._kit is None or self._owner is None or self._owner.pid != os.getpid():  # a fork is another owner
                kit = LaunchKit.prepare()
                try:
                    self._hierarchy = cgroups.find()
                    self._hierarchy.sweep()
                except SandboxUnavailable:
                    if self._require_cgroup:
                        raise
                    self._hierarchy, self.features = None, FEATURES - {"limits"}
                self._user_ids = self._own_user_ids()
                # Last: if limits are required and missing, every start must fail, not only the first.
                self._kit, self._owner = kit, ProcessOwner.current()
            return self._kit

    def _own_user_ids(self) -> UserIds | None:
        """Return the source of user IDs if each sandbox gets a different one; None if all share a number."""
        if isinstance(self._uid, int) or not bubblewrap.is_privileged():
            return None
        try:
            return UserIds(self._uid)
        except SandboxError as error:
            if self._uid is None:  # a container with few ids
                return None
            raise SandboxUnavailable(str(error)) from None


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    living = method()
    if living is not None:
        living()


# -- user IDs --------------------------------------------------------------------------------------------------------

LOCK_FILE = Path("/run/openenv-user-ids.lock")
_TAKE_TRIES = 1000
# Between the IDs of users and services (below 65536) and the IDs that machines give to containers (from 100000 on);
# small enough for the headers of old archive formats. Containers often have ids below 65536 only.
_ID_RANGES = (range(70_000, 100_000), range(30_000, 60_000))


class UserIds:
    """Hands out user IDs, each to one sandbox of this machine at a time.

    The kernel counts some things by user, for the whole machine: inotify instances and watches, memory of pipes,
    pending signals, message queues, keys, processes under RLIMIT_NPROC. If sandboxes shared a user, one of them could
    use up the resources of the others.

    An ID is free if its byte of a lock file can be locked. The kernel drops the locks of an ended process, so nothing
    has to be reclaimed.

    Args:
        ids: The range; by default the first of 70000-99999 and 30000-59999 that exists here.
        lock_file: The file with the locks. Programs that cannot see the same file may use the same IDs. The choice is
            random, so that this is rare.

    Raises:
        SandboxError: These ids do not exist here.
    """

    def __init__(self, ids: range | None = None, *, lock_file: Path | None = None) -> None:
        mapped = list(_mapped(Path("/proc/self/uid_map"))), list(_mapped(Path("/proc/self/gid_map")))
        places = [ids] if ids is not None else _ID_RANGES
        exists = [place for place in places if all(any(_within(place, one) for one in kind) for kind in mapped)]
        if not exists:
            raise SandboxError(f"user and group ids {' or '.join(map(_range_text, places))} do not exist here")
        self.ids = exists[0]
        self._used: set[int] = set()
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a sandbox at any point
        self._file: int | None = None
        with contextlib.suppress(OSError):  # a read-only /run: this object still hands out no id twice
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(lock_file or LOCK_FILE, flags, 0o600)
            weakref.finalize(self, os.close, self._file)

    def take(self) -> int:
        """Return an ID that no living sandbox has.

        Raises:
            SandboxError: All are in use.
        """
        start = secrets.randbelow(len(self.ids))
        with self._lock:
            for step in range(min(len(self.ids), _TAKE_TRIES)):
                uid = self.ids[(start + step) % len(self.ids)]
                if uid not in self._used and self._set_lock(uid, fcntl.F_WRLCK):
                    self._used.add(uid)
                    return uid
        raise SandboxError(f"All user ids for sandboxes are in use: {_range_text(self.ids)}.")

    def release(self, uid: int) -> None:
        """Take an id back: its sandbox has ended."""
        with self._lock:
            if uid in self._used:
                self._used.discard(uid)
                self._set_lock(uid, fcntl.F_UNLCK)

    def _set_lock(self, uid: int, kind: int) -> bool:
        if self._file is None:
            return True
        # struct flock. The lock belongs to this open file, not to the process, which may have another backend.
        request = struct.pack("hhqqi", kind, os.SEEK_SET, uid, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _range_text(ids: range) -> str:
    """Return a range as users write it."""
    return f"{ids.start}-{ids.stop - 1}"


def _mapped(table: Path) -> Iterator[range]:
    """Yield the ids that exist in this process's user namespace."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        first, _, count = map(int, line.split())
        yield range(first, first + count)


def _within(part: range, whole: range) -> bool:
    return part.start >= whole.start and part.stop <= whole.stop
