"""A sandbox that is driven through a shell: the whole protocol on top of one ability, to start `/bin/sh` inside.

A backend subclasses `ShellSandbox` and adds three methods: `_channel` starts a shell inside, `_why_gone` says why the
sandbox is gone, `_destroy` ends it. Commands, files, trees and ports are all commands of that shell; `shell_command`
has the text that runs one and the reader of its output. Knows no engine.

    exec(cmd)  ->  _begin   a channel, the script, wait for its start marker (again, up to 5 times, when the shell dies)
               ->  _finish  pump output until the end marker, or kill by mark when the time is over
"""

from __future__ import annotations

import itertools
import shlex
import tarfile
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError, SandboxUnsupported
from openenv.protocol.backoff import Backoff
from openenv.sandboxes import shell_command, trees
from openenv.sandboxes.base import MAX_TREE, TIMED_OUT, CommandSpec, ExecResult, OnOutput, Sandbox, SandboxSpec, Stream
from openenv.sandboxes.exposed_ports import StdioTunnel, relay_source
from openenv.sandboxes.host import ConnectionQuota
from openenv.sandboxes.shell_command import Channel, Invocation, ShellRun
from openenv.sandboxes.streams import slices

START_S = 120.0
_KILLED = 137
_GRACE_S = 3.0
_CHUNK = 1 << 20
_STARTS = 5
_PAUSES = Backoff(first_pause_s=0.15, longest_pause_s=0.5)
_CONTROL_S = 15.0
_FILE_S = 600.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FILE_TOO_LARGE = 128 + 25  # SIGXFSZ
_NOT_THERE, _FOLDER, _NO_FILE, _FORBIDDEN = 44, 45, 46, 47  # exit codes of the file scripts below
Input = Callable[[], Iterable[bytes]]
"""Yields the standard input of a command; called again when the command has to be started again."""


class ShellJob:
    """A command in the background of a shell-driven sandbox."""

    def __init__(self, sandbox: ShellSandbox, run: ShellRun) -> None:
        self._sandbox = sandbox
        self._run = run
        self._over = threading.Event()
        self._error: SandboxError | None = None
        self._exit_code = _KILLED
        self._thread = threading.Thread(target=self._follow, name=f"job-{self.pid}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._run.reader.pid or 0

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout):
            raise TimeoutError(f"The background job {self.pid} was not over in {timeout} s.")
        if self._error is not None:
            raise self._error
        return self._exit_code

    def kill(self) -> None:
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


class ShellSandbox(Sandbox):
    """A sandbox that requires only a shell. Backends add how to start a shell, and how to end the sandbox."""

    oom_counters: Sequence[str] = ()
    """Files inside that count the processes killed because memory ran out."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, *, quota: ConnectionQuota | None = None) -> None:
        self.sandbox_id = sandbox_id
        self.home = spec.home
        self.spec = spec
        self._quota = quota or ConnectionQuota()  # of connections to exposed ports; a backend's sandboxes share one
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._runs: set[ShellRun] = set()
        self._numbers = itertools.count(1)
        self._lowest = shell_command.mark_kb(0)
        self._tunnels: list[StdioTunnel] = []
        self._tunnelled: dict[int, Path] = {}

    @property
    def workdir(self) -> str:
        """Return the folder that commands start in."""
        return self.spec.workdir or super().workdir

    @abstractmethod
    def _channel(self, script: str, *, has_input: bool) -> Channel:
        """Start a shell inside that runs a script; `has_input` if data will be sent to it."""

    @abstractmethod
    def _why_gone(self) -> str | None:
        """Ask the engine why the sandbox is gone; None while it lives."""

    @abstractmethod
    def _destroy(self) -> None:
        """End the sandbox and free its resources; calling it again does no harm."""

    # Commands

    def _exec(self, command: CommandSpec, timeout: float | None) -> ExecResult:
        stdin = None if command.stdin is None else partial(slices, command.stdin)
        return self._finish(self._begin(command, stdin), timeout)

    def _start_bg(self, command: CommandSpec) -> ShellJob:
        return ShellJob(self, self._begin(command, None))

    def _begin(self, command: CommandSpec, stdin: Input | None) -> ShellRun:
        """Start a command and wait for its start marker; `stdin` replaces the command's input."""
        self._require_alive()
        with self._lock:
            mark = self._lowest = shell_command.mark_kb(next(self._numbers))
        call = Invocation(
            replace(command, envs={**self.spec.envs, **command.envs}),
            workdir=self.workdir,
            home=self.home,
            mark=mark,
            has_input=stdin is not None,
            oom_counters=self.oom_counters,
        )
        for attempt in range(_STARTS):
            channel = self._channel(call.script(), has_input=stdin is not None)
            run = ShellRun(channel, call)
            if self._starts(run, stdin):
                return run
            self._raise_if_gone()
            time.sleep(_PAUSES.pause_s(attempt))  # it may be full of processes that were just killed
        reason = run.reader.complaint or f"its shell ended with {run.channel.exit_code}"
        raise SandboxError(f"Sandbox '{self.sandbox_id}' could not start a command: {reason}")

    def _starts(self, run: ShellRun, stdin: Input | None) -> bool:
        """Wait until a command has begun; False when its shell ended before."""
        with self._lock:
            self._runs.add(run)
        try:
            if stdin is None:
                run.channel.end_input()
            if run.wait_started(time.monotonic() + START_S):
                run.began = time.monotonic()
                if stdin is not None:
                    # Not before: a shell that failed to start would take input that only its next attempt can use.
                    threading.Thread(target=_pour, args=(run.channel, stdin()), name="stdin", daemon=True).start()
                return True
        except BaseException:
            self._abandon(run)
            raise
        self.forget(run)
        return False

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
        """Kill a command if nobody waits for its result."""
        self.forget(run)
        if self._ended is None:
            try:
                self.kill_run(run)
            except SandboxError:
                pass

    def exit_code_of(self, run: ShellRun) -> int:
        """Return the exit code of a command; raise if the whole sandbox ended with it."""
        if run.reader.exit_code is not None:
            return run.reader.exit_code
        self._raise_if_gone()
        return run.channel.exit_code or _KILLED  # the command, or the kernel when memory ran out, killed its shell

    def forget(self, run: ShellRun) -> None:
        """Let go of a command's channel."""
        with self._lock:
            self._runs.discard(run)
        run.channel.close()

    def kill_run(self, run: ShellRun) -> None:
        """Kill a command and every process that it started."""
        try:
            self._control(shell_command.kill_marked(run.mark, self._lowest), tries=2)
        except SandboxGone:
            raise
        except SandboxError:  # so full of processes that a new shell cannot start
            self._kill_all()

    def stop_processes(self) -> None:
        """Kill every process inside; ports stay exposed."""
        self._require_alive()
        self._kill_all()
        self._close_tunnels()
        for port, socket in self._tunnelled.items():  # the relays inside were killed too
            self._open_tunnel(socket, port)

    def _kill_all(self) -> None:
        self._control(shell_command.KILL_ALL)

    def _control(self, script: str, *, tries: int = 5) -> None:
        """Run an internal script, outside of any command, and make sure that it ran to its end."""
        reply = ""
        for attempt in range(tries):
            self._require_alive()
            reply = self._control_once(script)
            if reply.endswith("done"):
                return
            self._raise_if_gone()
            time.sleep(_PAUSES.pause_s(attempt))
        raise SandboxError(f"Processes of sandbox '{self.sandbox_id}' could not be killed: {reply}")

    def _control_once(self, script: str) -> str:
        channel = self._channel(f"{script}\nprintf done", has_input=False)
        reply = b""
        try:
            channel.end_input()
            deadline = time.monotonic() + _CONTROL_S
            while (left := deadline - time.monotonic()) > 0:
                got = channel.receive(left)
                reply += got[1] if got is not None else b""
                if reply.endswith(b"done"):
                    break
        except EOFError:
            pass
        finally:
            channel.close()
        return reply.decode("utf-8", "replace").strip()

    # The end

    def kill(self) -> None:
        self._end("killed")

    def close(self) -> None:
        self._end("closed")

    def _end(self, reason: str) -> None:
        self._close_tunnels()
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

    # Ports

    def expose(self, socket: Path, *, port: int) -> str:
        """Let `http://127.0.0.1:PORT` inside reach a unix socket of the host, through a relay that runs inside."""
        self._open_tunnel(socket, port)
        self._tunnelled[port] = socket
        return f"http://127.0.0.1:{port}"

    def _open_tunnel(self, socket: Path, port: int) -> None:
        tunnel = StdioTunnel(socket, self._quota)
        relay = ["python3", "-c", relay_source(), str(port)]
        command = CommandSpec(relay, {"PATH": _PATH}, "/", on_output=tunnel.received, max_output=0)
        run = self._begin(command, tunnel.frames)
        with self._lock:
            self._tunnels.append(tunnel)
        job = ShellJob(self, run)
        deadline = time.monotonic() + START_S
        while not tunnel.ready.wait(0.02):
            if job.is_over or time.monotonic() > deadline:
                tunnel.close()
                job.kill()
                raise self._tunnel_failure(job, run, port)

    def _tunnel_failure(self, job: ShellJob, run: ShellRun, port: int) -> SandboxError:
        if job.is_over and job.wait() in (126, 127):
            return SandboxUnsupported(
                f"Port {port} cannot be exposed in sandbox '{self.sandbox_id}': its network cannot be entered from "
                "here (that takes root and an engine on this machine), and there is no `python3` inside for a relay. "
                "Use an image with `python3`."
            )
        return SandboxError(f"Port {port} cannot be opened in sandbox '{self.sandbox_id}'.")

    def _close_tunnels(self) -> None:
        with self._lock:
            tunnels, self._tunnels = self._tunnels, []
        for tunnel in tunnels:
            tunnel.close()

    # Files

    def _tool(self, script: str, *, stdin: Input | None = None, on_output: OnOutput | None = None) -> ShellRun:
        """Run an internal script on files, as the sandbox user, and raise the error of its exit code."""
        keep = None if on_output is None else 0
        command = CommandSpec(script, {"PATH": _PATH, "LC_ALL": "C"}, "/", on_output=on_output, max_output=keep)
        run = self._begin(command, stdin)
        result = self._finish(run, _FILE_S)
        if result.exit_code == 0:
            return run
        reason = result.stderr.strip() or f"exit code {result.exit_code}"
        errors: dict[int, Exception] = {
            _FILE_TOO_LARGE: SandboxTreeError(f"Sandbox '{self.sandbox_id}': the file that was written is too large."),
            _NOT_THERE: FileNotFoundError(f"There is no such file in sandbox '{self.sandbox_id}'."),
            _FOLDER: IsADirectoryError(f"This is a folder in sandbox '{self.sandbox_id}'."),
            _FORBIDDEN: PermissionError(f"The user of sandbox '{self.sandbox_id}' may not do this: {reason}"),
        }
        raise errors.get(result.exit_code) or SandboxError(f"Sandbox '{self.sandbox_id}': {reason}")

    def _path(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("A path cannot hold a NUL character.")
        # absolute, so that no tool takes a path that begins with a dash for an option
        return shlex.quote(path if path.startswith("/") else f"{self.workdir}/{path}")

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        where = self._path(path)
        read = "cat" if max_bytes is None else f"head -c {max_bytes}"
        return self._tool(
            f"p={where}; [ -d $p ] && exit {_FOLDER}; [ -e $p ] || exit {_NOT_THERE}\n".replace("$p", '"$p"')
            + f'[ -f "$p" ] || {{ echo "no regular file" >&2; exit {_NO_FILE}; }}; [ -r "$p" ] || exit {_FORBIDDEN}\n'
            + f'exec {read} <"$p"'
        ).output("stdout")

    def write_bytes(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._tool(
            f'p={self._path(path)}; [ -d "$p" ] && exit {_FOLDER}; mkdir -p "${{p%/*}}/" || exit {_FORBIDDEN}\n'
            f'[ -e "$p" ] && [ ! -f "$p" ] && {{ echo "no regular file" >&2; exit {_NO_FILE}; }}\n'
            f'cat >"$p" || exit {_FORBIDDEN}; chmod {mode & 0o7777:o} "$p"',
            stdin=partial(slices, content),
        )

    def exists(self, path: str) -> bool:
        return self._tool(f"[ -e {self._path(path)} ] && printf yes; :").output("stdout") == b"yes"

    def pack(self, path: str, archive: Path, *, max_bytes: int = MAX_TREE) -> None:
        with tempfile.TemporaryDirectory(prefix="openenv-tree-") as folder:
            raw = Path(folder, "tree.tar")
            self._fetch_tree(path, raw, max_bytes)
            clean_archive(raw, archive, max_bytes=max_bytes)

    def unpack(self, archive: Path, path: str) -> None:
        # The tar inside does it, so a hostile archive harms only the sandbox.
        with archive.open("rb") as file:
            self._tool(self._tar_in(path), stdin=lambda: iter(lambda: file.read(_CHUNK), b""))

    def _tar_out(self, path: str, destination: str = "-") -> str:
        # The owner of a file may always make it readable. GNU tar ends with 1 or 2 for files that changed or cannot be
        # read; the archive still contains the readable files.
        return (
            f'p={self._path(path)}; [ -e "$p" ] || exit {_NOT_THERE}\n'
            'if [ -d "$p" ]; then cd "$p" && set -- .; else cd "${p%/*}/" && set -- "./${p##*/}"; fi || exit '
            f"{_FORBIDDEN}\n"
            "find . -type d ! -perm -500 -exec chmod u+rx {} \\; 2>/dev/null\n"
            "find . -type f ! -perm -400 -exec chmod u+r {} + 2>/dev/null\n"
            f'tar -cf {shlex.quote(destination)} "$@"; c=$?; [ $c -le 2 ] && c=0; exit $c'
        )

    def _tar_in(self, path: str, source: str = "-") -> str:
        return f'p={self._path(path)}; mkdir -p "$p" && cd "$p" || exit {_FORBIDDEN}; tar -xpf {shlex.quote(source)}'

    def _fetch_tree(self, path: str, raw: Path, max_bytes: int) -> None:
        """Write the tree at `path` into a file of the host, as the tar inside makes it."""
        left = archive_limit(max_bytes)

        def keep(stream: Stream, data: bytes) -> None:
            nonlocal left
            if stream == "stdout":
                left -= len(data)
                if left < 0:
                    raise SandboxTreeError(f"The tree holds more than {max_bytes} bytes.")
                file.write(data)

        with raw.open("wb") as file:
            self._tool(self._tar_out(path), on_output=keep)


def _pour(channel: Channel, parts: Iterable[bytes]) -> None:
    try:
        for part in parts:
            channel.send(part)
    except (OSError, ValueError):  # the command ended without reading it
        pass
    channel.end_input()


def archive_limit(max_bytes: int) -> int:
    """Return the size limit of an archive of files with at most `max_bytes`: headers and padding count."""
    return max_bytes + max_bytes // 4 + (64 << 20)


# Archives that a tar inside made, by code that may be hostile: cleaned before anything on the host reads them.


def clean_archive(source: Path, archive: Path, *, max_bytes: int) -> None:
    """Copy a tar file without devices, pipes, owners, set-id bits and names that lead outside.

    Raises:
        SandboxError: The file is not a tar file, or its files hold more than `max_bytes`.
    """
    try:
        _copy_clean(source, archive, max_bytes)
    except BaseException as error:
        archive.unlink(missing_ok=True)
        if isinstance(error, (tarfile.TarError, OSError, ValueError, EOFError)):
            raise SandboxError(f"The sandbox sent no readable archive: {error}") from error
        raise


def _copy_clean(source: Path, archive: Path, max_bytes: int) -> None:
    total = 0
    with (
        tarfile.open(source, "r:", errors="surrogateescape") as old,
        tarfile.open(archive, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as new,
    ):
        for member in old:
            entry = _clean(member)
            if entry is None:
                continue
            total += member.size if member.isreg() else 0
            if total > max_bytes:
                raise SandboxTreeError(f"The tree holds more than {max_bytes} bytes.")
            new.addfile(entry, old.extractfile(member) if member.isreg() else None)


def _clean(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    try:
        entry = tarfile.TarInfo(trees.inner_name(member.name.lstrip("/")) or ".")
        # A symbolic link may name anything: `trees.unpack` and the tar inside decide about its target. A hard link
        # names an entry of this archive.
        entry.linkname = trees.inner_name(member.linkname.lstrip("/")) if member.islnk() else member.linkname
    except ValueError:
        return None
    entry.type = tarfile.REGTYPE if member.isreg() else member.type
    entry.mode = member.mode & 0o777
    entry.mtime = int(member.mtime)
    entry.size = member.size if member.isreg() else 0
    return entry
