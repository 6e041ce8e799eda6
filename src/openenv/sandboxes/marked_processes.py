"""Kills the processes of a command by their mark, from outside of the box, where its processes are of this machine.

Does what `shell_script.kill_marked` does inside, but is not slowed by a box full of busy processes. Knows /proc.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

_PATIENCE_S = 20.0


def pid_namespace(pid: int) -> int:
    """Return the number of the pid namespace of a process.

    Raises:
        OSError: there is no such process, or this one may not look.
    """
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def kill_marked_outside(namespace: int, *, mark: int, lowest: int, spare: int) -> None:
    """Kill every process of a pid namespace with a mark (in KB) or one below all given ones, except its first process.

    They are stopped first, all of them, and killed when none can fork any more.

    Raises:
        OSError: this process may not do that, or not look at every process of the machine.
    """
    stopped: set[int] = set()
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        look = _look(namespace, mark * 1024, lowest * 1024, spare)
        new = look.marked.keys() - stopped
        waiting = look.marked.keys() - killed
        if not look.marked and not look.some_vanished:
            return
        if new:
            stopped |= {pid for pid in new if _signal(pid, signal.SIGSTOP)}
        elif all(look.marked[pid] in "Tt" for pid in waiting) and not look.some_vanished:
            killed |= {pid for pid in waiting if _signal(pid, signal.SIGKILL)}
        else:
            time.sleep(0.001)
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


@dataclass(slots=True)
class _Look:
    """What was seen in one look at all processes: the marked ones that live, with their state."""

    marked: dict[int, str] = field(default_factory=dict)
    some_vanished: bool = False
    """Before they were looked at; they may have left children."""


def _look(namespace: int, mark: int, lowest: int, spare: int) -> _Look:
    look = _Look()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == spare:
            continue
        try:
            if pid_namespace(int(name)) != namespace:
                continue
            limit, state = _hard_limit(name), _state(name)
        except (FileNotFoundError, ProcessLookupError):
            look.some_vanished = True
            continue
        if state not in "ZX" and limit is not None and (limit == mark or limit < lowest):
            look.marked[int(name)] = state
    return look


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
