"""Objects that belong to an event loop and go with it.

They are kept on the loop itself: a table beside it would keep every loop alive that ever was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_ATTRIBUTE = "_openenv_belongings"


def loop_local(loop: asyncio.AbstractEventLoop, kind: type[T], make: Callable[[], T]) -> T:
    """Return the loop's own object of a kind, made at the first call."""
    belongings: dict[type[Any], Any] | None = getattr(loop, _ATTRIBUTE, None)
    if belongings is None:
        belongings = {}
        setattr(loop, _ATTRIBUTE, belongings)
    found = belongings.get(kind)
    if found is None:
        found = belongings[kind] = make()
    result: T = found
    return result
