"""The interfaces of providers: start a server somewhere, wait until it answers, stop it.

There are two, as in existing code: a `ContainerProvider` starts a container of an image; a `RuntimeProvider` starts
the server that its constructor describes.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import Self

from openenv._lazy import load_plugin

PROVIDERS = "openenv.providers"
"""The entry-point group of providers. Another package adds a provider by registering its class here."""
READY_S = 30.0
PATIENCE_S = 3.0


class ContainerProvider(ABC):
    """Starts one container of an image at a time. As a context manager, it stops the container."""

    @abstractmethod
    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any
    ) -> str:
        """Start a container and return the address of its server, which may not answer yet.

        Args:
            image: Name of the image.
            port: The port on this machine; by default any free one.
            env_vars: Variables of the container.
            kwargs: Further options of the provider.

        Raises:
            RuntimeError: The start failed; everything it created was removed.
        """

    @abstractmethod
    def stop_container(self) -> None:
        """Stop and remove the container; do nothing if there is none."""

    @abstractmethod
    def wait_for_ready(self, base_url: str, timeout_s: float = READY_S) -> None:
        """Return as soon as the server answers.

        Raises:
            TimeoutError: It does not answer in time.
        """

    def close(self) -> None:  # noqa: B027  # a provider need not hold anything else
        """Free the provider's other resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.stop_container()
        finally:
            self.close()


class RuntimeProvider(ABC):
    """Starts the server that its constructor describes. As a context manager it starts and stops it."""

    @abstractmethod
    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """Start the server and return its address; it may not answer yet.

        Args:
            port: The port to listen on; by default any free one.
            env_vars: Variables of the server.
            kwargs: Further options of the provider.

        Raises:
            RuntimeError: The start failed; everything it created was removed.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the server; do nothing if none runs."""

    @abstractmethod
    def wait_for_ready(self, timeout_s: float = READY_S) -> None:
        """Return as soon as the server answers.

        Raises:
            TimeoutError: It does not answer in time.
        """

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def provider_class(name: str) -> type[ContainerProvider] | type[RuntimeProvider]:
    """Import the provider class of a registered name.

    Raises:
        UnknownPluginError: The name is not registered.
        TypeError: The registered object is not a provider class.
    """
    loaded = load_plugin(PROVIDERS, name, kind="provider")
    if not (isinstance(loaded, type) and issubclass(loaded, (ContainerProvider, RuntimeProvider))):
        raise TypeError(f"{name} is not a provider; register a subclass of ContainerProvider or RuntimeProvider")
    return loaded


def provider_named(name: str, **options: Any) -> ContainerProvider | RuntimeProvider:
    """Create the provider of a registered name, such as `docker` or `daytona`.

    Args:
        name: A built-in name, or one from an installed package; `openenv._lazy.plugin_names` lists all names.
        **options: Arguments for the class of the provider.

    Raises:
        UnknownPluginError: The name is not registered; also a ValueError.
        TypeError: The registered object is not a provider class.
    """
    return provider_class(name)(**options)


def refuse_unknown(
    provider: object, unknown: Mapping[str, Any], start: Callable[..., str], *, more: Iterable[str] = ()
) -> None:
    """Raise ValueError for unknown options: ignoring one would start a different server.

    Args:
        provider: The provider, named in the message.
        unknown: The unknown options.
        start: The method with the options; the message lists them.
        more: Further options of that method.
    """
    if unknown:
        parameters = inspect.signature(start).parameters.values()
        options = [option.name for option in parameters if option.default is not inspect.Parameter.empty]
        names = ", ".join(sorted(unknown))
        supported = ", ".join([*options, *more])
        raise ValueError(f"Unsupported kwargs for {type(provider).__name__}: {names}. It takes {supported}.")


@contextlib.contextmanager
def announce_if_slow(text: str, *, after_s: float | None = None) -> Iterator[None]:
    """Write a line to standard error if the block takes longer than that, and another when it ends.

    For a user at the terminal, while an image is pulled or a project is set up.
    """
    began = time.monotonic()
    is_slow = threading.Event()

    def announce() -> None:
        is_slow.set()
        _write(f"{text} ...")

    timer = threading.Timer(PATIENCE_S if after_s is None else after_s, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_slow.is_set():
            _write(f"{text}: {time.monotonic() - began:.0f} s")


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or None
        sys.stderr.write(f"openenv: {line}\n")
        sys.stderr.flush()
