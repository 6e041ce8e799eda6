"""The shell text that runs one command in a box, and the reader that finds the command's output in what comes back.

A box is only asked to have `/bin/sh`. The text marks every process of the command, tells its pid, and ends both output
streams with a line that only the reader knows, so that the end is seen also while leftovers hold the streams open.
The mark is the hard limit of RLIMIT_RSS, which Linux ignores: children inherit it whatever they do (double forks, new
sessions, an empty environment), and without privileges nobody can raise it again. Knows no engine and does no IO.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import selectors
import shlex
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from openenv.sandboxes.base import Command, ExecResult, OnOutput, Stream

_EDGE = b"\x1e"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HIGHEST_MARK_KB = 1 << 40

READ_SCRIPT = r"""IFS= read -r n; s=; while IFS= read -r l; do [ "$l" = "$n" ] && break; s="$s$l
"; done; unset l; eval "$s" """
"""For `sh -c`: reads a script from standard input up to the line that repeats the first, and runs it. What comes after
that line stays unread, for the script. So neither commands nor secrets are in anybody's argument list."""


def framed(script: str) -> bytes:
    """Return a script as `READ_SCRIPT` wants it."""
    end = secrets.token_hex(8)
    return f"{end}\n{script}\n{end}\n".encode()


def mark_kb(number: int) -> int:
    """Return the mark of the n-th command of a box; later ones have lower marks, for limits can only go down."""
    return _HIGHEST_MARK_KB - number


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command as it is to run in a box."""

    command: Command
    workdir: str
    home: str
    envs: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    mark: int = _HIGHEST_MARK_KB
    has_input: bool = False
    oom_counters: Sequence[str] = ()
    """Files with a line `oom_kill N`, of which those count that the box has."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def script(self) -> str:
        """Return the shell text that runs the command."""
        source = "0<&3" if self.has_input else "</dev/null"
        return "\n".join(
            [
                "exec 3<&0 4>&2 </dev/null 2>/dev/null",
                self._count_oom(),
                "k; o=$k",
                "(",
                f"ulimit -m {self.mark} 2>/dev/null",  # the shell around it stays, and tells the end also after a kill
                f"exec {source} 3<&- 2>&4 4>&-",
                "read -r pid rest </proc/self/stat",
                f"printf '\\036{self.nonce} S %d\\036' $pid",
                f"printf '\\036{self.nonce} S %d\\036' $pid >&2",
                *self._place(),
                *self._exports(),
                self._exec(),
                ")",
                "c=$?; k",
                f"printf '\\036{self.nonce} E %d %d\\036' $c $((k-o))",
                f"printf '\\036{self.nonce} E %d %d\\036' $c $((k-o)) >&4",
            ]
        )

    def _count_oom(self) -> str:
        each = " ".join(shlex.quote(path) for path in self.oom_counters)
        read = 'while read -r a b; do [ "$a" = oom_kill ] && k=$b; done <$f'
        return f"k() {{ k=0; for f in {each}; do [ -r $f ] && {read}; done; }}"

    def _place(self) -> list[str]:
        work = shlex.quote(self.workdir)
        lines = [f"cd {work} 2>/dev/null || {{ mkdir -p {work} && cd {work}; }}"]
        if self.cwd is not None:
            where = shlex.quote(self.cwd if not self.cwd.startswith("-") else f"./{self.cwd}")
            lines.append(f"cd {where} || exit 126")
        return lines

    def _exports(self) -> list[str]:
        envs = {"HOME": self.home, **self.envs}
        return [f"export {name}={shlex.quote(value)}" for name, value in envs.items() if _NAME.fullmatch(name)]

    def _exec(self) -> str:
        odd = [f"{name}={value}" for name, value in self.envs.items() if not _NAME.fullmatch(name)]
        argv = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)
        return "exec " + shlex.join([*(["env", *odd] if odd else []), *argv])


def check_text(command: Command, envs: Mapping[str, str] | None) -> None:
    """Raise ValueError for what no process can be given."""
    parts = [command] if isinstance(command, str) else list(command)
    if not parts:
        raise ValueError("An empty argument list is no command.")
    for text in [*parts, *(envs or {}), *(envs or {}).values()]:
        if "\0" in text:
            raise ValueError("A command, its arguments and its environment cannot hold a NUL character.")
    for name in envs or {}:
        if not name or "=" in name:
            raise ValueError(f"{name!r} is no name of an environment variable.")


def kill_marked(mark: int, lowest: int) -> str:
    """Return the script that kills every process with a mark, and those that lowered theirs below all given ones.

    It stops them first, until a look at all processes finds no new one, none that is not yet stopped, and none that
    vanished before it was looked at (it may have left a child): a stopped process keeps its place under the limit of
    processes, so that a fork bomb cannot outrun this. It forks nothing: a full box has no process to spare.
    """
    return f"""
m={mark * 1024}; low={lowest * 1024}; known=" "; looks=100
while [ $looks -gt 0 ]; do
looks=$((looks-1)); clean=1
for d in /proc/[0-9]*; do
p=${{d#/proc/}}
[ "$p" = 1 ] && continue
case $known in *" $p "*) read -r l <$d/stat; case ${{l##*) }} in [TtZX]*) ;; *) clean=;; esac; continue;; esac
h=gone
{{ while read -r a b c s h r; do [ "$a $b $c" = "Max resident set" ] && break; h=none; done; }} <$d/limits
case $h in gone|"") clean=; continue;; *[!0-9]*) continue;; esac
[ "$h" = "$m" ] || [ "$h" -lt "$low" ] || continue
kill -STOP $p && looks=100
clean=; known="$known$p "
done
[ -n "$clean" ] && break
done 2>/dev/null
for p in $known; do kill -KILL $p; done 2>/dev/null
:"""


KILL_ALL = """u=0; while read -r a b c; do [ "$a" = Uid: ] && u=$b; done </proc/self/status
[ "$u" -gt 0 ] || { echo "refused: root is not the user of a box" >&2; exit 99; }
kill -KILL -1 2>/dev/null; :"""
"""The script that kills every process of the box's user but the one that runs it, in one call of the kernel.

Not as root: in a box that shares the process ids of its host, that would be every process of the machine.
"""


class OutputReader:
    """Finds the beginning, the output and the end of one command in what a box sends."""

    def __init__(self, nonce: str) -> None:
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.oom_kills = 0
        self._prefix = _EDGE + nonce.encode()
        self._start = re.compile(self._prefix + rb" S (\d+)" + _EDGE)
        self._end = re.compile(self._prefix + rb" E (\d+) (-?\d+)" + _EDGE)
        self._begun: set[Stream] = set()
        self._ended: set[Stream] = set()
        self._held: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}

    @property
    def finished(self) -> bool:
        """Say whether the end was seen on both streams."""
        return len(self._ended) == 2

    @property
    def complaint(self) -> str:
        """What came before the command began: the words of an engine that could not start it."""
        early = b"".join(held for stream, held in self._held.items() if stream not in self._begun)
        return early.decode("utf-8", "replace").strip()

    def feed(self, stream: Stream, data: bytes) -> bytes:
        """Take bytes of a stream and return what of them is the command's output."""
        if stream in self._ended:
            return b""
        data = self._held[stream] + data
        self._held[stream] = b""
        if stream not in self._begun:
            start = self._start.search(data)
            if start is None:
                self._held[stream] = data
                return b""
            self._begun.add(stream)
            self.pid = int(start[1])
            data = data[start.end() :]
        end = self._end.search(data)
        if end is not None:
            self._ended.add(stream)
            self.exit_code, self.oom_kills = int(end[1]), int(end[2])
            return data[: end.start()]
        keep = self._tail(data)
        self._held[stream] = data[keep:]
        return data[:keep]

    def flush(self, stream: Stream) -> bytes:
        """Return what was held back, when the stream is over."""
        if stream in self._ended or stream not in self._begun:
            return b""
        held, self._held[stream] = self._held[stream], b""
        return held

    def _tail(self, data: bytes) -> int:
        """Return where something that may still become the end begins."""
        from_ = max(0, len(data) - len(self._prefix) - 40)
        edge = data.find(_EDGE, from_)
        while edge >= 0:
            rest = data[edge:]
            if self._prefix.startswith(rest[: len(self._prefix)]):
                return edge
            edge = data.find(_EDGE, edge + 1)
        return len(data)


def absolute(path: str, workdir: str) -> str:
    """Return a path as the box's own tools take it: never one that begins with a dash."""
    return path if path.startswith("/") else f"{workdir}/{path}"


# shell_run: One command in a shell-driven box: the channel that it talks through, and what it has put out so far.
#
# Knows bytes and time. Backends implement `Channel`; which engine is behind it is not known here.


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


# process_channel: A command of this machine as a channel: its standard streams are those of a shell inside a box.
#
# Knows processes and pipes. Which engine the command belongs to it must not know.


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
