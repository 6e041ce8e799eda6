"""Commands in a box that is driven through a shell: run, streamed, timed, killed with everything they started.

Knows `shell_script` and time. A backend gives it `Channel`s and says whether its box still lives; which engine that is
it must not know.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from openenv.errors import SandboxError, SandboxGone
from openenv.sandboxes import shell_command as shell_script
from openenv.sandboxes.base import TIMED_OUT, Command, ExecResult, OnOutput, Sandbox, SandboxSpec
from openenv.sandboxes.shell_command import Channel, Invocation, ShellRun

START_S = 120.0
_KILLED = 137
_GRACE_S = 3.0
_CHUNK = 1 << 20
_STARTS = 5
_CONTROL_S = 15.0
Input = Callable[[], Iterable[bytes]]
"""Gives what a command reads; asked again when the command has to be started again."""


class ShellJob:
    """A command in the background of a shell-driven box."""

    def __init__(self, sandbox: ShellCommands, run: ShellRun) -> None:
        self._sandbox = sandbox
        self._run = run
        self._over = threading.Event()
        self._error: SandboxError | None = None
        self._exit_code = _KILLED
        self._thread = threading.Thread(target=self._follow, name=f"job-{self.pid}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the process id inside the sandbox."""
        return self._run.reader.pid or 0

    @property
    def is_over(self) -> bool:
        """Say whether the job has ended."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutError when it is not there in time."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"The background job {self.pid} was not over in {timeout} s.")
        if self._error is not None:
            raise self._error
        return self._exit_code

    def kill(self) -> None:
        """Kill the job and every process that it started."""
        try:
            self._sandbox.kill_run(self._run)
        except SandboxGone:
            pass
        self._over.wait(_GRACE_S)

    def _follow(self) -> None:
        try:
            self._run.pump(None)
            self._exit_code = self._sandbox.exit_code_of(self._run)
        except SandboxError as error:
            self._error = error
        finally:
            self._sandbox.forget(self._run)
            self._over.set()


class ShellCommands(Sandbox):
    """The commands, jobs and the end of a sandbox of which only a shell is asked."""

    oom_counters: Sequence[str] = ()
    """Files inside that count what was killed because the memory was used up."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        self.sandbox_id = sandbox_id
        self.home = spec.home
        self.spec = spec
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._runs: set[ShellRun] = set()
        self._numbers = itertools.count(1)
        self._lowest = shell_script.mark_kb(0)

    @abstractmethod
    def _channel(self, script: str, *, has_input: bool) -> Channel:
        """Start a shell inside that runs a script; `has_input` when something will be sent to it."""

    @abstractmethod
    def _why_gone(self) -> str | None:
        """Ask the engine why the box is gone; None while it lives."""

    @abstractmethod
    def _destroy(self) -> None:
        """End the box and remove what it took; more than once does no harm."""

    # Commands

    def exec(
        self,
        cmd: Command,
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = 60,
        stdin: bytes | None = None,
        on_output: OnOutput | None = None,
        max_output: int = 10 * 1024 * 1024,
    ) -> ExecResult:
        """Run a command to its end."""
        parts = None if stdin is None else partial(slices, stdin)
        run = self._begin(cmd, envs=envs, cwd=cwd, stdin=parts, on_output=on_output, max_output=max_output)
        return self._finish(run, timeout)

    def start_bg(
        self,
        cmd: Command,
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_output: OnOutput | None = None,
    ) -> ShellJob:
        """Start a command and return at once."""
        return ShellJob(self, self._begin(cmd, envs=envs, cwd=cwd, stdin=None, on_output=on_output, max_output=0))

    def _begin(
        self,
        cmd: Command,
        *,
        envs: Mapping[str, str] | None,
        cwd: str | None,
        stdin: Input | None,
        on_output: OnOutput | None,
        max_output: int | None,
    ) -> ShellRun:
        shell_script.check_text(cmd, envs)
        self._require_alive()
        with self._lock:
            mark = self._lowest = shell_script.mark_kb(next(self._numbers))
        everything = {**self.spec.envs, **(envs or {})}
        call = Invocation(cmd, self.workdir, self.home, everything, cwd, mark, stdin is not None, self.oom_counters)
        for attempt in itertools.count(1):
            run = ShellRun(
                self._channel(call.script(), has_input=stdin is not None),
                call,
                on_output=on_output,
                max_output=max_output,
            )
            if self._starts(run, stdin):
                return run
            self._raise_if_gone()
            if attempt == _STARTS:
                words = run.reader.complaint or f"its shell ended with {run.channel.exit_code}"
                raise SandboxError(f"Sandbox '{self.sandbox_id}' could not start a command: {words}")
            time.sleep(0.1 * attempt)  # it may be full of processes that were just killed
        raise AssertionError

    def _starts(self, run: ShellRun, stdin: Input | None) -> bool:
        """Wait until a command has begun; False when its shell ended before."""
        with self._lock:
            self._runs.add(run)
        try:
            self._feed(run, stdin)
            if run.wait_started(time.monotonic() + START_S):
                run.began = time.monotonic()
                return True
        except BaseException:
            self._abandon(run)
            raise
        self.forget(run)
        return False

    def _feed(self, run: ShellRun, stdin: Input | None) -> None:
        if stdin is None:
            run.channel.end_input()
            return
        threading.Thread(target=_pour, args=(run.channel, stdin()), name="stdin", daemon=True).start()

    def _finish(self, run: ShellRun, timeout: float | None) -> ExecResult:
        try:
            if run.pump(None if timeout is None else run.began + timeout):
                code = self.exit_code_of(run)
                self.forget(run)
                return run.result(code)
            self.kill_run(run)
            run.pump(time.monotonic() + _GRACE_S)
            self._raise_if_gone(ask=False)
            self.forget(run)
            return run.result(TIMED_OUT, timed_out=True)
        except BaseException:
            self._abandon(run)
            raise

    def _abandon(self, run: ShellRun) -> None:
        """Kill a command that nobody waits for any more."""
        self.forget(run)
        if self._ended is None:
            try:
                self.kill_run(run)
            except SandboxError:
                pass

    def exit_code_of(self, run: ShellRun) -> int:
        """Return how a command ended; raise when its end is that of the whole box."""
        if run.reader.exit_code is not None:
            return run.reader.exit_code
        self._raise_if_gone()
        return run.channel.exit_code or _KILLED  # its shell was killed, by the command or for want of memory

    def forget(self, run: ShellRun) -> None:
        """Let go of a command's channel."""
        with self._lock:
            self._runs.discard(run)
        run.channel.close()

    def kill_run(self, run: ShellRun) -> None:
        """Kill a command and every process that it started."""
        try:
            self._control(shell_script.kill_marked(run.mark, self._lowest), tries=2)
        except SandboxGone:
            raise
        except SandboxError:  # a box so full that nobody can look around in it any more
            self._kill_all()

    def stop_processes(self) -> None:
        """Kill every process inside."""
        self._require_alive()
        self._kill_all()

    def _kill_all(self) -> None:
        self._control(shell_script.KILL_ALL)

    def _control(self, script: str, *, tries: int = 5) -> None:
        """Run a script of our own, outside of any command, and see that it came to its end."""
        words = ""
        for _ in range(tries):
            self._require_alive()
            words = self._control_once(script)
            if words.endswith("done"):
                return
            self._raise_if_gone()
            time.sleep(0.1)
        raise SandboxError(f"Processes of sandbox '{self.sandbox_id}' could not be killed: {words}")

    def _control_once(self, script: str) -> str:
        channel = self._channel(f"{script}\nprintf done", has_input=False)
        said = b""
        try:
            channel.end_input()
            deadline = time.monotonic() + _CONTROL_S
            while (left := deadline - time.monotonic()) > 0:
                got = channel.receive(left)
                said += got[1] if got is not None else b""
                if said.endswith(b"done"):
                    break
        except EOFError:
            pass
        finally:
            channel.close()
        return said.decode("utf-8", "replace").strip()

    # Life

    def kill(self) -> None:
        """End the sandbox and everything in it."""
        self._end("killed")

    def close(self) -> None:
        """End the sandbox and free what it took."""
        self._end("closed")

    def _end(self, reason: str) -> None:
        with self._lock:
            first, self._ended = self._ended is None, self._ended or reason
            runs = list(self._runs)
        for run in runs:
            run.channel.close()
        if first or reason == "closed":
            self._destroy()

    def _require_alive(self) -> None:
        if self._ended is not None:
            raise SandboxGone(self.sandbox_id, self._ended)

    def _raise_if_gone(self, *, ask: bool = True) -> None:
        self._require_alive()
        reason = self._why_gone() if ask else None
        self._require_alive()
        if reason is not None:
            raise SandboxGone(self.sandbox_id, reason)


def slices(data: bytes) -> Iterator[bytes]:
    """Cut bytes into pieces that a pipe can take."""
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


def _pour(channel: Channel, parts: Iterable[bytes]) -> None:
    try:
        for part in parts:
            channel.send(part)
    except (OSError, ValueError):  # the command is over, and so is what was to be read
        pass
    channel.end_input()
