"""Variables of this process while a wrapper of the package `harbor` reads them; agents here get theirs in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from openenv import settings


def enabled() -> bool:
    """Return whether several overlays can be in use at once: no, the environment is the whole process's."""
    return False


def install() -> bool:
    """Return whether `os.environ` was replaced by one that differs between tasks: it never is."""
    return False


def overlay(values: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set variables for a block, and put them back; another overlay waits until this one is over."""
    return settings.exported(values)
