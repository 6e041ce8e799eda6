"""`docker` and `podman` through their command line, for sandboxes, providers and `openenv build`.

Knows the command line, its errors and the packages to install. It must not know the purpose of a container.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes.base import Mount
from openenv.sandboxes.host import ProcessOwner
from openenv.sandboxes.shell_command import ProcessChannel

EngineName = Literal["auto", "docker", "podman"]
OWNER_LABEL = "openenv.owner"
"""On every container and service that we start: the process that started it, so that leftovers can be swept."""
_ORDINARY_S = 120.0
_INSTALL = "apt-get install -y docker.io   # or: apt-get install -y podman"


@dataclass(frozen=True, slots=True)
class ContainerCli:
    """The command line of one container engine.

    Args:
        kind: Which engine it is.
        program: Path of the executable.
        host: The engine's address, as for its `--host` or `--url`; by default the engine's settings decide.
        error: The exception class for failed commands.
        unavailable: The exception class for an engine that is missing or does not answer.
    """

    kind: Literal["docker", "podman"]
    program: str
    host: str | None = None
    error: type[RuntimeError] = SandboxError
    unavailable: type[RuntimeError] = SandboxUnavailable

    @property
    def is_local(self) -> bool:
        """Whether containers are processes of this machine, as far as its address shows."""
        return self.host is None or self.host.startswith(("unix://", "/"))

    def argv(self, *args: str) -> list[str]:
        """Return the whole command line of an engine command."""
        if self.host is None:
            return [self.program, *args]
        option = ["--host", self.host] if self.kind == "docker" else ["--url", self.host]
        return [self.program, *option, *args]

    def run(
        self,
        *args: str,
        data: bytes | None = None,
        timeout: float = _ORDINARY_S,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run an engine command to its end; any exit code is accepted. `environ` replaces our variables."""
        try:
            return subprocess.run(
                self.argv(*args), input=data or b"", capture_output=True, timeout=timeout, check=False, env=environ
            )
        except subprocess.TimeoutExpired as error:
            raise self.error(f"`{self.kind} {args[0]}` gave no answer in {timeout:g} s.") from error
        except OSError as error:
            raise self.unavailable(f"`{self.program}` cannot be run: {error}") from error

    def output(
        self,
        *args: str,
        data: bytes | None = None,
        timeout: float = _ORDINARY_S,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """Run an engine command and return its output; on failure, raise `error` with the engine's message."""
        done = self.run(*args, data=data, timeout=timeout, environ=environ)
        if done.returncode != 0:
            raise self.error(f"`{self.kind} {args[0]}` failed: {failure_of(done)}")
        return done.stdout.decode("utf-8", "replace").strip()

    def open_channel(self, *args: str) -> ProcessChannel:
        """Start an engine command that talks through its standard streams."""
        return ProcessChannel(self.argv(*args))

    def check(self) -> None:
        """Return if the engine answers; otherwise raise `unavailable` with its message and a remedy."""
        form = "{{.Server.Version}}" if self.kind == "docker" else "{{.Client.Version}}"
        done = self.run("version", "--format", form, timeout=30)
        if done.returncode != 0:
            start = "dockerd &   # or: systemctl start docker" if self.kind == "docker" else "podman info"
            raise self.unavailable(f"The {self.kind} engine does not answer ({failure_of(done)}). Start it: {start}")

    def has_image(self, image: str) -> bool:
        """Return whether the engine has an image."""
        return self.run("image", "inspect", image).returncode == 0

    def pull(self, image: str, *, timeout: float) -> str | None:
        """Pull an image. On failure, return the reason and the command to try by hand."""
        done = self.run("pull", "--quiet", image, timeout=timeout)
        if done.returncode == 0:
            return None
        reason = failure_of(done).splitlines()[-1]
        return f"The image '{image}' is not here and cannot be pulled ({reason}). Get it: {self.kind} pull {image}."

    def remove(self, name: str, *, within_s: float, may_appear_s: float = 0.0) -> str | None:
        """Remove a container, which may only appear within `may_appear_s`; if it is still there, return why."""
        began = time.monotonic()
        while True:
            removed = self.run("rm", "--force", "--volumes", name)
            is_there = self.run("inspect", "--type", "container", name).returncode == 0
            passed_s = time.monotonic() - began
            if not is_there and passed_s >= may_appear_s:
                # An engine that does not answer cannot have the container, either.
                answers = removed.returncode == 0 or "o such container" in failure_of(removed)
                return None if answers else failure_of(removed)
            if passed_s > within_s:
                return failure_of(removed)
            time.sleep(0.05)  # it has just ended, and the engine is about to remove it

    def sweep(self) -> list[str]:
        """Remove the containers of dead owners and return their IDs; containers of living owners stay."""
        form = '{{.Id}} {{index .Config.Labels "' + OWNER_LABEL + '"}}'
        return self._sweep(["ps", "-aq", "--no-trunc"], ["inspect", "--format", form], ["rm", "-f", "-v"])

    def sweep_services(self) -> list[str]:
        """Remove the Swarm services of dead owners and return their names; services of living owners stay."""
        form = '{{.Spec.Name}} {{index .Spec.Labels "' + OWNER_LABEL + '"}}'
        listing = ["service", "ls", "--format", "{{.Name}}"]
        return self._sweep(listing, ["service", "inspect", "--format", form], ["service", "rm"])

    def _sweep(self, listing: list[str], inspect: list[str], remove: list[str]) -> list[str]:
        names = self.output(*listing, "--filter", f"label={OWNER_LABEL}").split()
        if not names:
            return []
        dead = []
        for line in self.run(*inspect, *names).stdout.decode("utf-8", "replace").splitlines():
            name, _, label = line.partition(" ")
            owner = ProcessOwner.parse(label.strip())
            if owner is not None and owner.is_dead():
                self.run(*remove, name)
                dead.append(name)
        return dead


def first_engine(name: EngineName, host: str | None) -> ContainerCli:
    """Return the engine of that name, or the first that is installed.

    Raises:
        SandboxUnavailable: No engine is installed, or it does not answer.
    """
    engine = installed_engines(name, host)[0]
    engine.check()
    return engine


def find_engine(name: EngineName, host: str | None) -> ContainerCli:
    """Return the engine of that name, or the first that is installed and answers.

    Raises:
        SandboxUnavailable: None answers; the text is the reason of each that is installed, or how to install one.
    """
    reasons = []
    for engine in installed_engines(name, host):
        try:
            engine.check()
            return engine
        except SandboxError as error:
            reasons.append(str(error))
    raise SandboxUnavailable(" ".join(reasons))


def installed_engines(name: EngineName, host: str | None) -> list[ContainerCli]:
    """Return the installed engines, including engines that do not answer.

    Raises:
        SandboxUnavailable: No engine is installed; the text contains the command that installs one.
    """
    kinds: tuple[Literal["docker", "podman"], ...] = ("docker", "podman") if name == "auto" else (name,)
    engines = [ContainerCli(kind, program, host) for kind in kinds if (program := shutil.which(kind)) is not None]
    if not engines:
        programs = " or ".join(f"`{kind}`" for kind in kinds)
        raise SandboxUnavailable(f"Containers need {programs}, which is not installed. Install it: {_INSTALL}")
    return engines


def bind_option(mount: Mount) -> str:
    """Return the value of `--mount` for a read-only bind mount."""
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}", "readonly"]
    return ",".join(f'"{field}"' if "," in field else field for field in fields)


def failure_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the output of a failed engine command."""
    text = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
    return text.removesuffix("See 'docker run --help'.").strip() or f"exit code {done.returncode}"
