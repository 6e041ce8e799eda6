"""What sandboxes of a cloud share: files go through its own transfer, and the errors of its package become ours.

Knows no cloud. `ShellSandbox` does everything else.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, ClassVar

from openenv.errors import SandboxError, SandboxTreeError, message_of
from openenv.sandboxes.base import OnOutput, Stream
from openenv.sandboxes.shell import Input, ShellSandbox, archive_limit
from openenv.sandboxes.shell_command import Channel, ShellRun


class QueueChannel(Channel):
    """A channel with a queue. Threads put the package's output into it."""

    def __init__(self) -> None:
        self._events: queue.Queue[tuple[Stream, bytes] | None] = queue.Queue(maxsize=64)
        self._closed = threading.Event()
        self._over = threading.Event()
        self._exit_code: int | None = None

    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        if self._closed.is_set():
            raise EOFError
        try:
            got = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if got is None:
            self._events.put(None)
            raise EOFError
        return got

    def close(self) -> None:
        """Close the channel; the threads end with the next output, or with the sandbox."""
        self._closed.set()
        while True:
            try:
                self._events.get_nowait()
            except queue.Empty:
                break
        self._events.put(None)

    def _put(self, event: tuple[Stream, bytes] | None) -> None:
        """Add output, or None for its end; wait while the queue is full."""
        while not self._closed.is_set():
            try:
                self._events.put(event, timeout=0.5)
            except queue.Full:
                continue
            return


class RemoteSandbox(ShellSandbox):
    """A cloud sandbox. A subclass adds file transfer in both directions to the methods of a `ShellSandbox`."""

    cloud: ClassVar[str]
    """The name of the cloud in messages."""

    @abstractmethod
    def _send_file(self, place: str, file: IO[bytes]) -> None:
        """Write the rest of a local file to a path inside."""

    @abstractmethod
    def _fetch_file(self, place: str) -> Iterable[bytes]:
        """Yield the content of a file inside."""

    def _tool(self, script: str, *, stdin: Input | None = None, on_output: OnOutput | None = None) -> ShellRun:
        if stdin is None:
            return super()._tool(script, on_output=on_output)
        self._require_alive()
        place = f"/tmp/.openenv-{secrets.token_hex(8)}"
        with tempfile.TemporaryFile() as file:
            for part in stdin():
                file.write(part)
            file.seek(0)
            with self._asking("moved no file to"):
                self._send_file(place, file)
        return super()._tool(f"exec <{place}; rm -f {place}\n{script}", on_output=on_output)

    def _fetch_tree(self, path: str, raw: Path, max_bytes: int) -> None:
        place = f"/tmp/.openenv-{secrets.token_hex(8)}.tar"
        limit = archive_limit(max_bytes)
        kilobytes = limit // 1024 + 1
        self._tool(f"ulimit -f {kilobytes * 2}\n{self._tar_out(path, place)}")  # in blocks of 512 bytes
        try:
            with self._asking("moved no file of"), raw.open("wb") as file:
                for part in self._fetch_file(place):
                    limit -= len(part)
                    if limit < 0:
                        raise SandboxTreeError(f"The tree holds more than {max_bytes} bytes.")
                    file.write(part)
        finally:
            self._tool(f"rm -f {place}")

    @contextlib.contextmanager
    def _asking(self, problem: str) -> Iterator[None]:
        """Turn the package's errors into a `SandboxError`, or into `SandboxGone` if the sandbox has ended."""
        try:
            yield
        except SandboxError:
            raise
        except Exception as error:  # the errors of the packages have no common base class
            self._raise_if_gone()
            raise SandboxError(f"{self.cloud} {problem} sandbox '{self.sandbox_id}': {message_of(error)}") from error
