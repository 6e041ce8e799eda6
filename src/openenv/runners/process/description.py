"""What a server has to know of an environment that it does not hold. Made in the worker, read in the server."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...env.tools.source import ToolSource
from .parcels import pack, unpack

_FLAGS = ("SUPPORTS_CONCURRENT_SESSIONS", "REQUIRES_SINGLE_THREAD_EXECUTOR")


@dataclass(frozen=True, slots=True)
class Description:
    """An environment, described.

    Args:
        cls: Its class, pickled; None where that cannot be.
        name: The class's name.
        flags: What the class says about sessions and threads.
        methods: Names of what can be called.
        has_tools: Whether it has tools of its own.
        has_server: Whether it has a FastMCP server and no tools of its own.
        instructions: What its FastMCP server tells clients.
    """

    cls: bytes | None
    name: str
    flags: dict[str, bool]
    methods: frozenset[str]
    has_tools: bool
    has_server: bool
    instructions: str | None

    def served_class(self) -> type[Any]:
        """Return the environment's class, or one that looks like it."""
        return _served(self.cls, self.name, tuple(self.flags.items()))


@lru_cache(maxsize=64)
def _served(pickled: bytes | None, name: str, flags: tuple[tuple[str, bool], ...]) -> type[Any]:
    if pickled is not None:
        try:
            found = unpack(pickled)
        except Exception:
            found = None
        if isinstance(found, type):
            return found
    return type(name, (), dict(flags))


def describe(env: Any) -> Description:
    """Describe an environment; called where its code runs."""
    server = getattr(env, "mcp_server", None)
    has_tools = isinstance(getattr(env, "tools", None), ToolSource)
    own = [name for name, value in getattr(env, "__dict__", {}).items() if callable(value)]
    instructions = getattr(server, "instructions", None)
    key: Any = type(env)  # every class is hashable, but not to a type checker
    cls, flags, methods = _class(key)
    return Description(
        cls=cls,
        name=type(env).__name__,
        flags=flags,
        methods=methods.union(own),
        has_tools=has_tools,
        has_server=not has_tools and hasattr(server, "local_provider"),
        instructions=instructions if isinstance(instructions, str) else None,
    )


@lru_cache(maxsize=64)
def _class(cls: Hashable) -> tuple[bytes | None, dict[str, bool], frozenset[str]]:
    """Describe a class, once."""
    try:
        pickled: bytes | None = pack(cls)
    except Exception:
        pickled = None
    static = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("__")}
    methods = frozenset(
        name for name, value in static.items() if callable(value) or isinstance(value, (staticmethod, classmethod))
    )
    return pickled, {name: bool(getattr(cls, name, False)) for name in _FLAGS}, methods
