"""One command in a shell-driven box: the channel that it talks through, and what it has put out so far.

Knows bytes and time. Backends implement `Channel`; which engine is behind it is not known here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from openenv.sandboxes.base import ExecResult, OnOutput, Stream
from openenv.sandboxes.shell_script import Invocation, OutputReader


class Channel(ABC):
    """A shell inside a box: bytes go in, the bytes of two streams come out. `close` may be called from any thread."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Write to its standard input; what a shell that is over no longer reads is dropped."""

    @abstractmethod
    def end_input(self) -> None:
        """Close its standard input."""

    @abstractmethod
    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        """Return the next bytes of a stream, or None when none came in time; raise EOFError when both are over."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; what runs inside is not killed by this."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """How the shell itself ended, as far as the engine says."""


class ShellRun:
    """One command under way: its channel, what it has put out so far, and its mark."""

    def __init__(
        self, channel: Channel, call: Invocation, *, on_output: OnOutput | None, max_output: int | None
    ) -> None:
        self.channel = channel
        self.mark = call.mark
        self.reader = OutputReader(call.nonce)
        self.truncated = False
        self.began = time.monotonic()
        self._on_output = on_output
        self._max_output = max_output
        self._kept: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    def wait_started(self, deadline: float) -> bool:
        """Read until the command has begun; False when its shell ended before."""
        while self.reader.pid is None:
            if not self._step(deadline):
                return False
        return True

    def pump(self, deadline: float | None) -> bool:
        """Read until the command is over (True) or the time is (False)."""
        while not self.reader.finished:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not self._step(deadline):
                return True
        return True

    def _step(self, deadline: float | None) -> bool:
        """Take what comes next; False when nothing comes any more."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            got = self.channel.receive(left)
        except EOFError:
            self._take("stdout", self.reader.flush("stdout"))
            self._take("stderr", self.reader.flush("stderr"))
            return False
        if got is None:
            return deadline is None or time.monotonic() < deadline or self.reader.pid is not None
        self._take(got[0], self.reader.feed(*got))
        return True

    def _take(self, stream: Stream, data: bytes) -> None:
        if not data:
            return
        kept = self._kept[stream]
        room = len(data) if self._max_output is None else max(0, self._max_output - len(kept))
        kept += data[:room]
        self.truncated = self.truncated or room < len(data)
        if self._on_output is not None:
            self._on_output(stream, data)

    def output(self, stream: Stream) -> bytes:
        """Return what was kept of a stream."""
        return bytes(self._kept[stream])

    def result(self, exit_code: int, *, timed_out: bool = False) -> ExecResult:
        """Return what the command did."""
        return ExecResult(
            exit_code,
            self.output("stdout").decode("utf-8", "replace"),
            self.output("stderr").decode("utf-8", "replace"),
            timed_out=timed_out,
            truncated=self.truncated,
            duration_s=time.monotonic() - self.began,
            oom=self.reader.oom_kills > 0,
        )
