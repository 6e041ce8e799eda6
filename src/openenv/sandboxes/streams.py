"""Input and output of one running command: pipes on this side, gathered and bounded.

Knows file descriptors, nothing of sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openenv.sandboxes.base import OnOutput, Stream

with contextlib.suppress(ImportError):  # Windows can import this, and has no use for it
    import fcntl
    import termios

_CHUNK = 256 * 1024
_PIPE_SIZE = 1024 * 1024
_F_SETPIPE_SZ = 1031


@dataclass(slots=True)
class Pipes:
    """Three pipes: our ends, and the ends that the command gets."""

    stdin: int | None
    stdout: int
    stderr: int
    given: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, *, with_stdin: bool) -> Pipes:
        """Make the pipes; ours do not block."""
        pipes = cls(None, -1, -1)
        try:
            if with_stdin:
                theirs, pipes.stdin = os.pipe()
                pipes.given.append(theirs)
            pipes.stdout, theirs = os.pipe()
            pipes.given.append(theirs)
            pipes.stderr, theirs = os.pipe()
            pipes.given.append(theirs)
        except OSError:
            pipes.close()
            raise
        for fd in (pipes.stdin, pipes.stdout, pipes.stderr):
            if fd is not None:
                os.set_blocking(fd, False)
        try:
            fcntl.fcntl(pipes.stdout, _F_SETPIPE_SZ, _PIPE_SIZE)
        except OSError:
            pass  # the default size will do
        return pipes

    def close_given(self) -> None:
        """Close the ends that the command got."""
        while self.given:
            os.close(self.given.pop())

    def close(self) -> None:
        """Close everything."""
        self.close_given()
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.stdin, self.stdout, self.stderr = None, -1, -1


class Gathering:
    """What came out of a command: the beginning of each stream is kept, every byte is passed on."""

    def __init__(self, max_output: int, on_output: OnOutput | None) -> None:
        self._kept: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._max = max_output
        self._on_output = on_output
        self.truncated = False

    def feed(self, stream: Stream, data: bytes) -> None:
        """Take the next bytes of a stream."""
        kept = self._kept[stream]
        room = self._max - len(kept)
        if len(data) > room:
            self.truncated = True
        if room > 0:
            kept += data[:room]
        if self._on_output is not None:
            self._on_output(stream, data)

    def text(self, stream: Stream) -> str:
        """Return what was kept of a stream."""
        return self._kept[stream].decode("utf-8", "replace")


class Exchange:
    """Feeds a command's input and gathers its output until something else says that it has ended."""

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
        """Go on until `end` is readable; False when the time is over before."""
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

    def run_to_end(self) -> None:
        """Go on until nobody can write any more."""
        while self._streams:
            for fd, _ in self._poll.poll():
                self._read(fd, _CHUNK)

    def drain(self) -> None:
        """Take what is in the pipes now, and not what a process left behind may still write."""
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


class PipeReader:
    """A pipe to read a stream from, whose writer must not fall silent."""

    def __init__(self, fd: int, *, idle_s: float) -> None:
        self._fd = fd
        self._idle_s = idle_s
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def read(self, size: int = _CHUNK) -> bytes:
        """Return exactly `size` bytes, fewer only at the end."""
        parts = []
        while size > 0:
            data = self.read_some(size)
            if not data:
                break
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def read_some(self, size: int = _CHUNK) -> bytes:
        """Return the next bytes, none at the end."""
        if not self._poll.poll(self._idle_s * 1000):
            raise TimeoutError("the sandbox sends nothing")
        return os.read(self._fd, size)


class PipeWriter:
    """A pipe to write a stream to, whose reader must not fall asleep."""

    def __init__(self, fd: int, *, idle_s: float) -> None:
        self._fd = fd
        self._idle_s = idle_s
        os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> int:
        """Write all of it."""
        left = memoryview(data)
        while left:
            if not self._poll.poll(self._idle_s * 1000):
                raise TimeoutError("the sandbox reads nothing")
            try:
                left = left[os.write(self._fd, left[:_CHUNK]) :]
            except BlockingIOError:
                continue
        return len(data)
