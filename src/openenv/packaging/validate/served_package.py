"""A package under test while it is served: by a process on a free loopback port, or by a validation provider.

A provider builds the image of a package and runs it, isolated as its manifest declares.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from typing_extensions import Self

from openenv.env.manifest import ExecutionDeclaration
from openenv.errors import ProviderError, message_of
from openenv.sandboxes.base import ExecResult

from .manifest import NormalizedManifest, NormalizedManifestV2
from .recording import LaunchSpec
from .rules import CheckSkipped, ProviderCapability


class StartupError(ProviderError):
    """The image was started, and its server did not answer in time or ended."""

    code = "STARTUP_ERROR"


class UnsupportedCapability(ProviderError):
    """The package declares something that this provider cannot give it."""

    code = "UNSUPPORTED_CAPABILITY"


@runtime_checkable
class RunningSubject(Protocol):
    """A package that runs; `base_url` is the address of its server."""

    base_url: str

    def inspect(self) -> dict[str, Any]:
        """Return the container's state and limits."""
        ...

    def logs(self, max_bytes: int = 65536) -> str:
        """Return the end of the server's output."""
        ...

    def exec(self, argv: list[str], timeout_s: float) -> ExecResult:
        """Run a command beside the server."""
        ...

    def stop(self) -> None:
        """Stop it; harmless when it is stopped."""
        ...


@runtime_checkable
class ValidationProvider(Protocol):
    """Builds and runs packages for their checks."""

    name: str
    capabilities: frozenset[ProviderCapability]
    supported_network_modes: frozenset[str]

    def build(self, root: Path, execution: ExecutionDeclaration) -> str:
        """Build the image of a package and return its digest, `sha256:…`."""
        ...

    def start(self, spec: LaunchSpec) -> RunningSubject:
        """Run an image, and return when its server answers."""
        ...


logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
# Environments may download models or data at their first start.
_START_S = 180.0
_CONTAINER_START_S = 120.0
# Any other seed works; a fixed one makes a failure repeatable.
_OTHER_HASH_SEED = 4711
_TOKEN = "OPENENV_TOKEN"
_STOP_S = 15.0
# Variables that would change how the package is served, or hand it the caller's tokens.
_NOT_PASSED_ON = ("OPENENV_MODE", "OPENENV_AGENT_TOKEN", "OPENENV_OBSERVER_TOKEN")
CLOSE_FAILED = "close() of the environment failed"


class NotServed(Exception):
    """The package cannot be served; the text is its server's output."""


@dataclass(frozen=True, slots=True)
class Handles:
    """The open handles of a process."""

    files: int
    threads: int
    children: int


class PackageServer(ABC):
    """A package while it is served. A context manager: it serves at `url` from enter to exit."""

    url = ""
    start_s = 0.0

    def __enter__(self) -> Self:
        # The time to start is part of the report.
        started = time.monotonic()
        self.start(started + _START_S)
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @abstractmethod
    def start(self, deadline: float) -> None:
        """Serve it, or raise `NotServed` and leave nothing behind."""

    @abstractmethod
    def stop(self) -> None:
        """End it."""

    @property
    @abstractmethod
    def advice(self) -> str:
        """The remedy for a package that cannot be served."""

    @property
    @abstractmethod
    def subject(self) -> RunningSubject:
        """What graders see of it while it is served."""

    @abstractmethod
    def another(self) -> PackageServer:
        """Return the same package for a second server; in its process the order of sets differs."""

    @abstractmethod
    def output(self) -> str:
        """Return the server's output."""

    def peak_memory_mb(self) -> float | None:
        """Return the server's peak memory; None if unknown."""
        return None

    def handles(self) -> Handles | None:
        """Count the server's open handles; None if unknown."""
        return None

    def containment(self) -> dict[str, Any] | None:
        """Return the parts of the host that the container can reach; None outside of containers."""
        return None


class ServedPackage(PackageServer):
    """A package that a process of this machine serves.

    Args:
        folder: The package.
        hash_seed: PYTHONHASHSEED of its process, which decides the iteration order of sets of strings.
    """

    def __init__(self, folder: Path, *, hash_seed: int = 0) -> None:
        # Created even for a package that never starts: `output` reads the log in any case.
        self.folder = folder
        self._hash_seed = hash_seed
        self._process: subprocess.Popen[bytes] | None = None
        self._home = tempfile.TemporaryDirectory(prefix="openenv-validate-", ignore_cleanup_errors=True)
        self._log = Path(self._home.name, "log")

    def start(self, deadline: float) -> None:
        """Start the process, and wait until it listens."""
        # Port 0: the server chooses a free one and prints its address, so parallel runs do not collide.
        command = [sys.executable, "-m", "openenv", "serve", str(self.folder), "--port", "0", "--host", "127.0.0.1"]
        command += ["--log-level", "warning", "--log-format", "text", "--grace", "0"]
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        try:
            # Output goes to a file. A pipe that nobody reads would block the server.
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    # An empty folder: a package must not depend on its working directory.
                    cwd=self._home.name,
                    env={**environ, "PYTHONHASHSEED": str(self._hash_seed), "PYTHONPATH": _absolute(environ)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self.url = self._address(deadline)
        except BaseException:
            self.stop()
            raise

    @property
    def advice(self) -> str:
        """The command that shows everything."""
        return f"`openenv serve {self.folder}` shows the whole of it"

    @property
    def subject(self) -> RunningSubject:
        """The process, as graders see it."""
        return _LocalSubject(self)

    def another(self) -> ServedPackage:
        """Return the package for a process with another hash seed."""
        return ServedPackage(self.folder, hash_seed=_OTHER_HASH_SEED)

    def _address(self, deadline: float) -> str:
        assert self._process is not None
        while True:
            # Poll before reading: the address may be in the last output of a process that has just ended.
            ended = self._process.poll() is not None
            if address := _ADDRESS.search(self.output()):
                return address.group()
            if ended:
                raise NotServed(self.output().strip() or f"its server ended with exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise NotServed(f"its server did not listen within {_START_S:g} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the process."""
        # Ask first, so that the server can close its sessions; kill it if it does not end.
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._home.cleanup()

    def output(self) -> str:
        """Return everything the server has printed."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def peak_memory_mb(self) -> float | None:
        """Return the most memory that the process has held so far; None without /proc."""
        # VmHWM is the peak of the resident memory; the current value would miss short peaks.
        peak = re.search(r"VmHWM:\s+(\d+) kB", self._status())
        return None if peak is None else int(peak.group(1)) / 1024

    def handles(self) -> Handles | None:
        """Count the open handles of the process; None without /proc."""
        threads = re.search(r"Threads:\s+(\d+)", self._status())
        if threads is None or self._process is None:
            return None
        pid = self._process.pid
        try:
            # Approximate: descriptors come and go. `session_cleanup` allows for some.
            files = len(os.listdir(f"/proc/{pid}/fd"))
            children = len(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
        except OSError:
            return None
        return Handles(files, int(threads.group(1)), children)

    def _status(self) -> str:
        try:
            return Path(f"/proc/{self._process.pid}/status").read_text() if self._process is not None else ""
        except OSError:
            return ""


def _absolute(environ: dict[str, str]) -> str:
    """Return PYTHONPATH with absolute paths, for a process in another folder."""
    # The server starts in another folder, where relative entries would point to the wrong place.
    parts = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join(os.path.abspath(part) for part in parts)


class _LocalSubject:
    """A process that serves a package, as graders see it: no command runs beside it."""

    def __init__(self, package: ServedPackage) -> None:
        self.base_url = package.url
        self._package = package

    def inspect(self) -> dict[str, Any]:
        """Return how it is served."""
        return {"kind": "process", "folder": str(self._package.folder)}

    def logs(self, max_bytes: int = 65536) -> str:
        """Return the end of the server's output."""
        return self._package.output()[-max_bytes:]

    def exec(self, argv: list[str], timeout_s: float) -> ExecResult:
        """Refuse: a process of this machine has no inside to run commands in."""
        raise UnsupportedCapability("a package that a process serves has no container to run commands in")

    def stop(self) -> None:
        """Do nothing: the run that started the process ends it."""


class ProvidedPackage(PackageServer):
    """A package that a validation provider builds and runs.

    Args:
        provider: The provider.
        folder: The package.
        manifest: The package's declarations.
        image_ref: The image, if it is built already.
        hash_seed: PYTHONHASHSEED of its server.
    """

    def __init__(
        self,
        provider: ValidationProvider,
        folder: Path,
        manifest: NormalizedManifest,
        *,
        image_ref: str | None = None,
        hash_seed: int = 0,
    ) -> None:
        self.image_ref = image_ref
        # Nothing was started yet, so nothing has to be cleaned up.
        self.cleanup: dict[str, Any] = {"started": False}
        # Servers of this package require a token if machines other than this one reach them.
        self.token = secrets.token_urlsafe(24)
        self._provider = provider
        self._folder = folder
        self._manifest = manifest
        self._hash_seed = hash_seed
        self._running: RunningSubject | None = None

    def start(self, deadline: float) -> None:
        """Build the image if there is none, and run it.

        Raises:
            CheckSkipped: The provider cannot meet the package's declarations.
        """
        try:
            # The second server reuses the image of the first.
            if self.image_ref is None:
                self.image_ref = self._provider.build(self._folder, self._execution())
            spec = LaunchSpec(
                image_ref=self.image_ref,
                resources=self._manifest.resources,
                network=self._manifest.network,
                run_id=f"validate-{secrets.token_hex(4)}",
                startup_timeout_s=_CONTAINER_START_S,
                env_vars={"PYTHONHASHSEED": str(self._hash_seed), _TOKEN: self.token},
            )
            self._running = self._provider.start(spec)
        # The package asks for something that this provider lacks: no fault of the package.
        except UnsupportedCapability as error:
            raise CheckSkipped(message_of(error)) from error
        except ProviderError as error:
            raise NotServed(message_of(error)) from error
        self.cleanup = {"started": True, "stopped": False}
        self.url = self._running.base_url

    def stop(self) -> None:
        """Stop the container, and keep the result of the cleanup."""
        if self._running is None:
            return
        try:
            self._running.stop()
            self.cleanup = {"started": True, "stopped": True}
        # A failed cleanup is recorded. It must not replace the result of the checks.
        except ProviderError as error:
            self.cleanup = {"started": True, "stopped": False, "reason": message_of(error)}
            logger.warning("%s", message_of(error))

    @property
    def advice(self) -> str:
        """Where to look: at the image."""
        return f"let the image of {self._folder} answer GET /health on port 8000: `openenv build`, then run it"

    @property
    def subject(self) -> RunningSubject:
        """The running container."""
        assert self._running is not None
        return self._running

    def another(self) -> ProvidedPackage:
        """Return the same image for a second container."""
        return ProvidedPackage(
            self._provider, self._folder, self._manifest, image_ref=self.image_ref, hash_seed=_OTHER_HASH_SEED
        )

    def output(self) -> str:
        """Return the server's output, as far as the provider keeps it."""
        return "" if self._running is None else self._running.logs()

    def containment(self) -> dict[str, Any] | None:
        """Return how the provider runs it."""
        return self.subject.inspect()

    def network_evidence(self) -> str | None:
        """Measure the container's network, as JSON; None if the provider cannot."""
        # Optional: providers of other packages may lack it.
        measure = getattr(self._running, "measure_network", None)
        return None if measure is None else json.dumps(measure())

    def _execution(self) -> ExecutionDeclaration:
        """Return how the package is run; without a declaration, from the Dockerfile that it has."""
        if isinstance(self._manifest, NormalizedManifestV2):
            return self._manifest.execution
        # The order of `openenv build`.
        names = ("server/Dockerfile", "Dockerfile")
        return ExecutionDeclaration(dockerfile=next((n for n in names if (self._folder / n).is_file()), names[0]))
