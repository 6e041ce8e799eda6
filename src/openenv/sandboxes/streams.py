"""Input and output of one running command: pipes, the loop that pumps them, and a bounded buffer of its output."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from openenv.errors import SandboxError
from openenv.sandboxes.base import TIMED_OUT, CommandSpec, ExecResult, OnOutput, Stream

with contextlib.suppress(ImportError):  # Windows has neither, and never gets to use them
    import fcntl
    import termios

_CHUNK = 256 * 1024
_PIPE_SIZE = 1024 * 1024
_F_SETPIPE_SZ = 1031
_UNPACED = 256 * 1024 * 1024
_DROP_RATE = 64 * 1024 * 1024
"""How much output that is not kept is read as fast as it comes, and how fast the rest, in bytes and bytes per second. A
command that writes without end would otherwise take a processor of the host, which no limit of its sandbox counts."""


@dataclass(slots=True)
class Pipes:
    """Two or three pipes: our ends, and in `theirs` the ends for the command."""

    stdin: int | None
    stdout: int
    stderr: int
    theirs: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, *, with_stdin: bool) -> Pipes:
        """Make the pipes; ours do not block."""
        pipes = cls(None, -1, -1)
        try:
            if with_stdin:
                end, pipes.stdin = os.pipe()
                pipes.theirs.append(end)
            pipes.stdout, end = os.pipe()
            pipes.theirs.append(end)
            pipes.stderr, end = os.pipe()
            pipes.theirs.append(end)
        except OSError:
            pipes.close()
            raise
        for fd in (pipes.stdin, pipes.stdout, pipes.stderr):
            if fd is not None:
                os.set_blocking(fd, False)
        try:
            fcntl.fcntl(pipes.stdout, _F_SETPIPE_SZ, _PIPE_SIZE)
        except OSError:
            pass  # the default size is enough
        return pipes

    def close_theirs(self) -> None:
        """Close the ends for the command."""
        while self.theirs:
            os.close(self.theirs.pop())

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything."""
        self.close_theirs()
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.stdin, self.stdout, self.stderr = None, -1, -1


class OutputBuffer:
    """The output of a command: the beginning of each stream is kept, and `on_output` gets every byte.

    A command that has written far more than is kept is slowed down: `feed` takes its time, and its pipes fill up.

    Args:
        max_output: Bytes of each stream to keep; None for all.
        on_output: Called with each piece as it comes.
    """

    def __init__(self, max_output: int | None, on_output: OnOutput | None) -> None:
        self._kept: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._max = max_output
        self._on_output = on_output
        self._dropped = 0
        self._paced_from = 0.0
        self.truncated = False

    def feed(self, stream: Stream, data: bytes) -> None:
        """Take the next bytes of a stream, if there are any."""
        if not data:
            return
        kept = self._kept[stream]
        room = len(data) if self._max is None else max(0, self._max - len(kept))
        kept += data[:room]
        self.truncated = self.truncated or room < len(data)
        if self._on_output is not None:
            self._on_output(stream, data)
        if self._max:  # 0 means an internal transfer, which has a different limit
            self._pace(len(data) - room)

    def _pace(self, dropped: int) -> None:
        self._dropped += max(0, dropped)
        if self._dropped <= _UNPACED:
            return
        now = time.monotonic()
        self._paced_from = self._paced_from or now
        ahead_s = (self._dropped - _UNPACED) / _DROP_RATE - (now - self._paced_from)
        if ahead_s > 0:
            time.sleep(min(ahead_s, 0.1))  # not longer, for a command may have a deadline

    def kept(self, stream: Stream) -> bytes:
        """Return the collected output of a stream."""
        return bytes(self._kept[stream])

    def result(self, exit_code: int, *, began: float, timed_out: bool = False, oom: bool = False) -> ExecResult:
        """Return the result of the command, which began at that time of the monotonic clock."""
        return ExecResult(
            exit_code,
            self._kept["stdout"].decode("utf-8", "replace"),
            self._kept["stderr"].decode("utf-8", "replace"),
            timed_out=timed_out,
            truncated=self.truncated,
            duration_s=time.monotonic() - began,
            oom=oom,
        )


def follow_output(pipes: Pipes, on_output: OnOutput) -> threading.Thread:
    """Pass the output of a background job on, in a thread, until its pipes are closed; then close ours."""

    def follow() -> None:
        try:
            PipePump(pipes, None, on_output).run_until_closed()
        finally:
            pipes.close()

    thread = threading.Thread(target=follow, name="openenv-job", daemon=True)
    thread.start()
    return thread


class PipePump:
    """Writes a command's input and reads its output, until another descriptor reports its end."""

    def __init__(self, pipes: Pipes, stdin: bytes | None, feed: Callable[[Stream, bytes], None]) -> None:
        self._pipes = pipes
        self._left = memoryview(stdin or b"")
        self._feed = feed
        self._poll = select.poll()
        self._streams: dict[int, Stream] = {pipes.stdout: "stdout", pipes.stderr: "stderr"}
        for fd in self._streams:
            self._poll.register(fd, select.POLLIN)
        if pipes.stdin is not None:
            self._poll.register(pipes.stdin, select.POLLOUT)

    def run(self, end: int, deadline: float | None) -> bool:
        """Pump until `end` is readable; False if the deadline comes first."""
        self._poll.register(end, select.POLLIN)
        try:
            while True:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 0.5
                events = self._poll.poll(timeout)
                ended = False
                for fd, _ in events:
                    if fd == end:
                        ended = True
                    elif fd == self._pipes.stdin:
                        self._write()
                    else:
                        self._read(fd, _CHUNK)
                if ended:
                    return True
                if deadline is not None and time.monotonic() >= deadline:
                    return False
        finally:
            self._poll.unregister(end)

    def run_until_closed(self) -> None:
        """Pump until all writing ends of the pipes are closed."""
        while self._streams:
            for fd, _ in self._poll.poll():
                self._read(fd, _CHUNK)

    def drain(self) -> None:
        """Read the data in the pipes now; do not wait for a left-over process to write more."""
        for fd in list(self._streams):
            waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
            while waiting > 0:
                got = self._read(fd, min(waiting, _CHUNK))
                if got == 0:
                    break
                waiting -= got

    def _write(self) -> None:
        fd = self._pipes.stdin
        if fd is None:
            return
        try:
            if self._left:
                self._left = self._left[os.write(fd, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = memoryview(b"")
        if not self._left:
            self._poll.unregister(fd)
            os.close(fd)
            self._pipes.stdin = None

    def _read(self, fd: int, size: int) -> int:
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return 0
        if data:
            self._feed(self._streams[fd], data)
        else:
            self._poll.unregister(fd)
            del self._streams[fd]
        return len(data)


def run_to_end(
    command: CommandSpec,
    timeout: float | None,
    pipes: Pipes,
    *,
    end: int,
    exit_code: Callable[[], int | None],
    kill: Callable[[], object],
) -> ExecResult:
    """Pump a started command's pipes until it has ended, and kill it when its time is over.

    `exit_code` is called whenever the descriptor `end` is readable; it returns None for news that are not the end yet.
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    buffer = OutputBuffer(command.max_output, command.on_output)
    pump = PipePump(pipes, command.stdin, buffer.feed)
    code = None
    try:
        while code is None and pump.run(end, deadline):
            code = exit_code()
    except BaseException:  # `on_output` raised, or Ctrl-C: without its reader the command must not run on
        with contextlib.suppress(SandboxError):
            kill()
        raise
    if code is None:
        kill()
    # A left-over daemon may hold its pipes open, so do not wait for their end. The command's output is in them.
    pump.drain()
    return buffer.result(TIMED_OUT if code is None else code, began=began, timed_out=code is None)


def slices(data: bytes) -> Iterator[bytes]:
    """Cut bytes into pieces small enough for a pipe or socket to take within its time."""
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]
