"""A command of this machine as a channel: its standard streams are those of a shell inside a box.

Knows processes and pipes. Which engine the command belongs to it must not know.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import threading
import time
from typing import IO

from openenv.sandboxes.base import Stream
from openenv.sandboxes.shell_run import Channel

_CHUNK = 1 << 16
_LOOK_S = 0.25


class ProcessChannel(Channel):
    """A command of this machine, such as `docker exec -i NAME /bin/sh`, with a shell of a box at its other end.

    Args:
        argv: What to run. Its streams are the shell's; its end need not be that of what it started.
    """

    def __init__(self, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        self._selector = selectors.DefaultSelector()
        self._streams: list[IO[bytes]] = []
        self._input_lock = threading.Lock()
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        names: tuple[tuple[Stream, IO[bytes] | None], ...] = (
            ("stdout", self._process.stdout),
            ("stderr", self._process.stderr),
        )
        for name, stream in names:
            assert stream is not None
            self._streams.append(stream)
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._open = 2
        self._closed = False
        self._reading = threading.Lock()

    @property
    def exit_code(self) -> int | None:
        """How the command line ended; it repeats the exit code of what it ran."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def send(self, data: bytes) -> None:
        """Write to the standard input."""
        stream = self._process.stdin
        view = memoryview(data)
        while view:
            with self._input_lock:  # nobody closes it under our feet, and nobody waits long for us
                if self._closed or stream is None or stream.closed:
                    return
                room = select.poll()
                room.register(stream, select.POLLOUT)
                if not room.poll(_LOOK_S * 1000):
                    continue
                try:
                    view = view[os.write(stream.fileno(), view[:_CHUNK]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    return

    def end_input(self) -> None:
        """Close the standard input."""
        with self._input_lock:
            if self._process.stdin is not None:
                self._process.stdin.close()

    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        """Return the next bytes of a stream."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._reading:
            while self._open and not self._closed:
                left = _LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
                ready = self._selector.select(min(left, _LOOK_S))
                if not ready:
                    if left <= _LOOK_S and deadline is not None:
                        return None
                    continue  # what it has started may hold the streams open for ever: look whether we are closed
                key = ready[0][0]
                data = os.read(key.fd, _CHUNK)
                if data:
                    return key.data, data
                self._selector.unregister(key.fileobj)
                self._open -= 1
            raise EOFError

    def close(self) -> None:
        """End the command line; a reader in another thread sees the end of the streams, or soon that it is closed."""
        self._closed = True
        if self._process.poll() is None:
            _kill_group(self._process.pid)
        self._process.wait()
        with self._reading:
            if self._streams:
                self._selector.close()
                for stream in self._streams:
                    stream.close()
                self._streams.clear()
        self.end_input()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
