"""Runs a command and ends it, with its whole process group, when its owner is gone, however the owner ended.

    owner ──starts──> guardian ──fork, exec──> the command          all but the owner are one process group
      └── pipe ───────────┘  EOF: the owner is dead; SIGTERM to the group, then SIGKILL

A script that imports next to nothing: `python guardian.py LIFELINE GRACE_S FOLDER COMMAND ...`. LIFELINE is the
reading end of a pipe; only the owner holds the other end. FOLDER, if not empty, is removed at the end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_LOOK_S = 0.02


def main(arguments: list[str]) -> int:
    """Start the command, wait for its end or the owner's, and return its exit code."""
    lifeline, grace_s, folder, command = int(arguments[0]), float(arguments[1]), arguments[2], arguments[3:]
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _wake_up)  # a signal to the group is meant for the command
    child = os.fork()
    if child == 0:
        _become(command)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 4096)
        code = _exit_code(child)
        if code is not None:
            return code
        if lifeline in ready:
            _end(child, grace_s, folder)


def _wake_up(number: int, frame: object) -> None:
    pass


def _become(command: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _exit_code(child: int) -> int | None:
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return 0
    if pid == 0:
        return None
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _end(child: int, grace_s: float, folder: str) -> None:
    """End the command gently, then kill the rest of its group, including this process."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _exit_code(child) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
