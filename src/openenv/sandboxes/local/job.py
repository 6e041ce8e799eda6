"""A command in the background of a local sandbox.

Knows the channel on which its end is reported.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from openenv.errors import SandboxGone
from openenv.sandboxes.base import OnOutput
from openenv.sandboxes.local.control import Channel
from openenv.sandboxes.streams import Exchange, Pipes

_KILLED = 128 + 9


def exit_code(status: int) -> int:
    """Return the exit code of a wait status: that of the program, or 128 and the number of the signal."""
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF


class LocalJob:
    """A command that runs in the background."""

    def __init__(
        self, pid: int, channel: Channel, kill: Callable[[], None], gone: Callable[[], SandboxGone | None]
    ) -> None:
        self._pid = pid
        self._channel = channel
        self._kill = kill
        self._gone = gone
        self._lock = threading.Lock()
        self._code: int | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Return the process id inside the sandbox."""
        return self._pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutError when it is not there in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError("the job still runs")
        try:
            if self._code is None:
                self._code = self._received(None if deadline is None else max(0.0, deadline - time.monotonic()))
                self._channel.close()
        finally:
            self._lock.release()
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join(0.5)  # the last of its output; what it left behind may keep the pipe open
        return self._code

    def kill(self) -> None:
        """Kill the job and every process that it started."""
        with contextlib.suppress(SandboxGone):  # then it is dead
            self._kill()

    def follow(self, pipes: Pipes, on_output: OnOutput) -> None:
        """Pass the job's output on, from a thread."""
        self._reader = threading.Thread(target=_follow, args=(pipes, on_output), name="openenv-job", daemon=True)
        self._reader.start()

    def _received(self, timeout: float | None) -> int:
        answer = self._channel.receive(timeout)
        if answer is not None and answer.kind == "x":
            return exit_code(answer.number)
        gone = self._gone()
        if gone is not None:
            raise gone
        return _KILLED


def _follow(pipes: Pipes, on_output: OnOutput) -> None:
    try:
        Exchange(pipes, None, on_output).run_to_end()
    finally:
        pipes.close()
