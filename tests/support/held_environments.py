"""Environments whose tools hold them in every way that authors write, to see that each is freed once it is closed.

Worker processes import this file too. `alive` says how many of a class are in memory.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

from fastmcp import Context, FastMCP
from fastmcp.dependencies import Depends
from fastmcp.server.middleware import Middleware
from pydantic import BaseModel

from openenv.env.environment import Environment
from openenv.env.mcp_environment import MCPEnvironment
from openenv.types import Action, Observation, State

_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def alive() -> int:
    """Count the environments in memory, after garbage is collected."""
    gc.collect()
    return len(_ALIVE)


def still_alive() -> int:
    """Count them as they are."""
    return len(_ALIVE)


class _Reset:
    """What all of them have."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state_bytes: ClassVar[int] = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return Observation()

    @property
    def state(self) -> Any:
        return State()

    def remember(self) -> None:
        """Count this one, and give it something to hold."""
        _ALIVE.add(self)
        self.payload = bytearray(self.state_bytes)

    def holds(self) -> str:
        """Say how much it holds."""
        return f"{len(self.payload)} bytes"

    async def waits(self, ctx: Context) -> str:
        """Report, and answer."""
        await ctx.report_progress(1, 1)
        await ctx.info("working")
        return self.holds()

    def note(self) -> str:
        """A resource or a prompt."""
        return self.holds()

    def note_of(self, day: str) -> str:
        """A template."""
        return f"{day}: {self.holds()}"


class Methods(_Reset, MCPEnvironment):
    """Its tools, resources and prompts are its own methods."""

    def __init__(self, server: FastMCP | None = None) -> None:
        self.remember()
        server = server or FastMCP("held")
        server.tool(self.holds)
        server.tool(self.waits)
        server.resource("note://today")(self.note)
        server.resource("note://{day}/text")(self.note_of)
        server.prompt(self.note, name="greet")
        super().__init__(server)
        self.tool(mode="simulation")(self.peeks)

    def peeks(self) -> str:
        """Of one mode."""
        return self.holds()


class Closures(_Reset, MCPEnvironment):
    """Its tools close over it; one takes a class that its constructor has made, one has a default from there."""

    def __init__(self) -> None:
        self.remember()
        server: FastMCP = FastMCP("held")
        own = [self]

        class Wish(BaseModel):
            text: str = ""

            def owner(self) -> Any:
                return own

        @server.tool
        def holds() -> str:
            return self.holds()

        @server.tool
        async def waits(ctx: Context) -> str:
            return await self.waits(ctx)

        def wishes(wish: Any = None) -> str:
            return self.holds()

        wishes.__annotations__["wish"] = Wish | None  # the text of an annotation could not be read elsewhere
        server.tool(wishes)
        super().__init__(server)
        self.server = server  # a circle of its own


class Injected(_Reset, MCPEnvironment):
    """FastMCP itself calls its tools, since they depend on something."""

    def __init__(self) -> None:
        self.remember()
        server: FastMCP = FastMCP("held")

        def unit() -> str:
            return "bytes" if self.payload is not None else ""

        @server.tool
        def holds(unit: str = Depends(unit)) -> str:
            return f"{len(self.payload)} {unit}"

        @server.tool
        async def waits(ctx: Context, unit: str = Depends(unit)) -> str:
            await ctx.report_progress(1, 1)
            return f"{len(self.payload)} {unit}"

        super().__init__(server)


class Guarded(Methods):
    """Every call passes FastMCP's client: there is a middleware, and a mounted server."""

    def __init__(self) -> None:
        server: FastMCP = FastMCP("held", middleware=[Middleware()])
        inner: FastMCP = FastMCP("inner")
        inner.tool(self.holds, name="inner_holds")
        server.mount(inner)
        super().__init__(server)


class Careless(Methods):
    """Its `close` does not call that of its base class."""

    def close(self) -> None:
        self.payload = bytearray()


class Attribute(_Reset, Environment[Action, Observation, State]):
    """No `MCPEnvironment`: it has a FastMCP server as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.remember()
        self.mcp_server: FastMCP = FastMCP("held")
        self.mcp_server.tool(self.holds)
        self.mcp_server.tool(self.waits)
        self.mcp_server.resource("note://today")(self.note)
        self.mcp_server.prompt(self.note, name="greet")

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return Observation()


class Census(Methods):
    """Counts the others in its process, besides itself."""

    def __init__(self) -> None:
        server: FastMCP = FastMCP("census")
        server.tool(self.others)
        super().__init__(server)

    def others(self) -> int:
        """Count."""
        return alive() - 1


SHARED: FastMCP = FastMCP("shared")


@SHARED.tool
def adds(a: int, b: int) -> int:
    """Add."""
    return a + b


class Sharing(_Reset, MCPEnvironment):
    """All of this class have one server."""

    def __init__(self) -> None:
        self.remember()
        super().__init__(SHARED)


def census_first(kind: type[Any]) -> Any:
    """Make a census as the first environment of a process, and one of a kind after that."""
    return kind() if still_alive() else Census()


KINDS = (Methods, Closures, Injected, Guarded, Careless, Attribute)
