"""The container engine behind its command line: `docker` or `podman`, found, asked and told what to do.

Knows the command line, its errors and what to install. Must not know what a sandbox is made of.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass
from typing import IO, Literal

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes.base import Stream
from openenv.sandboxes.shell_run import Channel

EngineName = Literal["auto", "docker", "podman"]
_CHUNK = 1 << 16
_ORDINARY_S = 120.0
_INSTALL = "apt-get install -y docker.io   # or: apt-get install -y podman"


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine that is reached through its command line."""

    kind: Literal["docker", "podman"]
    program: str
    host: str | None = None

    @property
    def is_local(self) -> bool:
        """Say whether containers are processes of this machine, as far as the address tells."""
        return self.host is None or self.host.startswith(("unix://", "/"))

    def argv(self, *args: str) -> list[str]:
        """Return the command line that asks the engine for something."""
        if self.host is None:
            return [self.program, *args]
        option = ["--host", self.host] if self.kind == "docker" else ["--url", self.host]
        return [self.program, *option, *args]

    def ask(
        self, *args: str, data: bytes | None = None, timeout: float = _ORDINARY_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one command of the engine to its end, whatever that is."""
        try:
            return subprocess.run(
                self.argv(*args), input=data or b"", capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"`{self.kind} {args[0]}` gave no answer in {timeout:g} s.") from error
        except OSError as error:
            raise SandboxUnavailable(f"`{self.program}` cannot be run: {error}") from error

    def tell(self, *args: str, data: bytes | None = None, timeout: float = _ORDINARY_S) -> str:
        """Run one command of the engine and return its output.

        Raises:
            SandboxError: it failed; the text is the engine's.
        """
        done = self.ask(*args, data=data, timeout=timeout)
        if done.returncode != 0:
            raise SandboxError(f"`{self.kind} {args[0]}` failed: {_words(done)}")
        return done.stdout.decode("utf-8", "replace").strip()

    def open_channel(self, *args: str) -> ProcessChannel:
        """Start a command of the engine that talks through its standard streams."""
        return ProcessChannel(self.argv(*args))

    def check(self) -> None:
        """Return when the engine answers; raise `SandboxUnavailable` with its words when not."""
        form = "{{.Server.Version}}" if self.kind == "docker" else "{{.Client.Version}}"
        done = self.ask("version", "--format", form, timeout=30)
        if done.returncode != 0:
            start = "dockerd &   # or: systemctl start docker" if self.kind == "docker" else "podman info"
            raise SandboxUnavailable(f"The {self.kind} engine does not answer ({_words(done)}). Start it: {start}")


class ProcessChannel(Channel):
    """A command line of the engine, with a shell of a container at its other end."""

    def __init__(self, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        self._selector = selectors.DefaultSelector()
        self._streams: list[IO[bytes]] = []
        self._input_lock = threading.Lock()
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
            with self._input_lock:  # nobody closes it under our feet; `close` first kills what we may wait for
                if stream is None or stream.closed:
                    return
                try:
                    view = view[os.write(stream.fileno(), view[:_CHUNK]) :]
                except OSError:
                    return

    def end_input(self) -> None:
        """Close the standard input."""
        with self._input_lock:
            if self._process.stdin is not None:
                self._process.stdin.close()

    def receive(self, timeout: float | None) -> tuple[Stream, bytes] | None:
        """Return the next bytes of a stream."""
        with self._reading:
            while self._open and not self._closed:
                ready = self._selector.select(timeout)
                if not ready:
                    return None
                key = ready[0][0]
                data = os.read(key.fd, _CHUNK)
                if data:
                    return key.data, data
                self._selector.unregister(key.fileobj)
                self._open -= 1
            raise EOFError

    def close(self) -> None:
        """End the command line; a reader in another thread sees the end of the streams."""
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


def find_engine(name: EngineName, host: str | None) -> Engine:
    """Return the engine of that name, or the first that is installed.

    Raises:
        SandboxUnavailable: it is not installed; the text says how to.
    """
    kinds: tuple[Literal["docker", "podman"], ...] = ("docker", "podman") if name == "auto" else (name,)
    for kind in kinds:
        program = shutil.which(kind)
        if program is not None:
            return Engine(kind, program, host)
    wanted = " or ".join(f"`{kind}`" for kind in kinds)
    raise SandboxUnavailable(f"Container sandboxes need {wanted}, which is not installed. Install it: {_INSTALL}")


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stderr or done.stdout).decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
