"""What sandboxes of a cloud share: files go through its own transfer, and the errors of its package become ours.

Knows no cloud. `ShellSandbox` does everything else.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, ClassVar

from openenv.errors import SandboxError, SandboxTreeError, message_of
from openenv.sandboxes.base import OnOutput
from openenv.sandboxes.shell import Input, ShellSandbox, archive_limit
from openenv.sandboxes.shell_command import ShellRun


class RemoteSandbox(ShellSandbox):
    """A sandbox of a cloud. A subclass adds to what a `ShellSandbox` needs how files are sent and fetched."""

    cloud: ClassVar[str]
    """The name of the cloud in messages."""

    @abstractmethod
    def _send_file(self, place: str, file: IO[bytes]) -> None:
        """Write what is left of a file of this machine to a path inside."""

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
        """Turn what the package raises into a `SandboxError`, or into `SandboxGone` if the sandbox has ended."""
        try:
            yield
        except SandboxError:
            raise
        except Exception as error:  # the errors of the packages have no common base class
            self._raise_if_gone()
            raise SandboxError(f"{self.cloud} {problem} sandbox '{self.sandbox_id}': {message_of(error)}") from error
