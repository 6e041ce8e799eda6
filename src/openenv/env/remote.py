"""Environments whose code runs in another process, as sessions see them.

A stand-in takes the place of the environment. An operation is asked for together with the encoder of its result, so
that the result is encoded where it is made and crosses once, as bytes. Knows names only; how the two talk is the
runner's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

RemoteOperation = Literal["reset", "step", "step_with", "state"]
Encoder = Callable[[Any], Any]


class RemoteEnvironment(ABC):
    """Stands for an environment elsewhere.

    Its methods are coroutines, so sessions call them on the event loop and no thread waits for the other process. They
    take every keyword: which of them the environment itself takes is known where it is.
    """

    served_class: type[Any]
    """The environment's own class, or one that looks like it where that cannot be imported here."""

    @abstractmethod
    async def ask(self, operation: RemoteOperation, argument: Any, encode: Encoder | None = None) -> Any:
        """Do an operation there and return its result, encoded."""

    @abstractmethod
    async def reset_async(self, **kwargs: Any) -> Any:
        """Begin an episode."""

    @abstractmethod
    async def step_async(self, action: Any, **kwargs: Any) -> Any:
        """Take an action."""

    @abstractmethod
    async def close(self) -> None:
        """Close it."""


def step_argument(action: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what `step_with` is asked with."""
    return action, dict(kwargs)


def class_of(env: Any) -> type[Any]:
    """Return the class of an environment, wherever that is."""
    return env.served_class if isinstance(env, RemoteEnvironment) else type(env)
