"""The container engine behind its command line: `docker` or `podman`, found, asked and told what to do.

Knows the command line, its errors and what to install. Must not know what a sandbox is made of.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes.shell_command import ProcessChannel

EngineName = Literal["auto", "docker", "podman"]
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
        self,
        *args: str,
        data: bytes | None = None,
        timeout: float = _ORDINARY_S,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one command of the engine to its end, whatever that is; `environ` in place of our variables."""
        try:
            return subprocess.run(
                self.argv(*args), input=data or b"", capture_output=True, timeout=timeout, check=False, env=environ
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
