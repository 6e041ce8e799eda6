"""The container engine as providers use it: found, asked, told; what it refuses is a provider's error.

On top of the sandboxes' engine, which is the command line of `docker` or `podman`. Knows images, variables and labels;
what is started it must not know.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable, SandboxError, SandboxUnavailable
from openenv.providers.progress import told_when_slow
from openenv.sandboxes.container_cli import Engine, EngineName, find_engine
from openenv.sandboxes.docker import OWNER_LABEL
from openenv.sandboxes.owners import Owner

PROVIDER_LABEL = "openenv.provider"
LOG_LINES = 40
_PULL_S = 3600.0
_ORDINARY_S = 120.0
_LONG_VALUE = 32_768
_INSTALL = "apt-get install -y docker.io   # or Docker Desktop, or: apt-get install -y podman"


class ProviderEngine:
    """An engine that answers.

    Args:
        name: `docker`, `podman`, or the first of them that answers.
        host: Its address, as its own option takes it; by default what its own settings say.

    Raises:
        ProviderUnavailable: None is installed, or none answers; the text says what to do.
    """

    def __init__(self, name: EngineName = "auto", host: str | None = None) -> None:
        self._engine = _answering(name, host)

    @property
    def kind(self) -> Literal["docker", "podman"]:
        """Which one it is."""
        return self._engine.kind

    @property
    def host(self) -> str | None:
        """The address that was given."""
        return self._engine.host

    def argv(self, *args: str) -> list[str]:
        """Return the command line that asks it for something."""
        return self._engine.argv(*args)

    def ask(
        self,
        *args: str,
        data: bytes | None = None,
        timeout: float = _ORDINARY_S,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one command to its end, whatever that is.

        Raises:
            ProviderError: It did not end in time.
        """
        try:
            return self._engine.ask(*args, data=data, timeout=timeout, environ=environ)
        except SandboxUnavailable as error:
            raise ProviderUnavailable(str(error)) from error
        except SandboxError as error:
            raise ProviderError(str(error)) from error

    def tell(self, *args: str, variables: Variables | None = None, timeout: float = _ORDINARY_S) -> str:
        """Run one command and return its output.

        Raises:
            ProviderError: It failed; the text is the engine's.
        """
        if variables is None:
            done = self.ask(*args, timeout=timeout)
        else:
            done = self.ask(*args, data=variables.file, environ=variables.environ, timeout=timeout)
        if done.returncode != 0:
            raise ProviderError(words_of(done))
        return done.stdout.decode("utf-8", "replace").strip()

    def has_image(self, image: str) -> bool:
        """Say whether an image is here."""
        return self.ask("image", "inspect", image).returncode == 0

    def ensure_image(self, image: str) -> None:
        """Pull an image that is not here, and say so to who waits for it.

        Raises:
            ProviderError: It cannot be had.
        """
        if self.has_image(image):
            return
        with told_when_slow(f"pulling {image}"):
            done = self.ask("pull", "--quiet", image, timeout=_PULL_S)
        if done.returncode != 0:
            raise ProviderError(
                f"The image '{image}' is not here and cannot be pulled: {words_of(done)}. Build it, or get it with: "
                f"{self.kind} pull {image}"
            )

    def is_elsewhere(self) -> bool:
        """Say whether the engine runs on another machine, so that ports of its loopback are not ours."""
        host = self.host
        if host is None and self.kind == "docker":
            host = self.ask("context", "inspect", "--format", "{{.Endpoints.docker.Host}}").stdout.decode().strip()
        return host is not None and host.startswith(("tcp://", "ssh://", "http://", "https://"))


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables of a container on their way there: not as arguments, which everybody on the machine can read.

    Most go through the standard input, as a file of lines; those that are no line, through the command's environment.
    """

    options: list[str]
    file: bytes
    environ: dict[str, str] | None

    @classmethod
    def of(cls, values: Mapping[str, str] | None) -> Variables:
        """Prepare variables.

        Raises:
            ValueError: A name or a value cannot be one.
        """
        lines: list[str] = []
        apart: dict[str, str] = {}
        for name, value in (values or {}).items():
            text = str(value)
            if not re.fullmatch(r"[^\s=#\0][^\s=\0]*", name) or "\0" in text:
                raise ValueError(f"{name!r} cannot be an environment variable of a container")
            if len(text) > _LONG_VALUE or any(sign in text for sign in "\r\n") or os.name == "nt":
                apart[name] = text
            else:
                lines.append(f"{name}={text}\n")
        options = [word for name in apart for word in ("--env", name)]
        options += ["--env-file", "/dev/stdin"] if lines else []
        return cls(options, "".join(lines).encode(), settings.child_environment(apart) if apart else None)


def owner_labels(kind: str, labels: Mapping[str, str] | None = None) -> list[str]:
    """Return the options that label something with its owner, by which it is found when the owner is dead."""
    given = {OWNER_LABEL: str(Owner.current()), PROVIDER_LABEL: kind, **(labels or {})}
    return [word for name, text in given.items() for word in ("--label", f"{name}={text}")]


def new_name(image: str, infix: str = "") -> str:
    """Return a name for something that runs an image; no two are alike."""
    base = re.sub(r"[^a-zA-Z0-9_.-]", "-", image.rpartition("/")[2].partition("@")[0].partition(":")[0]).strip("-._")
    return f"{base[:40] or 'openenv'}-{infix}{secrets.token_hex(4)}"


def words_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return what a command of the engine said when it failed."""
    text = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
    return text.removesuffix("See 'docker run --help'.").strip() or f"exit code {done.returncode}"


def output_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return both streams of a command, as one text."""
    return b"\n".join(part.rstrip() for part in (done.stdout, done.stderr) if part.strip()).decode("utf-8", "replace")


def _answering(name: EngineName, host: str | None) -> Engine:
    kinds: tuple[EngineName, ...] = ("docker", "podman") if name == "auto" else (name,)
    silent: list[str] = []
    for kind in kinds:
        try:
            engine = find_engine(kind, host)
        except SandboxUnavailable:
            continue
        try:
            engine.check()
        except SandboxError as error:
            silent.append(str(error))
        else:
            return engine
    what = "Podman" if name == "podman" else "Docker"
    reason = " ".join(silent) if silent else f"{' and '.join(kinds)} not found. Install it: {_INSTALL}"
    raise ProviderUnavailable(f"{what} is not available: {reason}")
