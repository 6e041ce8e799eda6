"""A server in a container of the local engine, through the command line of `docker` or `podman`.

Its port is published on loopback only, and the engine chooses it. Whatever fails, no container is left; those of a
process that was killed are removed by the next that starts one.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable, SandboxError, SandboxUnavailable
from openenv.providers.health import quoted, wait_for_ready
from openenv.providers.provider import READY_S, ContainerProvider, refuse_unknown, told_when_slow
from openenv.sandboxes.base import Mount
from openenv.sandboxes.container_cli import Engine, EngineName, find_engine
from openenv.sandboxes.docker import OWNER_LABEL, DockerSandboxes, bind_option
from openenv.sandboxes.owners import Owner

# engine: The container engine as providers use it: found, asked, told; what it refuses is a provider's error.
#
# On top of the sandboxes' engine, which is the command line of `docker` or `podman`. Knows images, variables and labels;
# what is started it must not know.


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


logger = logging.getLogger(__name__)

INNER_PORT = 8000
_OPTIONS = (
    "port", "env_vars", "container_port", "command", "network", "cpu_limit", "memory_limit", "gpus", "mounts", "labels",
    "run_args",
)  # fmt: skip
_APPEAR_S = 3.0
_REMOVE_S = 20.0
_LOOK_S = 0.1


class LocalDockerProvider(ContainerProvider):
    """Starts a container and publishes its server on 127.0.0.1; one at a time.

    Args:
        engine: `docker`, `podman`, or the first of them that answers.
        host: The engine's address, as its own option takes it; by default what its own settings say.
        stop_timeout_s: How long a server may take to end before it is killed.
        ready_timeout_s: How long it may take to answer, where `wait_for_ready` is told nothing else.

    Raises:
        ProviderUnavailable: No engine is installed, or none answers.
    """

    def __init__(
        self,
        *,
        engine: EngineName = "auto",
        host: str | None = None,
        stop_timeout_s: float = 10.0,
        ready_timeout_s: float = READY_S,
    ) -> None:
        self._engine = ProviderEngine(engine, host)
        self._stop_timeout_s = stop_timeout_s
        self.ready_timeout_s = ready_timeout_s
        self._name: str | None = None
        self._owner = os.getpid()

    @property
    def container_name(self) -> str | None:
        """The name of the container, None when there is none."""
        return self._name

    def start_container(
        self,
        image: str,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        *,
        container_port: int = INNER_PORT,
        command: str | Sequence[str] | None = None,
        network: str | None = None,
        cpu_limit: float | str | None = None,
        memory_limit: str | None = None,
        gpus: str | None = None,
        mounts: Sequence[Mount] = (),
        labels: Mapping[str, str] | None = None,
        run_args: Sequence[str] = (),
        **kwargs: Any,
    ) -> str:
        """Start a container, pulling its image first if need be, and return its address.

        Args:
            image: Name of the image.
            port: Where the server is to be reached on this machine; by default any free port.
            env_vars: Variables of the container; they are in no argument list.
            container_port: Where the server listens inside.
            command: What to run in place of the image's command.
            network: The network to join; it must be one that publishes ports.
            cpu_limit: How many processors it may use.
            memory_limit: How much memory, as the engine takes it: `2g`.
            gpus: Which graphics processors, as the engine takes it: `all`.
            mounts: Folders of this machine that it sees, read-only.
            labels: More labels of the container.
            run_args: More options of the engine's `create`, put before the image.
            kwargs: No others are known.

        Raises:
            ValueError: An option is none.
            RuntimeError: It could not be started; the text has its log, and nothing is left of it.
        """
        refuse_unknown(type(self).__name__, kwargs, _OPTIONS)
        if self._name is not None:
            raise ProviderError(
                f"{type(self).__name__} is already running {self._name}; stop_container() first, or use another one"
            )
        variables = Variables.of(env_vars)
        options = [
            *("--publish", f"127.0.0.1:{'' if port is None else port}:{container_port}"),
            *variables.options,
            *owner_labels("docker", labels),
            *_given("--network", network),
            *_given("--cpus", cpu_limit),
            *_given("--memory", memory_limit),
            *_given("--gpus", gpus),
            *(word for mount in mounts for word in ("--mount", bind_option(mount))),
            *run_args,
            image,
            *(shlex.split(command) if isinstance(command, str) else command or ()),
        ]
        self._sweep()
        self._engine.ensure_image(image)
        self._name, self._owner = new_name(image), os.getpid()
        atexit.register(self.stop_container)
        try:
            self._engine.tell("create", "--name", self._name, *options, variables=variables)
            self._engine.tell("start", self._name)
            return f"http://localhost:{self._published(container_port)}"
        except BaseException as error:
            log = self._log() if isinstance(error, ProviderError) else ""
            self._discard(may_appear=not isinstance(error, ProviderError))
            if isinstance(error, ProviderError):
                raise ProviderError(
                    f"Failed to start Docker container of '{image}': {error}{_advice(str(error))}{quoted(log)}", log=log
                ) from error
            raise

    def stop_container(self) -> None:
        """Stop and remove the container; harmless when there is none, or when the engine is gone."""
        if self._name is None or self._owner != os.getpid():  # a forked process leaves it to its parent
            return
        try:
            patience = self._stop_timeout_s
            with contextlib.suppress(ProviderError):
                self._engine.ask("stop", "--time", str(max(0, round(patience))), self._name, timeout=patience + 30)
        finally:
            self._discard()

    def wait_for_ready(self, base_url: str, timeout_s: float | None = None) -> None:
        """Return as soon as the server answers; a container that ends or does not answer is removed.

        Raises:
            ServerDied: The container ended; the text has the end of its log.
            ServerNotReady: It did not answer in time, by default `ready_timeout_s`.
        """
        timeout_s = self.ready_timeout_s if timeout_s is None else timeout_s
        if self._name is None:
            wait_for_ready(base_url, timeout_s, what="Container")
            return
        try:
            with self._watched(self._name) as watch:
                wait_for_ready(
                    base_url, timeout_s, what=f"Container {self._name}", watch=watch, advice=self._advice_when_late
                )
        except BaseException:
            self._discard()
            raise

    def log(self) -> str:
        """Return the end of what the container has written; nothing when there is none."""
        return self._log()

    def _published(self, container_port: int) -> int:
        """Ask the engine which port it has chosen."""
        done = self._engine.ask("port", str(self._name), f"{container_port}/tcp")
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            port = line.rpartition(":")[2].strip()
            if port.isdigit():
                return int(port)
        how = self._how_it_ended()
        if how is not None:
            raise ProviderError(how)
        raise ProviderError(
            f"the engine has published no port for {container_port}: its network publishes none. Give network= another"
        )

    def _how_it_ended(self) -> str | None:
        form = "{{.State.Running}}|{{.State.ExitCode}}|{{.State.OOMKilled}}|{{.State.Error}}"
        done = self._engine.ask("inspect", "--format", form, str(self._name))
        if done.returncode != 0:
            return "it was removed by somebody else"
        running, code, oom, error = done.stdout.decode("utf-8", "replace").strip().split("|", 3)
        if running == "true":
            return None
        reason = "it ran out of memory" if oom == "true" else f"it ended with exit code {code}"
        return f"{reason} ({error})" if error else reason

    def _log(self) -> str:
        if self._name is None:
            return ""
        with contextlib.suppress(ProviderError):
            done = self._engine.ask("logs", "--tail", str(LOG_LINES), self._name, timeout=20)
            return output_of(done) if done.returncode == 0 else ""
        return ""

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[ContainerWatch]:
        """Have the engine say when the container ends."""
        null = subprocess.DEVNULL
        waiting = subprocess.Popen(
            self._engine.argv("wait", name), stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        try:
            yield ContainerWatch(self, waiting)
        finally:
            waiting.kill()
            waiting.wait()

    def _advice_when_late(self) -> str:
        with contextlib.suppress(ProviderError):
            if self._engine.is_elsewhere():
                return "The engine runs on another machine, whose loopback cannot be reached from here: start it there."
        return f"Is the server inside listening on 0.0.0.0, and on port {INNER_PORT} or what container_port says?"

    def _discard(self, *, may_appear: bool = False) -> None:
        """Remove the container, and return when it is gone; one that is being made is waited for."""
        name, self._name = self._name, None
        atexit.unregister(self.stop_container)
        if name is None or self._owner != os.getpid():
            return
        appears = time.monotonic() + (_APPEAR_S if may_appear else 0.0)
        deadline = time.monotonic() + _REMOVE_S
        try:
            while True:
                removed = self._engine.ask("rm", "--force", "--volumes", name)
                is_there = self._engine.ask("inspect", "--type", "container", name).returncode == 0
                if not is_there and time.monotonic() >= appears:
                    if removed.returncode != 0 and "o such container" not in words_of(removed):
                        raise ProviderError(words_of(removed))  # the engine does not answer at all
                    return
                if time.monotonic() > deadline:
                    raise ProviderError(words_of(removed))
                time.sleep(_LOOK_S)
        except ProviderError as error:
            kind = self._engine.kind
            logger.warning("container %s may be left: %s. Remove it: %s rm -f %s", name, error, kind, name)

    def _sweep(self) -> None:
        """Remove what processes have left that were killed; that of others stays."""
        with contextlib.suppress(Exception):  # nobody asked for it
            DockerSandboxes("none", engine=self._engine.kind, host=self._engine.host).sweep()


class ContainerWatch:
    """A container seen from outside, while the engine waits for its end."""

    def __init__(self, provider: LocalDockerProvider, waiting: subprocess.Popen[bytes]) -> None:
        self._provider = provider
        self._waiting = waiting

    def ended(self, within_s: float) -> str | None:
        """Wait that long at most for it to end; return how it ended, or None while it runs."""
        try:
            self._waiting.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        how = self._provider._how_it_ended()
        if how is None:
            time.sleep(within_s)  # the engine's command is over, the container is not
        return how

    def log(self) -> str:
        """Return the end of what it has written."""
        return self._provider._log()


def _given(option: str, value: object) -> tuple[str, ...]:
    return () if value is None else (option, str(value))


def _advice(words: str) -> str:
    if "already allocated" in words or "already in use" in words or "address already" in words:
        return ". Choose another port, or give none and the engine chooses a free one"
    return ""
