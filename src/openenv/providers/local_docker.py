"""A server in a container of the local engine (`docker` or `podman`), and the common base with Swarm services.

The port is published on loopback only, and the engine chooses it. If a start fails, no container is left. Each start
removes the containers of killed owners.
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
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from openenv import settings
from openenv.errors import ProviderError, ProviderUnavailable, SandboxUnavailable
from openenv.providers.health import quoted, wait_for_ready
from openenv.providers.provider import READY_S, ContainerProvider, announce_if_slow, refuse_unknown
from openenv.sandboxes.base import Mount
from openenv.sandboxes.container_cli import OWNER_LABEL, EngineName, bind_option, find_engine
from openenv.sandboxes.host import ProcessOwner

logger = logging.getLogger(__name__)

INNER_PORT = 8000
PROVIDER_LABEL = "openenv.provider"
APPEAR_S = 3.0
LOOK_S = 0.1
_LOG_LINES = 40
_REMOVE_S = 20.0
_PULL_S = 3600.0
_LONG_VALUE = 32_768


class EngineProvider(ContainerProvider):
    """Runs one container or service of an engine at a time: starts it, waits for it and removes it.

    A subclass defines how it is created (`_start`), watched, logged and removed.
    """

    _noun: ClassVar[str]
    _title: ClassVar[str]
    _log_command: ClassVar[tuple[str, ...]]

    def __init__(self, engine: EngineName, host: str | None, ready_timeout_s: float) -> None:
        try:
            cli = find_engine(engine, host)
        except SandboxUnavailable as error:
            what = "Podman" if engine == "podman" else "Docker"
            raise ProviderUnavailable(f"{what} is not available: {error}") from error
        self._engine = replace(cli, error=ProviderError, unavailable=ProviderUnavailable)
        self.ready_timeout_s = ready_timeout_s
        self._name: str | None = None
        self._owner = os.getpid()

    def wait_for_ready(self, base_url: str, timeout_s: float | None = None) -> None:
        """Return as soon as the server answers; remove it if it ends or does not answer in time.

        Raises:
            ServerDied: It ended; the text has the end of its log.
            ServerNotReady: It did not answer in time, by default `ready_timeout_s`.
        """
        timeout_s = self.ready_timeout_s if timeout_s is None else timeout_s
        if self._name is None:
            wait_for_ready(base_url, timeout_s, what=self._title)
            return
        try:
            with self._watch(self._name) as ended:
                what, watch = f"{self._title} {self._name}", EngineWatch(ended, self.log)
                wait_for_ready(base_url, timeout_s, what=what, watch=watch, advice=self._advice_when_late)
        except BaseException:
            self._remove()
            raise

    def log(self) -> str:
        """Return the end of the server's output; an empty text if none runs."""
        if self._name is None:
            return ""
        with contextlib.suppress(ProviderError):
            done = self._engine.run(*self._log_command, "--tail", str(_LOG_LINES), self._name, timeout=20)
            if done.returncode == 0:
                parts = (part.rstrip() for part in (done.stdout, done.stderr) if part.strip())
                return b"\n".join(parts).decode("utf-8", "replace")
        return ""

    def _require_none(self) -> None:
        if self._name is not None:
            raise ProviderError(
                f"{type(self).__name__} is already running {self._name}; stop_container() first, or use another one"
            )

    def _start(self, image: str, name: str, create: Callable[[], str]) -> str:
        """Create the container under its name and return its address; if that fails, remove it."""
        self._name, self._owner = name, os.getpid()
        atexit.register(self.stop_container)
        try:
            return create()
        except ProviderError as error:
            log = self.log()
            self._remove()
            text = f"Failed to start {self._noun} of '{image}': {error}{_port_advice(str(error))}{quoted(log)}"
            raise ProviderError(text, log=log) from error
        except BaseException:  # Ctrl-C, while the engine continues with the request
            self._remove(may_appear=True)
            raise

    def _take_name(self) -> str | None:
        """Forget the container, and return its name if this process has to remove it."""
        name, self._name = self._name, None
        atexit.unregister(self.stop_container)
        return name if self._owner == os.getpid() else None  # a forked process leaves it to its parent

    @abstractmethod
    def _remove(self, *, may_appear: bool = False) -> None:
        """Remove it and return when it is gone. Set `may_appear` if the engine may still be creating it."""

    @abstractmethod
    def _watch(self, name: str) -> AbstractContextManager[Callable[[float], str | None]]:
        """Return a function that waits a number of seconds for the end, and returns how it ended, or None."""

    @abstractmethod
    def _advice_when_late(self) -> str:
        """Return a sentence for a server that does not answer in time."""


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """The end and the log of a container or service, in the form that `wait_for_ready` requires."""

    ended: Callable[[float], str | None]
    log: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """Options of `LocalDockerProvider.start_container`.

    Args:
        container_port: The port that the server listens on inside.
        command: Replaces the image's command.
        network: The network to join; it must publish ports.
        cpu_limit: The processors that the container may use.
        memory_limit: The memory that it may use, as the engine writes it: `2g`.
        gpus: The GPUs, as the engine writes them: `all`.
        mounts: Folders of this machine to mount, read-only.
        labels: More labels of the container.
        run_args: More options for the engine's `create`, put before the image.
    """

    container_port: int = INNER_PORT
    command: str | Sequence[str] | None = None
    network: str | None = None
    cpu_limit: float | str | None = None
    memory_limit: str | None = None
    gpus: str | None = None
    mounts: Sequence[Mount] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    run_args: Sequence[str] = ()

    def words(self) -> list[str]:
        """Return the options for the engine's `create`, without the port and the command."""
        limits = {
            "--network": self.network,
            "--cpus": self.cpu_limit,
            "--memory": self.memory_limit,
            "--gpus": self.gpus,
        }
        return [
            *owner_labels("docker", self.labels),
            *options_of(limits),
            *(word for mount in self.mounts for word in ("--mount", bind_option(mount))),
            *self.run_args,
        ]


_OPTION_NAMES = tuple(option.name for option in fields(ContainerOptions))


class LocalDockerProvider(EngineProvider):
    """Starts a container and publishes its server on 127.0.0.1; one at a time.

    Args:
        engine: `docker`, `podman`, or the first of them that answers.
        host: The engine's address, as for its `--host` or `--url`; by default the engine's settings decide.
        stop_timeout_s: Time to end before the server is killed.
        ready_timeout_s: The longest time until it answers; `wait_for_ready` can set another time.

    Raises:
        ProviderUnavailable: No engine is installed, or none answers.
    """

    _noun = "Docker container"
    _title = "Container"
    _log_command = ("logs",)

    def __init__(
        self,
        *,
        engine: EngineName = "auto",
        host: str | None = None,
        stop_timeout_s: float = 10.0,
        ready_timeout_s: float = READY_S,
    ) -> None:
        super().__init__(engine, host, ready_timeout_s)
        self._stop_timeout_s = stop_timeout_s

    @property
    def container_name(self) -> str | None:
        """The name of the container; None if nothing runs."""
        return self._name

    def start_container(
        self,
        image: str,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> str:
        """Start a container, pulling its image if it is missing, and return its address.

        Args:
            image: The name of the image.
            port: The port on this machine; by default any free one.
            env_vars: Variables of the container; kept out of argument lists.
            kwargs: Fields of `ContainerOptions`, such as `memory_limit="2g"` or `command="serve --port 80"`.

        Raises:
            ValueError: An option is unknown or invalid.
            RuntimeError: The start failed; the text has the log. Nothing is left of the container.
        """
        unknown = {name: value for name, value in kwargs.items() if name not in _OPTION_NAMES}
        refuse_unknown(self, unknown, LocalDockerProvider.start_container, more=_OPTION_NAMES)
        self._require_none()
        options = ContainerOptions(**{name: value for name, value in kwargs.items() if value is not None})
        variables = Variables.of(env_vars)
        publish = f"127.0.0.1:{'' if port is None else port}:{options.container_port}"
        words = ["--publish", publish, *variables.options, *options.words(), image, *words_of(options.command)]
        with contextlib.suppress(ProviderError):  # sweeping is a courtesy: its failure must not stop this start
            self._engine.sweep()
        self._ensure_image(image)
        name = new_name(image)

        def create() -> str:
            self._engine.output("create", "--name", name, *words, data=variables.file, environ=variables.environ)
            self._engine.output("start", name)
            return f"http://localhost:{self._published(options.container_port)}"

        return self._start(image, name, create)

    def stop_container(self) -> None:
        """Stop and remove the container; do nothing if there is none, or if the engine is gone."""
        if self._name is None or self._owner != os.getpid():  # a forked process leaves it to its parent
            return
        try:
            patience = self._stop_timeout_s
            with contextlib.suppress(ProviderError):
                self._engine.run("stop", "--time", str(max(0, round(patience))), self._name, timeout=patience + 30)
        finally:
            self._remove()

    def _ensure_image(self, image: str) -> None:
        if self._engine.has_image(image):
            return
        with announce_if_slow(f"pulling {image}"):
            problem = self._engine.pull(image, timeout=_PULL_S)
        if problem is not None:
            raise ProviderError(problem)

    def _published(self, container_port: int) -> int:
        """Return the port that the engine has chosen."""
        done = self._engine.run("port", str(self._name), f"{container_port}/tcp")
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            port = line.rpartition(":")[2].strip()
            if port.isdigit():
                return int(port)
        how = self._how_it_ended()
        if how is not None:
            raise ProviderError(how)
        raise ProviderError(
            f"the engine has published no port for {container_port}: the network does not publish ports. Set network="
        )

    def _how_it_ended(self) -> str | None:
        form = "{{.State.Running}}|{{.State.ExitCode}}|{{.State.OOMKilled}}|{{.State.Error}}"
        done = self._engine.run("inspect", "--format", form, str(self._name))
        if done.returncode != 0:
            return "another program removed it"
        running, code, oom, error = done.stdout.decode("utf-8", "replace").strip().split("|", 3)
        if running == "true":
            return None
        reason = "it ran out of memory" if oom == "true" else f"it ended with exit code {code}"
        return f"{reason} ({error})" if error else reason

    @contextlib.contextmanager
    def _watch(self, name: str) -> Iterator[Callable[[float], str | None]]:
        """Let `docker wait` report the end of the container."""
        command, null = self._engine.argv("wait", name), subprocess.DEVNULL
        with subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True) as waiting:

            def ended(within_s: float) -> str | None:
                try:
                    waiting.wait(within_s)
                except subprocess.TimeoutExpired:
                    return None
                how = self._how_it_ended()
                if how is None:
                    time.sleep(within_s)  # `docker wait` is over, the container is not
                return how

            try:
                yield ended
            finally:
                waiting.kill()

    def _advice_when_late(self) -> str:
        with contextlib.suppress(ProviderError):
            if self._is_elsewhere():
                return "The engine runs on another machine, whose loopback cannot be reached from here: start it there."
        return f"Is the server inside listening on 0.0.0.0, and on port {INNER_PORT} or what container_port says?"

    def _is_elsewhere(self) -> bool:
        """Return whether the engine runs on another machine, so that ports of its loopback are not ours."""
        host = self._engine.host
        if host is None and self._engine.kind == "docker":
            done = self._engine.run("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
            host = done.stdout.decode().strip()
        return host is not None and host.startswith(("tcp://", "ssh://", "http://", "https://"))

    def _remove(self, *, may_appear: bool = False) -> None:
        name = self._take_name()
        if name is None:
            return
        try:
            problem = self._engine.remove(name, within_s=_REMOVE_S, may_appear_s=APPEAR_S if may_appear else 0.0)
        except ProviderError as error:
            problem = str(error)
        if problem is not None:
            kind = self._engine.kind
            logger.warning("container %s may be left: %s. Remove it: %s rm -f %s", name, problem, kind, name)


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables of a container, kept out of the argument list, which every user of the machine can read.

    Most go through the standard input, as an env file. Long values and values with line breaks, which no env file can
    hold, go through the environment of the `docker` command.
    """

    options: list[str]
    file: bytes
    environ: dict[str, str] | None

    @classmethod
    def of(cls, values: Mapping[str, str] | None) -> Variables:
        """Sort variables into the two ways.

        Raises:
            ValueError: A name or a value is invalid.
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
    """Return the options that label a container with its owner, so that it can be swept when the owner is dead."""
    every = {OWNER_LABEL: str(ProcessOwner.current()), PROVIDER_LABEL: kind, **(labels or {})}
    return [word for name, text in every.items() for word in ("--label", f"{name}={text}")]


def new_name(image: str, infix: str = "") -> str:
    """Return a unique name for a container or service of an image."""
    base = re.sub(r"[^a-zA-Z0-9_.-]", "-", image.rpartition("/")[2].partition("@")[0].partition(":")[0]).strip("-._")
    return f"{base[:40] or 'openenv'}-{infix}{secrets.token_hex(4)}"


def options_of(values: Mapping[str, object]) -> list[str]:
    """Return the options that have a value, each with it."""
    return [word for option, value in values.items() if value is not None for word in (option, str(value))]


def words_of(command: str | Sequence[str] | None) -> Sequence[str]:
    """Return a command as words; a text is split as a shell does."""
    return shlex.split(command) if isinstance(command, str) else command or ()


def _port_advice(reason: str) -> str:
    if "already allocated" in reason or "already in use" in reason or "address already" in reason:
        return ". Choose another port, or give none and the engine chooses a free one"
    return ""
