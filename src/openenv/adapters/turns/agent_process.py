"""`HarnessProcess`: an agent's process, spoken to in lines over its standard input and output.

Threads read its output, so that it belongs to no event loop: it may be started on one and stopped on another, or when
none runs any more. Handles lines and must not interpret them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Final

from openenv import settings
from openenv.errors import HarnessNotRunningError, HarnessStartupError

logger = logging.getLogger(__name__)

MOST_LINE_BYTES: Final = 16 * 1024 * 1024
"""A longer line comes in pieces."""
_MOST_LINES = 4096  # that wait to be read; then the pipe makes the agent wait
_STDERR_LINES = 50
_FULL_S = 0.5
_DRAIN_S = 2.0
_LOOK_S = 0.01


class HarnessProcess:
    """One process in a new session, so that stopping it ends its children too.

    Args:
        command: The command line.
        cwd: The working directory.
        env_vars: Variables to add to the environment of this process; the server's tokens are removed.
        startup_timeout_s: How long it may take to be ready.
        terminate_grace_s: How long it has between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: str,
        env_vars: dict[str, str] | None = None,
        startup_timeout_s: float = 30.0,
        terminate_grace_s: float = 5.0,
    ) -> None:
        self._command = list(command)
        self._cwd = cwd
        self._env_vars = dict(env_vars or {})
        self._startup_timeout_s = startup_timeout_s
        self._grace_s = terminate_grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)  # None: the output has ended
        self._errors: deque[str] = deque(maxlen=_STDERR_LINES)
        self._readers: list[threading.Thread] = []
        self._writing = threading.Lock()
        self._stopping = threading.Lock()
        self._arrived = threading.Condition()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._is_stopped = False

    # -- state ----------------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        """Say whether the process runs."""
        return self._process is not None and _exit_code(self._process) is None

    def drain_stderr(self) -> str:
        """Return the last lines of its standard error."""
        return "".join(f"{line}\n" for line in self._errors)

    async def read_errors(self) -> str:
        """Return the last lines of its standard error; call this at the end of its output.

        Each stream has a reader. At the end of one stream, lines of the other may still be on their way.
        """
        await asyncio.to_thread(self._readers[-1].join, _DRAIN_S)
        return self.drain_stderr()

    # -- start and stop -------------------------------------------------------------------------------------------

    async def start(self, ready_check: Callable[[str], bool] | None = None) -> None:
        """Start the process.

        Args:
            ready_check: Takes each line of output and says whether the process is ready; these lines are not read
                again. Without it, a process that has started is ready.

        Raises:
            HarnessStartupError: It cannot be started, has ended, or is not ready in time; nothing is left of it.
        """
        if self.is_running():
            raise HarnessStartupError("harness process is already running")
        deadline = time.monotonic() + self._startup_timeout_s
        spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn))
        try:
            await asyncio.shield(spawning)
            if ready_check is not None:
                await self._until_ready(ready_check, deadline)
        except BaseException:
            if not spawning.done():  # cancelled: the thread goes on, so its process must be ended
                spawning.add_done_callback(lambda _: threading.Thread(target=self._end, daemon=True).start())
            else:
                await asyncio.shield(asyncio.ensure_future(self.stop()))
            raise

    async def _until_ready(self, ready_check: Callable[[str], bool], deadline: float) -> None:
        while True:
            line = await self.read_line(max(0.0, deadline - time.monotonic()))
            if line is not None and ready_check(line):
                return
            if line is None and self._is_at_end():
                await self.stop()  # the exit code is known then
                assert self._process is not None
                code = self._process.returncode
                raise HarnessStartupError(f"harness exited with code {code} during startup{self._last_words()}")
            if time.monotonic() >= deadline:
                limit = f"{self._startup_timeout_s:g}s"
                raise HarnessStartupError(f"harness did not become ready within {limit}{self._last_words()}")

    def _last_words(self) -> str:
        text = self.drain_stderr().strip()
        return f": {text[-2000:]}" if text else ""

    def _spawn(self) -> None:
        self._lines = queue.Queue(_MOST_LINES)
        self._errors.clear()
        self._is_stopped = False
        try:
            process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=settings.untrusted_environment(self._env_vars),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            raise HarnessStartupError(f"failed to spawn harness process {self._command[0]!r}: {exc}") from exc
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            self._reader(process.stdout, self._add_line, self._end_of_output),
            self._reader(process.stderr, self._errors.append, lambda: None),
        ]

    async def wait(self, timeout_s: float) -> int | None:
        """Wait for the process to end by itself; return its exit code, or None if it still runs."""
        assert self._process is not None
        await asyncio.to_thread(self._until_ended, timeout_s)
        return _exit_code(self._process)

    async def stop(self) -> None:
        """End the process and its children: SIGTERM, and SIGKILL after the grace period. Goes on if it is cancelled."""
        await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(self._end)))

    def _end(self) -> None:
        with self._stopping:
            process = self._process
            self._is_stopped = True
            if process is None:
                return
            if process.returncode is None:  # else it was ended before
                if _exit_code(process) is None:
                    _signal_group(process, signal.SIGTERM)
                    self._until_ended(self._grace_s)
                _signal_group(process, signal.SIGKILL)  # in any case: children may have outlived it
                process.wait()
            # After its end: while a thread still writes to an agent that does not read, closing would wait for that.
            if process.stdin is not None and self._writing.acquire(timeout=_DRAIN_S):
                try:
                    process.stdin.close()
                except OSError:  # the agent has ended, so the rest of the message has no reader
                    logger.debug("the input of a harness process broke off", exc_info=True)
                finally:
                    self._writing.release()
            for reader in self._readers:
                reader.join(_DRAIN_S)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None and not any(reader.is_alive() for reader in self._readers):
                    pipe.close()

    def _until_ended(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while _exit_code(self._process) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    # -- lines ----------------------------------------------------------------------------------------------------

    async def write_line(self, text: str) -> None:
        """Send a line.

        Raises:
            HarnessNotRunningError: The process does not run, or no longer reads.
        """
        process = self._process
        if process is None or not self.is_running() or self._is_stopped:
            raise HarnessNotRunningError("cannot write to harness process: it is not running")
        await asyncio.to_thread(self._write, process, f"{text}\n".encode("utf-8", "surrogatepass"))

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        try:
            with self._writing:
                process.stdin.write(data)
                process.stdin.flush()
        except (OSError, ValueError) as exc:  # a pipe that is closed on this side raises the latter
            raise HarnessNotRunningError(f"cannot write to harness process: {exc}{self._last_words()}") from exc

    async def close_input(self) -> None:
        """Tell the process that no further line comes."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(process.stdin.close)

    async def read_line(self, timeout_s: float | None = None) -> str | None:
        """Return the next line of output, without its end.

        Args:
            timeout_s: How long to wait; None waits until there is a line or the output ends.

        Returns:
            The line; None at the end of the output or after the time limit (`is_at_end` tells them apart).
        """
        if self._process is None:
            return None
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            arrival: asyncio.Future[None] = loop.create_future()
            waiter = (loop, arrival)
            with self._arrived:
                line = self._next_line()
                if line is not None or self._is_at_end():
                    return line
                self._waiters.add(waiter)
            try:
                left_s = None if deadline is None else deadline - loop.time()
                if left_s is not None and left_s <= 0:
                    return None
                await asyncio.wait({arrival}, timeout=left_s)
            finally:
                with self._arrived:
                    self._waiters.discard(waiter)
                arrival.cancel()

    @property
    def is_at_end(self) -> bool:
        """Whether all output was read and no more comes."""
        with self._arrived:
            return self._is_at_end()

    def _is_at_end(self) -> bool:
        return bool(self._lines.queue) and self._lines.queue[0] is None

    def _next_line(self) -> str | None:
        if not self._lines.queue or self._lines.queue[0] is None:
            return None
        return self._lines.get_nowait()

    def _reader(self, pipe: IO[bytes], add: Callable[[str], None], at_end: Callable[[], None]) -> threading.Thread:
        def read() -> None:
            try:
                while data := pipe.readline(MOST_LINE_BYTES):
                    add(data.decode("utf-8", "replace").rstrip("\r\n"))
            except (OSError, ValueError):  # closed
                logger.debug("the output of a harness process broke off", exc_info=True)
            finally:
                at_end()

        thread = threading.Thread(target=read, name=f"harness-{self._command[0]}", daemon=True)
        thread.start()
        return thread

    def _add_line(self, line: str) -> None:
        self._put(line)

    def _end_of_output(self) -> None:
        self._put(None)

    def _put(self, line: str | None) -> None:
        while True:
            try:
                self._lines.put(line, timeout=_FULL_S)
            except queue.Full:
                if not self._is_stopped:
                    continue
                with contextlib.suppress(queue.Empty):  # nothing reads any more: the newest line counts
                    self._lines.get_nowait()
            else:
                break
        with self._arrived:
            waiters, self._waiters = self._waiters, set()
        for loop, arrival in waiters:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_settle, arrival)


def _settle(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process that has ended, without taking it: its number must stay taken until `stop`.

    Else `stop` could signal the group of a later process of the same number.
    """
    if process.returncode is not None or not hasattr(os, "waitid"):  # macOS has it since Python 3.13
        return process.poll()
    try:
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # something else has taken the exit code
        return process.poll()
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
