"""A running local sandbox: commands, files, trees and ports, each asked of the first process inside.

Knows the requests; how processes are started and ended is `launch`'s business.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket as sockets
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError
from openenv.sandboxes import trees
from openenv.sandboxes.base import TIMED_OUT, Command, ExecResult, OnOutput, Sandbox, SandboxSpec
from openenv.sandboxes.local.bubblewrap import Processes
from openenv.sandboxes.local.control import Answer, Channel
from openenv.sandboxes.local.job import LocalJob, exit_code
from openenv.sandboxes.relay import Relay
from openenv.sandboxes.streams import Exchange, Gathering, PipeReader, Pipes, PipeWriter

MAX_FILE = 512 * 1024 * 1024
"""What is read out of a sandbox at once when no limit is given: a file inside can claim any size."""
_IDLE_S = 60.0
_ANSWER_S = 60.0
_KILLED = 128 + 9


class LocalSandbox(Sandbox):
    """A sandbox made with bubblewrap."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, processes: Processes, path: str, relay: Relay) -> None:
        self.sandbox_id = sandbox_id
        self.home = spec.home
        self.spec = spec
        self._processes = processes
        self._relay = relay
        self._jobs = itertools.count(1)
        self._reason: str | None = None
        user = {"HOME": self.home, "USER": "user", "LOGNAME": "user", "SHELL": "/bin/sh"}
        self._environment = {"PATH": path, **user, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **spec.envs}
        self._free = weakref.finalize(self, processes.end)

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
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        gathering = Gathering(max_output, on_output)
        kills = self._oom_kills()
        pipes = Pipes.open(with_stdin=stdin is not None)
        job = next(self._jobs)
        try:
            with self._start(job, cmd, envs, cwd, pipes) as channel:
                exchange = Exchange(pipes, stdin, gathering.feed)
                try:
                    code = self._followed(channel, exchange, deadline)
                except BaseException:
                    self._kill_quietly(job)
                    raise
                if code is None:
                    self._kill_job(job)
                exchange.drain()
        finally:
            pipes.close()
        return ExecResult(
            TIMED_OUT if code is None else code,
            gathering.text("stdout"),
            gathering.text("stderr"),
            timed_out=code is None,
            truncated=gathering.truncated,
            duration_s=time.monotonic() - started,
            oom=self._oom_kills() > kills,
        )

    def start_bg(
        self,
        cmd: Command,
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_output: OnOutput | None = None,
    ) -> LocalJob:
        """Start a command and return at once."""
        number = next(self._jobs)
        pipes = Pipes.open(with_stdin=False) if on_output is not None else None
        with contextlib.ExitStack() as failing:
            if pipes is not None:
                failing.callback(pipes.close)
            channel = failing.enter_context(self._start(number, cmd, envs, cwd, pipes))
            first = self._answer(channel, _ANSWER_S)
            if first.kind == "e":
                raise SandboxError(f"The command cannot be started: {os.strerror(first.number)}.")
            failing.pop_all()
        job = LocalJob(first.number, channel, lambda: self._kill_job(number), self._gone)
        if pipes is not None and on_output is not None:
            job.follow(pipes, on_output)
        return job

    def stop_processes(self) -> None:
        """Kill every process inside."""
        self._asked({"op": "stop"}, _ANSWER_S)

    # Files

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return a file's content."""
        limit = MAX_FILE + 1 if max_bytes is None else max_bytes
        parts: list[bytes] = []
        self._copied_out({"op": "read", "limit": limit}, path, lambda reader: _read_to(reader, parts.append))
        content = b"".join(parts)
        if max_bytes is None and len(content) > MAX_FILE:
            raise SandboxError(f"{path} holds more than {MAX_FILE} bytes; say how many you want with max_bytes.")
        return content

    def write_bytes(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file as the sandbox's user."""
        self._copied_in({"op": "write", "mode": mode}, path, lambda writer: writer.write(content))

    def exists(self, path: str) -> bool:
        """Say whether there is such a file or folder."""
        try:
            self._kind(path)
        except OSError:
            return False
        return True

    def pack(self, path: str, archive: Path, *, max_bytes: int = MAX_FILE) -> None:
        """Write the tree at `path` into a tar file of the host."""
        try:
            with archive.open("wb") as file:
                self._copied_out({"op": "pack"}, path, lambda reader: _read_to(reader, file.write, max_bytes))
        except BaseException:
            archive.unlink(missing_ok=True)
            raise

    def unpack(self, archive: Path, path: str) -> None:
        """Unpack a tar file of the host below `path`, inside."""
        with archive.open("rb") as file:
            self._copied_in({"op": "unpack"}, path, lambda writer: shutil.copyfileobj(file, writer))

    def upload(self, source: Path, path: str) -> None:
        """Copy a file or a tree of the host into the sandbox."""
        if source.is_dir():
            try:
                self._copied_in({"op": "unpack"}, path, lambda writer: trees.pack(str(source), writer))
            except ValueError as error:
                raise SandboxError(f"{source}: {error}") from error
            return
        with source.open("rb") as file:
            request = {"op": "write", "mode": stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777}
            self._copied_in(request, path, lambda writer: shutil.copyfileobj(file, writer))

    def download(self, path: str, target: Path) -> None:
        """Copy a file or a tree to the host."""
        if self._kind(path) == b"d":
            self._copied_out({"op": "pack"}, path, lambda reader: _unpack_to(reader, target))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        request = {"op": "read", "limit": MAX_FILE + 1}
        try:
            with target.open("wb") as file:
                self._copied_out(request, path, lambda reader: _read_to(reader, file.write, MAX_FILE))
        except (OSError, SandboxError):
            target.unlink(missing_ok=True)
            raise

    # Ports

    def expose(self, socket: Path, *, port: int) -> str:
        """Let a port inside reach a unix socket of the host.

        The port is opened inside and accepted on outside, so that no process of the sandbox is in between.
        """
        with self._call({"op": "listen", "port": port}) as channel:
            answer, fd = channel.receive_fd(_ANSWER_S)
        if answer is None:
            raise self._gone() or SandboxError("The sandbox did not open the port.")
        if answer.kind != "o" or fd is None:
            raise SandboxError(f"Port {port} cannot be opened inside: {os.strerror(answer.number)}.")
        exposure = self._relay.add(sockets.socket(fileno=fd), socket)
        self._processes.exposures.append(exposure)
        gone = self._gone()
        if gone is not None:  # another thread may have ended it meanwhile
            exposure.close()
            raise gone
        return f"http://127.0.0.1:{port}"

    # The end

    def is_alive(self) -> bool:
        """Say whether the sandbox still runs."""
        return self._gone() is None

    def kill(self) -> None:
        """End the sandbox and everything in it, and free what it took of the host."""
        self._end("killed")

    def close(self) -> None:
        """End the sandbox and free what it took of the host."""
        self._end("closed")

    def abandon(self) -> None:
        """Let go of the sandbox in a forked child of its owner."""
        self._reason = "it belongs to the parent process"
        self._free.detach()
        self._processes.abandon()

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = self._last_words() or reason
        self._processes.end()
        self._free.detach()

    def _gone(self) -> SandboxGone | None:
        """Return the error that says why the sandbox is gone; None while it is not."""
        if self._reason is None:
            self._reason = self._last_words()
        return None if self._reason is None else SandboxGone(self.sandbox_id, self._reason)

    def _last_words(self) -> str | None:
        words = self._processes.control.last_words()
        if words is None or words:
            return words
        return "out of memory" if self._oom_kills() else "its first process ended"

    def _oom_kills(self) -> int:
        group = self._processes.group
        return 0 if group is None else group.oom_kills()

    # Requests

    def _start(
        self, job: int, cmd: Command, envs: Mapping[str, str] | None, cwd: str | None, pipes: Pipes | None
    ) -> Channel:
        argv = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        if not argv:
            raise ValueError("a command needs at least a program")
        environment = {**self._environment, **(envs or {})}
        if any("\0" in part for part in (*argv, *environment, *environment.values(), cwd or "")):
            raise ValueError("a command, its environment and its folder cannot hold null characters")
        if any(not name or "=" in name for name in environment):
            raise ValueError("the name of a variable must not be empty or hold an equals sign")
        request = {
            "op": "exec",
            "job": job,
            "argv": [os.fsencode(part) for part in argv],
            "env": {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            "cwd": self._path(cwd or self.workdir),
            "stdio": (pipes is not None and pipes.stdin is not None, pipes is not None, pipes is not None),
        }
        try:
            return self._call(request, pipes.given if pipes is not None else [])
        finally:
            if pipes is not None:
                pipes.close_given()

    def _followed(self, channel: Channel, exchange: Exchange, deadline: float | None) -> int | None:
        """Return a command's exit code, or None when its time is over."""
        while exchange.run(channel.fileno(), deadline):
            answer = channel.receive(_ANSWER_S)
            if answer is None:
                gone = self._gone()
                if gone is not None:
                    raise gone
                return _KILLED  # somebody inside killed its supervisor, and with it the command
            if answer.kind == "e":
                raise SandboxError(f"The command cannot be started: {os.strerror(answer.number)}.")
            if answer.kind == "x":
                return exit_code(answer.number)
        return None

    def _kill_job(self, job: int) -> None:
        self._asked({"op": "kill", "job": job}, _ANSWER_S)

    def _kill_quietly(self, job: int) -> None:
        with contextlib.suppress(SandboxError):
            self._kill_job(job)

    def _kind(self, path: str) -> bytes:
        request = {"op": "kind", "job": next(self._jobs), "path": self._path(path)}
        answer = self._asked(request, _ANSWER_S)
        answer.raise_for_path(path)
        return answer.value

    def _copied_out(self, request: Mapping[str, object], path: str, take: Callable[[PipeReader], object]) -> None:
        ours, theirs = os.pipe()
        self._copied(request, path, ours, theirs, lambda: take(PipeReader(ours, idle_s=_IDLE_S)))

    def _copied_in(self, request: Mapping[str, object], path: str, give: Callable[[PipeWriter], object]) -> None:
        theirs, ours = os.pipe()
        self._copied(request, path, ours, theirs, lambda: give(PipeWriter(ours, idle_s=_IDLE_S)))

    def _copied(
        self, request: Mapping[str, object], path: str, ours: int, theirs: int, copy: Callable[[], object]
    ) -> None:
        """Do a file operation with a pipe; what the other side says went wrong comes before what we saw of it."""
        job = next(self._jobs)
        try:
            try:
                channel = self._call({**request, "job": job, "path": self._path(path)}, [theirs])
            finally:
                os.close(theirs)
            with channel:
                failure: BaseException | None = None
                try:
                    copy()
                except BrokenPipeError as error:
                    failure = error
                except TimeoutError as error:
                    self._kill_quietly(job)
                    raise SandboxError(f"{path}: {error}.") from error
                except BaseException:
                    self._kill_quietly(job)
                    raise
                finally:
                    os.close(ours)
                    ours = -1
                self._answer(channel, _IDLE_S).raise_for_path(path)
                if failure is not None:
                    raise SandboxError(f"{path}: the sandbox took not all of it.")
        finally:
            if ours >= 0:
                os.close(ours)

    def _asked(self, request: Mapping[str, object], timeout: float) -> Answer:
        with self._call(request) as channel:
            return self._answer(channel, timeout)

    def _answer(self, channel: Channel, timeout: float) -> Answer:
        try:
            answer = channel.receive(timeout)
        except TimeoutError:
            self._end("it does not answer")
            raise self._gone() or SandboxError("The sandbox does not answer.") from None
        if answer is None:
            raise self._gone() or SandboxError("The operation was interrupted from inside the sandbox.")
        return answer

    def _call(self, request: Mapping[str, object], fds: list[int] | None = None) -> Channel:
        gone = self._gone()
        if gone is not None:
            raise gone
        try:
            return self._processes.control.call(request, fds or [])
        except OSError as error:
            raise self._gone() or SandboxError(f"The sandbox cannot be reached: {error}") from None

    def _path(self, path: str) -> bytes:
        return os.fsencode(os.path.join(self.workdir, path))


def _read_to(reader: PipeReader, take: Callable[[bytes], object], max_bytes: int | None = None) -> None:
    left = max_bytes
    while data := reader.read_some():
        if left is not None:
            left -= len(data)
            if left < 0:
                raise SandboxTreeError(f"There is more to read than {max_bytes} bytes.")
        take(data)


def _unpack_to(reader: PipeReader, target: Path) -> None:
    try:
        trees.unpack(reader, str(target), leaving_links=False, max_bytes=MAX_FILE)
    except ValueError as error:
        raise SandboxError(f"The tree cannot be taken out: {error}") from error
    while reader.read_some():
        pass  # the padding at the end of an archive
