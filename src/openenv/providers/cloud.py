"""Servers in sandboxes of a cloud: the common base of all cloud providers. Each cloud adds calls of its package.

    start_container ──> _create ──> find the command ──> start it in the background ──> _address
          │ a failure, a time-out, Ctrl-C: the sandbox is deleted, even if the package raised before returning it
    wait_for_ready  ──> /health from here, and whether the process inside still runs
    stop_container  ──> _delete

Every sandbox carries two labels: `openenv-owner` names the process that started it, and `openenv-start` is a random ID
of the start. The second label finds a sandbox that exists although its creation failed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import re
import secrets
import shlex
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Generic, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from typing_extensions import Self

from openenv.errors import ProviderError, ProviderUnavailable, ServerCommandUnknown, install_command, message_of
from openenv.providers.dockerfiles import DockerfileSource, server_command
from openenv.providers.health import wait_for_ready
from openenv.providers.provider import ContainerProvider, announce_if_slow
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ProcessOwner

logger = logging.getLogger(__name__)

PORT = 8000
READY_S = 120.0
START_LABEL = "openenv-start"
_COMMAND_S = 20.0
_LOOK_S = 2.0
_LOG_BYTES = 4000
_LOG = "/tmp/openenv-server.log"
_PID = "/tmp/openenv-server.pid"
_EXIT = "/tmp/openenv-server.exit"
_MANIFEST = (
    "if [ -f /app/env/openenv.yaml ]; then echo /app/env/openenv.yaml; "
    "else find /app -maxdepth 4 -name openenv.yaml -print 2>/dev/null | head -n 1; fi"
)
# If the first process of a sandbox never waits for children, an ended server stays as a zombie.
_STATE = (
    f"if [ -s {_EXIT} ]; then echo ended with exit code $(cat {_EXIT}); "
    f"elif ! p=$(cat {_PID} 2>/dev/null) || [ ! -d /proc/$p ] || grep -q '^State:[[:space:]]*Z' /proc/$p/status; "
    "then echo was killed; fi"
)
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_LONG = 8

Box = TypeVar("Box")


def import_package(name: str, extra: str) -> ModuleType:
    """Import the package of a cloud.

    Raises:
        ProviderUnavailable: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ProviderUnavailable(
            f"The package {name.partition('.')[0]!r} is not installed. Install it: {install_command(extra)}"
        ) from error


class SecretRedactor:
    """Replaces secrets in texts that may be shown: keys, the values of variables, addresses that open a sandbox."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def add(self, *values: str | None) -> None:
        """Keep values out of texts."""
        self._values |= {value for value in values if value}

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Keep the values of variables out of texts, except short values of variables without a secret-like name."""
        self.add(*(value for name, value in variables.items() if len(value) >= _LONG or _SECRET_NAME.search(name)))

    def __call__(self, text: str) -> str:
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return text


@dataclass(frozen=True, slots=True)
class CloudSandbox:
    """A sandbox of a cloud that carries our labels, as `openenv ps` lists it."""

    name: str
    what: str
    owner: ProcessOwner | None
    delete: Callable[[], None] = field(compare=False, repr=False)
    created: str | None = None
    """As the cloud writes it."""
    use: Literal["server", "sandbox"] = "server"


@dataclass(frozen=True, slots=True)
class StartPlan:
    """One start: the image, the command, variables and options."""

    image: str
    env_vars: dict[str, str]
    command: str | None
    options: dict[str, Any]
    """Further options of `start_container`."""
    start_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the new sandbox."""
        return {CLOUD_OWNER_LABEL: ProcessOwner.current().short, START_LABEL: self.start_id}


class CloudProvider(ContainerProvider, Generic[Box]):
    """Runs one server in a cloud sandbox. As a context manager, it stops the server at the end of the block.

    A subclass adds the calls of its cloud's package: `_create`, `_run`, `_address`, `_delete`, `_labelled`.

    Args:
        image: The default image of `start_container`.
        env_vars: The default variables of the server.
        cmd: The command that starts the server.
        working_directory: The folder to run it in.
        surface_server_logs: Whether errors show the end of the server's log, with known secrets redacted.
    """

    _cloud: ClassVar[str]
    """The name of the cloud in messages."""
    _place: ClassVar[str]
    """Its name in `openenv ps`."""
    _options: tuple[str, ...] = ("cmd",)
    """Further options of `start_container`, passed as keywords."""

    def __init__(
        self,
        *,
        image: str | None,
        env_vars: Mapping[str, str] | None,
        cmd: str | None,
        working_directory: str | None = None,
        surface_server_logs: bool = True,
    ) -> None:
        self._image = image
        self._env_vars = dict(env_vars or {})
        self._cmd = cmd
        self._working_directory = working_directory
        self.surface_server_logs = surface_server_logs
        self._redact = SecretRedactor()
        self._redact.add_variables(self._env_vars)
        self._lock = threading.Lock()
        self._box: Box | None = None
        self._base_url: str | None = None
        self._has_command = False
        self._owner = os.getpid()

    # -- methods of one cloud ----------------------------------------------------------------------------------------

    @abstractmethod
    def _create(self, plan: StartPlan) -> Box:
        """Make a sandbox with the plan's labels, and return it when commands can run in it."""

    @abstractmethod
    def _run(self, box: Box, command: str, timeout_s: float) -> str:
        """Run a shell command inside and return its standard output. The exit code does not matter."""

    @abstractmethod
    def _address(self, box: Box) -> str:
        """Return the public address of port 8000."""

    @abstractmethod
    def _delete(self, box: Box) -> None:
        """Delete a sandbox; do nothing if it no longer exists."""

    @abstractmethod
    def _labelled(self, start_id: str | None = None) -> Iterable[CloudSandbox]:
        """List the sandboxes with our labels, of one start or of all."""

    def _name(self, box: Box) -> str:
        """Return the cloud's name for a sandbox."""
        return str(getattr(box, "id", ""))

    def _source(self, image: str) -> str:
        """Check the name of an image before anything is made.

        Raises:
            ValueError: This cloud cannot start it.
        """
        return image

    def _image_command(self, plan: StartPlan) -> str | None:
        """Return the command of the image itself, or None if it is unknown."""
        return None

    def _begun_by_image(self, plan: StartPlan) -> bool:
        """Return whether the image starts the server itself if no command is given."""
        return False

    def _release(self) -> None:
        """Free what belongs to one start besides the sandbox."""

    # -- start, wait, stop -------------------------------------------------------------------------------------------

    def start_container(
        self,
        image: str | None = None,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> str:
        """Create a sandbox, start the server in it and return its address, which may not answer yet.

        The command is `cmd`, else the `app` of the `openenv.yaml` under /app, else the command of the Dockerfile.

        Args:
            image: The image to start; by default the constructor's.
            port: None or 8000, the only port with a public address.
            env_vars: Variables of the server; they replace the constructor's.
            kwargs: `cmd`, the command that starts the server, and the options of the cloud's class.

        Raises:
            ValueError: An argument is invalid.
            ServerCommandUnknown: No command was found, which is a ValueError too. Nothing is left.
            ProviderError: It could not be started, or something is running already. Nothing of this start is left.
        """
        plan = self._plan(image, port, env_vars, kwargs)
        with self._lock:
            if self._box is not None:
                raise ProviderError(
                    f"{type(self).__name__} already has an active sandbox, {self._name(self._box)}; "
                    "stop_container() first, or use another provider"
                )
            self._redact.add_variables(plan.env_vars)
            self._owner = os.getpid()
            atexit.register(self._stop_at_exit)
            try:
                with self._asking("could not start a sandbox"):
                    return self._start(plan)
            except BaseException:
                self._undo(plan)
                raise

    def _plan(
        self, image: str | None, port: int | None, env_vars: Mapping[str, str] | None, kwargs: Mapping[str, Any]
    ) -> StartPlan:
        name = type(self).__name__
        if port not in (None, PORT):
            raise ValueError(f"{name} only supports port {PORT} (got {port}); leave port out")
        unknown = sorted(set(kwargs) - {*self._options, "wait_timeout"})
        if unknown:
            known = ", ".join(self._options)
            raise ValueError(f"Unsupported {name} start options: {', '.join(unknown)}. It takes {known}.")
        image = self._image if image is None else image
        if not image or not image.strip():
            raise ValueError(f"{name} requires an image: pass it to the constructor or to start_container().")
        options = {key: value for key, value in kwargs.items() if key not in ("cmd", "wait_timeout")}
        variables = self._env_vars if env_vars is None else dict(env_vars)
        return StartPlan(self._source(image.strip()), variables, kwargs.get("cmd") or self._cmd, options)

    def _start(self, plan: StartPlan) -> str:
        with announce_if_slow(f"{self._cloud} starts a sandbox of {plan.image}"):
            self._box = box = self._create(plan)
        command = plan.command
        if command is None and not self._begun_by_image(plan):
            command = self._find_command(box, plan)
        self._has_command = command is not None
        if command is not None:
            self._launch(box, command)
        self._base_url = self._address(box)
        self._redact.add(self._base_url)
        return self._base_url

    def _find_command(self, box: Box, plan: StartPlan) -> str:
        advice = f"Pass cmd= to {type(self).__name__} or to start_container()."
        path = self._run(box, _MANIFEST, _COMMAND_S).strip()
        own = self._image_command(plan)
        if not path.startswith("/"):
            if own is not None:
                return own
            raise ServerCommandUnknown(f"Could not find openenv.yaml under /app in the sandbox. {advice}")
        app = _app_of(self._run(box, f"cat {shlex.quote(path)}", _COMMAND_S))
        if app is None:
            if own is not None:
                return own
            raise ServerCommandUnknown(f"{path} in the sandbox does not contain an 'app' field. {advice}")
        folder = shlex.quote(path.rpartition("/")[0] or "/")
        return f"cd {folder} && python -m uvicorn {shlex.quote(app)} --host 0.0.0.0 --port {PORT}"

    def _launch(self, box: Box, command: str) -> None:
        """Start the server so that it outlives the call; its end is written into a file."""
        if self._working_directory:
            command = f"cd {shlex.quote(self._working_directory)} && {command}"
        script = f"( {command}\n) ; echo $? >{_EXIT}"
        line = f"nohup sh -c {shlex.quote(script)} >{_LOG} 2>&1 </dev/null & echo $! >{_PID}"
        self._run(box, f"rm -f {_EXIT}; {line}", _COMMAND_S)

    def wait_for_ready(self, base_url: str, timeout_s: float = READY_S) -> None:
        """Return as soon as the server answers. If it ends or does not answer in time, delete its sandbox.

        Raises:
            ServerDied: The server ended.
            ServerNotReady: It did not answer in time.
        """
        box = self._box
        if box is None:
            wait_for_ready(base_url, timeout_s, what=f"{self._cloud} sandbox")
            return
        what = f"{self._cloud} sandbox {self._name(box)}"
        watch = _ProcessWatch(self, box) if self._has_command else None
        try:
            wait_for_ready(base_url, timeout_s, what=what, watch=watch, shown_url="its address")
        except BaseException:
            self._stop_quietly()
            raise

    def log(self) -> str:
        """Return the end of the server's log, with known secrets redacted."""
        box = self._box
        if box is None or not self._has_command:
            return ""
        try:
            text = self._run(box, f"tail -c {_LOG_BYTES} {_LOG} 2>/dev/null", _COMMAND_S)
        except Exception as error:  # the errors of the packages have no common base class
            logger.debug("no log: %s", type(error).__name__)
            return ""
        return self._redact(text.strip())

    def stop_container(self) -> None:
        """Delete the sandbox; do nothing if there is none.

        Raises:
            ProviderError: It could not be deleted; a later call tries again.
        """
        atexit.unregister(self._stop_at_exit)
        with contextlib.suppress(Exception):  # whatever happens, the sandbox must be deleted
            self._release()
        box = self._box
        if box is None or self._owner != os.getpid():  # a forked process leaves it to its parent
            return
        with self._asking(f"could not delete sandbox {self._name(box)}"):
            self._delete(box)
        self._box = self._base_url = None

    def close(self) -> None:
        """Delete the sandbox, and free the provider's other resources."""
        self.stop_container()

    @property
    def base_url(self) -> str:
        """The address that `start_container` returned last.

        Raises:
            RuntimeError: Nothing runs.
        """
        if self._base_url is None:
            raise ProviderError(f"{type(self).__name__} has no active sandbox: start_container() first")
        return self._base_url

    def labelled(self) -> list[CloudSandbox]:
        """List the sandboxes in this account that carry our labels, of any process.

        Raises:
            ProviderError: The cloud does not answer.
        """
        with self._asking("did not list its sandboxes"):
            return [replace(sandbox, delete=partial(self._delete_listed, sandbox)) for sandbox in self._labelled()]

    @classmethod
    def for_account(cls) -> Self:
        """Return a provider that only lists the sandboxes of the account in the environment variables.

        Raises:
            ProviderUnavailable: The account is not set, or the package is not installed.
        """
        return cls()  # type: ignore[call-arg]  # the options of a subclass have defaults

    def __repr__(self) -> str:
        active = "" if self._box is None else f", sandbox={self._name(self._box)!r}"
        return f"{type(self).__name__}(image={self._image!r}{active})"

    # -- failures ----------------------------------------------------------------------------------------------------

    def _undo(self, plan: StartPlan) -> None:
        """Delete the sandbox of a failed start, even if the package raised before returning it."""
        if self._box is not None:
            self._stop_quietly()
            return
        atexit.unregister(self._stop_at_exit)
        try:
            for left in list(self._labelled(plan.start_id)):
                left.delete()
        except Exception as error:  # the caller has to see why the start failed, not this error
            logger.warning(
                "a sandbox of %s may be left: %s. `openenv gc --only %s` removes it once this process has ended",
                self._cloud,
                self._redact(message_of(error)),
                self._place,
            )

    def _stop_quietly(self) -> None:
        try:
            self.stop_container()
        except Exception as error:  # the caller has to see the earlier failure, not this error
            logger.warning("%s", self._redact(message_of(error)))

    def _stop_at_exit(self) -> None:
        if self._owner == os.getpid():
            self._stop_quietly()

    def _delete_listed(self, sandbox: CloudSandbox) -> None:
        with self._asking(f"could not delete sandbox {sandbox.name}"):
            sandbox.delete()

    @contextlib.contextmanager
    def _asking(self, problem: str) -> Iterator[None]:
        """Turn the package's errors into a `ProviderError` without secrets."""
        try:
            yield
        except ProviderError:
            raise
        except Exception as error:  # the errors of the packages have no common base class
            reason = " ".join(self._redact(f"{type(error).__name__}: {message_of(error)}").split())
            # Without its cause: the package's own objects may hold keys and signed addresses.
            raise ProviderError(f"{self._cloud} {problem}: {reason}") from None


class BuildingProvider(CloudProvider[Box]):
    """A provider for a cloud that builds images from Dockerfiles. `dockerfile:PATH` refers to one."""

    _prefix: ClassVar[str] = "dockerfile:"

    @classmethod
    def image_from_dockerfile(cls, dockerfile_path: str, context_dir: str | None = None) -> str:
        """Check a Dockerfile and return a reference to it for `start_container`, which builds it.

        Args:
            dockerfile_path: The Dockerfile.
            context_dir: The folder that `COPY` reads from; by default the grandparent of the Dockerfile, which is the
                layout of `openenv init`.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The folder or a copied file does not exist, or the cloud cannot build it.
        """
        source = DockerfileSource.of(dockerfile_path, context_dir)
        cls._check_dockerfile(source)
        return f"{cls._prefix}{source}"

    @classmethod
    def _check_dockerfile(cls, source: DockerfileSource) -> None:
        """Raise ValueError for a Dockerfile that the cloud cannot build."""

    @classmethod
    def _dockerfile(cls, image: str) -> DockerfileSource | None:
        """Return the Dockerfile that an image is built from, None for an image that exists."""
        return DockerfileSource.parse(image[len(cls._prefix) :]) if image.startswith(cls._prefix) else None

    def _source(self, image: str) -> str:
        source = self._dockerfile(image)
        if source is not None:
            self._check_dockerfile(source)
        return image

    def _image_command(self, plan: StartPlan) -> str | None:
        source = self._dockerfile(plan.image)
        return None if source is None else server_command(source.text)


@dataclass(slots=True)
class _ProcessWatch:
    """The end and the log of the server inside, for `wait_for_ready`. It asks at most every two seconds."""

    provider: CloudProvider[Any]
    box: Any
    asked: float = field(default_factory=time.monotonic)

    def ended(self, within_s: float, /) -> str | None:
        time.sleep(within_s)
        if time.monotonic() - self.asked < _LOOK_S:
            return None
        state = self.provider._run(self.box, _STATE, _COMMAND_S).strip()
        self.asked = time.monotonic()
        return f"Server process died: it {state}" if state else None

    def log(self) -> str:
        if self.provider.surface_server_logs:
            return self.provider.log()
        return "(withheld, because it may hold secrets; surface_server_logs=True shows it)"


def _app_of(manifest: str) -> str | None:
    """Return the `app` of an `openenv.yaml`."""
    try:
        data = yaml.safe_load(manifest)
    except yaml.YAMLError:
        return None
    app = data.get("app") if isinstance(data, dict) else None
    return app.strip() or None if isinstance(app, str) else None


def require_https(url: object, cloud: str) -> str:
    """Return an address if what goes there is encrypted.

    Raises:
        ProviderError: It is not; the text leaves the address out, because it may open the sandbox.
    """
    if not isinstance(url, str) or urlsplit(url).scheme != "https" or not urlsplit(url).hostname:
        raise ProviderError(f"{cloud} returned an address that is not https; refusing to send data unencrypted")
    return url.rstrip("/")
