"""One command in a shell-driven sandbox: the script that runs it, its channel, and the reader of its output.

The sandbox needs only `/bin/sh`. The script frames the output on both streams with a random nonce, so that the end is
seen even while processes left behind hold the streams open:

    RS nonce " S " pid RS   ...the bytes of the command...   RS nonce " E " exit-code " " oom-kills RS     (RS: 0x1e)

It also marks every process of the command. The mark is the hard limit of RLIMIT_RSS, which Linux ignores. Children
always inherit it (double forks, new sessions, an empty environment), and without privileges no process can
raise it again. Later commands get lower marks, so a process that lowers its own is below all marks in use.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from openenv.sandboxes.base import CommandSpec, ExecResult, Stream
from openenv.sandboxes.streams import OutputBuffer

_EDGE = b"\x1e"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HIGHEST_MARK_KB = 1 << 40
_CHUNK = 1 << 16
_LOOK_S = 0.25

READ_SCRIPT = r"""IFS= read -r n; s=; while IFS= read -r l; do [ "$l" = "$n" ] && break; s="$s$l
"; done; unset l; eval "$s" """
"""For `sh -c`: reads a script from standard input up to the line that repeats the first, and runs it. The rest of the
input stays unread, for the script. Neither commands nor secrets appear in an argument list that others can read."""


def framed(script: str) -> bytes:
    """Return a script in the form that `READ_SCRIPT` reads."""
    end = secrets.token_hex(8)
    return f"{end}\n{script}\n{end}\n".encode()


def mark_kb(number: int) -> int:
    """Return the mark of the n-th command of a sandbox; later ones have lower marks, for limits can only go down."""
    return _HIGHEST_MARK_KB - number


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command and the surroundings it runs in."""

    command: CommandSpec
    workdir: str
    home: str
    mark: int = _HIGHEST_MARK_KB
    has_input: bool = False
    oom_counters: Sequence[str] = ()
    """Files with a line `oom_kill N`; missing files are skipped."""
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
                # In a subshell: the outer shell stays, unmarked, and reports the end even of a killed command.
                f"ulimit -m {self.mark} 2>/dev/null",
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
        cwd = self.command.cwd
        if cwd is not None:
            where = shlex.quote(cwd if not cwd.startswith("-") else f"./{cwd}")
            lines.append(f"cd {where} || exit 126")
        return lines

    def _exports(self) -> list[str]:
        envs = {"HOME": self.home, **self.command.envs}
        return [f"export {name}={shlex.quote(value)}" for name, value in envs.items() if _NAME.fullmatch(name)]

    def _exec(self) -> str:
        odd = [f"{name}={value}" for name, value in self.command.envs.items() if not _NAME.fullmatch(name)]
        return "exec " + shlex.join([*(["env", *odd] if odd else []), *self.command.argv])


def kill_marked(mark: int, lowest: int) -> str:
    """Return the script that kills every process with a mark, and every process with a mark below all marks in use.

    It stops them first, until a pass over /proc finds no new one, none that is not yet stopped, and none that vanished
    before it was read (it may have left a child). A stopped process still counts under the limit of processes, so a
    fork bomb cannot outrun this. The script forks nothing: a full sandbox has no process to spare.
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
[ "$u" -gt 0 ] || { echo "refused: the user of a sandbox is not root" >&2; exit 99; }
kill -KILL -1 2>/dev/null; :"""
"""The script that kills every process of the sandbox user except its shell, in one system call.

It refuses to run as root: in a sandbox that shares the process ids of its host, that would kill the whole machine.
"""


class OutputReader:
    """Finds the start, the output and the end of one command in the bytes that a sandbox sends."""

    def __init__(self, nonce: str) -> None:
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.oom_kills = 0
        self._prefix = _EDGE + nonce.encode()
        self._start = re.compile(self._prefix + rb" S (\d+)" + _EDGE)
        self._end = re.compile(self._prefix + rb" E (\d+) (-?\d+)" + _EDGE)
        self._started: set[Stream] = set()
        self._ended: set[Stream] = set()
        self._held: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}

    @property
    def finished(self) -> bool:
        """Return whether the end was seen on both streams."""
        return len(self._ended) == 2

    @property
    def complaint(self) -> str:
        """The text before the start marker: the message of an engine that could not start the command."""
        early = b"".join(held for stream, held in self._held.items() if stream not in self._started)
        return early.decode("utf-8", "replace").strip()

    def feed(self, stream: Stream, data: bytes) -> bytes:
        """Take bytes of a stream and return the command's output among them."""
        if stream in self._ended:
            return b""
        data = self._held[stream] + data
        self._held[stream] = b""
        if stream not in self._started:
            start = self._start.search(data)
            if start is None:
                self._held[stream] = data
                return b""
            self._started.add(stream)
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
        """Return the withheld bytes, at the end of the stream."""
        if stream in self._ended or stream not in self._started:
            return b""
        held, self._held[stream] = self._held[stream], b""
        return held

    def _tail(self, data: bytes) -> int:
        """Return the first position at which an incomplete end marker may start."""
        from_ = max(0, len(data) - len(self._prefix) - 40)
        edge = data.find(_EDGE, from_)
        while edge >= 0:
            rest = data[edge:]
            if self._prefix.startswith(rest[: len(self._prefix)]):
                return edge
            edge = data.find(_EDGE, edge + 1)
        return len(data)


class Channel(ABC):
    """A shell inside: bytes go in, the bytes of two streams come out. `close` may be called from any thread."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Write to its standard input; data for a shell that has ended is dropped."""

    @abstractmethod
    def end_input(self) -> None:
        """Close its standard input."""

    @abstractmethod
    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        """Return the next bytes of a stream; None if none come in time. Raise EOFError when both have ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. The command inside continues."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """The exit code of the shell itself, if the engine reports it."""


class ShellRun:
    """One running command: its channel, its mark and its output so far."""

    def __init__(self, channel: Channel, call: Invocation) -> None:
        self.channel = channel
        self.mark = call.mark
        self.reader = OutputReader(call.nonce)
        self.began = time.monotonic()
        self._buffer = OutputBuffer(call.command.max_output, call.command.on_output)

    def wait_started(self, deadline: float) -> bool:
        """Read until the command has started; False if its shell ends before."""
        while self.reader.pid is None:
            if not self._step(deadline):
                return False
        return True

    def pump(self, deadline: float | None) -> bool:
        """Read until the command ends (True) or the deadline comes (False)."""
        while not self.reader.finished:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not self._step(deadline):
                return True
        return True

    def _step(self, deadline: float | None) -> bool:
        """Take the next bytes; False when no more can come."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            got = self.channel.receive(left)
        except EOFError:
            self._buffer.feed("stdout", self.reader.flush("stdout"))
            self._buffer.feed("stderr", self.reader.flush("stderr"))
            return False
        if got is None:
            return deadline is None or time.monotonic() < deadline or self.reader.pid is not None
        self._buffer.feed(got[0], self.reader.feed(*got))
        return True

    def output(self, stream: Stream) -> bytes:
        """Return the collected output of a stream."""
        return self._buffer.kept(stream)

    def result(self, exit_code: int, *, timed_out: bool = False) -> ExecResult:
        """Return the result of the command."""
        oom = self.reader.oom_kills > 0
        return self._buffer.result(exit_code, began=self.began, timed_out=timed_out, oom=oom)


class ProcessChannel(Channel):
    """A command of this machine that reaches a shell inside, such as `docker exec -i NAME /bin/sh`.

    Args:
        argv: The command line. Its streams belong to the shell; its descendants inside may outlive it.
    """

    def __init__(self, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._input = self._process.stdin
        self._outputs: dict[Stream, IO[bytes]] = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._selector = selectors.DefaultSelector()
        for name, stream in self._outputs.items():
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._closed = False
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command line, which repeats the shell's exit code."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            with self._writing:  # held briefly: `end_input` must not close the pipe during a write, nor wait long
                if self._closed or self._input.closed:
                    return
                room = select.poll()
                room.register(self._input, select.POLLOUT)
                if not room.poll(_LOOK_S * 1000):
                    continue
                try:
                    view = view[os.write(self._input.fileno(), view[:_CHUNK]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    return

    def end_input(self) -> None:
        with self._writing:
            self._input.close()

    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._reading:
            while not self._closed and self._selector.get_map():
                left = _LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
                ready = self._selector.select(min(left, _LOOK_S))
                if not ready:
                    if left <= _LOOK_S and deadline is not None:
                        return None
                    continue  # descendants may hold the streams open forever: check whether we were closed
                key = ready[0][0]
                data = os.read(key.fd, _CHUNK)
                if data:
                    return key.data, data
                self._selector.unregister(key.fileobj)
            raise EOFError

    def close(self) -> None:
        """End the command line; a reader in another thread gets EOFError, at the latest after a quarter of a second."""
        self._closed = True
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._reading:
            self._selector.close()
            for stream in self._outputs.values():
                stream.close()
        self.end_input()
