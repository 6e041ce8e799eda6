"""A server as a child process: started in a group of its own, watched, ended with all that it started, its log kept.

It ends when its owner does, killed or not: a `guardian` between the two sees to that. Knows processes, signals and
files; what the command is for it must not know.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from openenv.errors import ProviderError, ProviderUnavailable
from openenv.providers import guardian

GRACE_S = 10.0
_KILL_S = 10.0
_TAIL_BYTES = 16_384
_TAIL_LINES = 40


class ServerProcess:
    """A running command with its log.

    Args:
        command: What to run, the program first.
        environ: Its variables, all of them.
        cwd: Where it runs.
        log_path: Where its output goes, after what is there already; by default into a temporary file.
        folder: A temporary folder that ends with it.

    Raises:
        ProviderError: It cannot be started; nothing is left of it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: Path | None = None,
        log_path: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        program = shutil.which(command[0], path=environ.get("PATH"))
        if program is None:
            raise ProviderUnavailable(f"`{command[0]}` cannot be started: it is not installed, or not on PATH.")
        self.folder = folder or Path(tempfile.mkdtemp(prefix="openenv-server-"))
        self.log_path = log_path or self.folder / "log"
        self._keeps_log = log_path is not None
        self._kept = ""
        self._owner = os.getpid()
        self._lifeline: int | None = None
        try:
            self._process = self._start([program, *command[1:]], environ, cwd)
        except BaseException as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ProviderError(f"`{command[0]}` cannot be started: {error}") from error
            raise

    def _start(self, command: list[str], environ: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
        end: int | None = None
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                if os.name == "posix" and sys.executable:
                    end, self._lifeline = os.pipe()
                    remove = str(self.folder)
                    guard = [sys.executable, "-I", "-S", guardian.__file__, str(end), str(GRACE_S), remove]
                    command = [*guard, *command]
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(environ),
                    cwd=cwd,
                    pass_fds=() if end is None else (end,),
                    start_new_session=True,
                )
            except BaseException:
                self._let_go()
                raise
            finally:
                if end is not None:
                    os.close(end)

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    def ended(self, within_s: float) -> str | None:
        """Wait that long at most for it to end; return how it ended, or None while it runs."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return f"exited prematurely with code {code}"

    def log(self) -> str:
        """Return the end of what it has written, also after it was stopped."""
        if self._kept:
            return self._kept
        try:
            with self.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def stop(self) -> None:
        """End it and all that it has started: gently, and if that does not help, at once. Harmless when it is over."""
        if self._owner != os.getpid():  # a forked process leaves it to its parent
            return
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
        finally:
            self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_S)
            self._let_go()
            self._kept = self.log()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, number)
            else:
                self._process.terminate()

    def _let_go(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
