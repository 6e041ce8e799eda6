"""Starts the processes of a local sandbox and ends them again.

Knows how bubblewrap, the control group and the first process inside come together. Knows nothing of commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes import trees
from openenv.sandboxes.base import SandboxSpec
from openenv.sandboxes.local import bubblewrap, seccomp
from openenv.sandboxes.local.bubblewrap import INSIDE, Bubblewrap, Interpreter, Person
from openenv.sandboxes.local.cgroups import Group
from openenv.sandboxes.local.control import Control
from openenv.sandboxes.relay import Exposure

_START_S = 30.0
_END_S = 20.0
_ENTER = 'umask 022; ulimit -c 0; while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'
"""A shell enters the control groups before it becomes bubblewrap: a process that moves itself is moved for free."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What is the same for all sandboxes of a backend."""

    program: Bubblewrap
    interpreter: Interpreter
    filter: bytes
    files: Mapping[str, bytes]

    @classmethod
    def prepare(cls) -> Kit:
        """Find the programs and compile what goes inside."""
        program = Bubblewrap.find()
        machine = platform.machine()
        if not seccomp.supported(machine):
            raise SandboxUnavailable(f"Local sandboxes have no system call filter for {machine} processors.")
        inside = Path(__file__).parent / "inside" / "init.py"
        files = {
            **bubblewrap.copied_etc(),
            f"{INSIDE}/init.pyc": bubblewrap.compiled(inside),
            f"{INSIDE}/trees.pyc": bubblewrap.compiled(Path(trees.__file__)),
        }
        return cls(program, Interpreter.current(), seccomp.program(machine), files)


class Processes:
    """The running processes of a sandbox and what they hold of the host. Freed once, from any thread."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: Control, group: Group | None, first: int | None
    ) -> None:
        self.control = control
        self.group = group
        self.exposures: list[Exposure] = []
        self._process = process
        self._first = first
        self._handle = _handle(first)
        self._lock = threading.Lock()
        self._freed = False
        self._owner = os.getpid()

    def end(self) -> None:
        """Kill everything inside and give back what it took of the host."""
        with self._lock:
            if self._freed or os.getpid() != self._owner:
                return
            self._freed = True
            self._kill()
            self.control.close()
            for exposure in self.exposures:
                exposure.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._handle is not None:
                os.close(self._handle)
            if self.group is not None:
                self.group.remove()

    def abandon(self) -> None:
        """Let go in a forked child, so that the sandbox still ends with its owner."""
        self.control.abandon()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self._first is not None:
                os.kill(self._first, signal.SIGKILL)
            else:
                self._process.kill()


def launch(kit: Kit, spec: SandboxSpec, person: Person, group: Group | None) -> Processes:
    """Start a sandbox and wait until its first process serves.

    Raises:
        SandboxUnavailable: The machine does not allow it.
        SandboxError: It did not start.
    """
    control = Control()
    errors = os.memfd_create("errors")
    told, tell = os.pipe()
    try:
        with contextlib.ExitStack() as stack:
            files = {**bubblewrap.made_up(person), **kit.files}
            passed = [control.inner.fileno(), tell]
            options = ["--info-fd", str(tell)]
            for fd, words in _handed_in(kit, files, stack):
                passed.append(fd)
                options += words
            command = _command(kit, spec, person, options, control.inner.fileno())
            process = _spawn(command, group, passed, errors)
            os.close(tell)
            tell = -1
            control.configure(_config(spec, person, limit_processes=group is None))
            processes = Processes(process, control, group, _first_process(told))
        if not control.wait_ready(_START_S):
            processes.end()
            raise _failure(errors)
        return processes
    except BaseException:
        control.close()
        raise
    finally:
        for fd in (errors, told, tell):
            if fd >= 0:
                os.close(fd)


def _command(kit: Kit, spec: SandboxSpec, person: Person, options: list[str], control: int) -> list[str]:
    return [
        kit.program.path,
        *bubblewrap.namespaces(person),
        *bubblewrap.file_system(spec, person, kit.interpreter, kit.program.version),
        *options,
        *("--remount-ro", "/", "--chdir", "/", "--"),
        *(kit.interpreter.executable, "-I", "-S", f"{INSIDE}/init.pyc", str(control)),
    ]


def _handed_in(kit: Kit, files: Mapping[str, bytes], stack: contextlib.ExitStack) -> Iterator[tuple[int, list[str]]]:
    for target, content in files.items():
        fd = _memory(content, stack)
        yield fd, ["--perms", "0444", "--file", str(fd), target]
    fd = _memory(kit.filter, stack)
    yield fd, ["--seccomp", str(fd)]


def _memory(content: bytes, stack: contextlib.ExitStack) -> int:
    fd = os.memfd_create("file")
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _spawn(command: list[str], group: Group | None, passed: list[int], errors: int) -> subprocess.Popen[bytes]:
    entrances = group.entrances() if group is not None else []
    return subprocess.Popen(
        ["/bin/sh", "-c", _ENTER, "sh", *entrances, "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=passed,
        env={"LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )


def _config(spec: SandboxSpec, person: Person, *, limit_processes: bool) -> dict[str, object]:
    return {
        "uid": person.uid,
        "gid": person.gid,
        "home": person.home.encode(),
        "workdir": f"{person.home}/workdir".encode(),
        "drop": person.privileged,
        "lifetime": float(spec.timeout_s),
        "processes": spec.limits.pids if limit_processes else 0,
    }


def _first_process(told: int) -> int | None:
    """Return the process id, on the host, of the first process inside; None when it was not started."""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    text = b""
    deadline = time.monotonic() + _START_S
    while b"}" not in text and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        data = os.read(told, 4096)
        if not data:
            return None
        text += data
    try:
        return int(json.loads(text)["child-pid"])
    except (ValueError, KeyError):
        return None


def _handle(pid: int | None) -> int | None:
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _failure(errors: int) -> SandboxError:
    os.lseek(errors, 0, os.SEEK_SET)
    text = os.read(errors, 65536).decode("utf-8", "replace")
    if text.startswith("bwrap: "):
        return SandboxUnavailable(f"A local sandbox cannot be started here: {bubblewrap.explain(text)}")
    return SandboxError(f"A local sandbox did not start: {text.strip() or 'its first process ended at once'}")
