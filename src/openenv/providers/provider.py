"""What every provider can do: start a server somewhere, say when it answers, and stop it.

Two kinds, as existing code has them: those that start containers of an image, and those that start a runtime which
they know from their constructor. Knows no engine and no process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal

from typing_extensions import Self

READY_S = 30.0


class ContainerProvider(ABC):
    """Starts a container of an image, one at a time. As a context manager it stops what it has started."""

    @abstractmethod
    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any
    ) -> str:
        """Start a container and return the address of its server, which need not answer yet.

        Args:
            image: What to start.
            port: Where the server is to be reached; by default any free port.
            env_vars: Variables of the container.
            kwargs: What else the provider offers.

        Raises:
            RuntimeError: It could not be started; nothing is left of it.
        """

    @abstractmethod
    def stop_container(self) -> None:
        """Stop and remove the container; harmless when there is none."""

    @abstractmethod
    def wait_for_ready(self, base_url: str, timeout_s: float = READY_S) -> None:
        """Return as soon as the server answers.

        Raises:
            TimeoutError: It does not in time.
        """

    def close(self) -> None:  # noqa: B027  # a provider need not hold anything else
        """Free what the provider holds besides the container."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False] | None:
        try:
            self.stop_container()
        finally:
            self.close()
        return None


class RuntimeProvider(ABC):
    """Starts a server that it knows from its constructor. As a context manager it starts and stops it."""

    @abstractmethod
    def start(self, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """Start the server and return its address; it need not answer yet.

        Args:
            port: Where it is to listen; by default any free port.
            env_vars: Variables of the server.
            kwargs: What else the provider offers.

        Raises:
            RuntimeError: It could not be started; nothing is left of it.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the server; harmless when none runs."""

    @abstractmethod
    def wait_for_ready(self, timeout_s: float = READY_S) -> None:
        """Return as soon as the server answers.

        Raises:
            TimeoutError: It does not in time.
        """

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False] | None:
        self.stop()
        return None


class KubernetesProvider(ContainerProvider):
    """A name for subclasses: this release starts nothing in Kubernetes, so the class itself cannot be made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if getattr(cls, "__abstractmethods__", None):
            raise TypeError(
                f"{cls.__name__} is abstract: this release starts no servers in Kubernetes. Subclass it and write "
                "start_container, stop_container and wait_for_ready; or start the server with a manifest of your own "
                "and give its address to the client as base_url."
            )
        return super().__new__(cls)


def refuse_unknown(provider: str, unknown: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for options that a provider does not have: ignoring one would start something else."""
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"Unsupported kwargs for {provider}: {names}. It takes {', '.join(known)}.")


# progress: One line for who is at the terminal, when something takes long: an image is pulled, a project is set up.
#
# Knows standard error and a timer.


PATIENCE_S = 3.0


@contextlib.contextmanager
def told_when_slow(text: str, *, after_s: float | None = None) -> Iterator[None]:
    """Write a line to standard error if what is done inside has not ended by then, and another one when it has."""
    began = time.monotonic()
    told = threading.Event()

    def tell() -> None:
        told.set()
        _write(f"{text} ...")

    timer = threading.Timer(PATIENCE_S if after_s is None else after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if told.is_set():
            _write(f"{text}: {time.monotonic() - began:.0f} s")


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens there
        sys.stderr.write(f"openenv: {line}\n")
        sys.stderr.flush()
