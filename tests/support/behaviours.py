"""Manifests: behaviours by name, each with one test, which runs over every transport or every kind of server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Manifest:
    """What a module of tests promises, and which of its tests keep it.

    Args:
        behaviours: What each behaviour is, by name.
    """

    def __init__(self, behaviours: Mapping[str, str]) -> None:
        self.behaviours = dict(behaviours)
        self.tested: set[str] = set()

    def __call__(self, name: str) -> Callable[[F], F]:
        """Register the one test of a behaviour."""

        def register(function: F) -> F:
            assert name in self.behaviours, name
            assert name not in self.tested, name
            self.tested.add(name)
            return function

        return register

    def __len__(self) -> int:
        """Count the behaviours."""
        return len(self.behaviours)

    def check(self) -> None:
        """Fail if a behaviour has no test."""
        assert set(self.behaviours) == self.tested
