"""Prints, as JSON, the observations of one tool server. Run by interpreters with this package and the published one."""

from __future__ import annotations

import json
import sys
from typing import Any

from fastmcp import Context, FastMCP
from fastmcp.utilities.types import Image

from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.env_server.types import Action, Observation, State

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("text", {"message": "hi"}),
    ("number", {"n": 1}),
    ("number", {"n": "1"}),
    ("table", {}),
    ("several", {}),
    ("unannotated", {}),
    ("nothing", {}),
    ("picture", {}),
    ("later", {"message": "hi"}),
    ("counted", {}),  # once: the published package forgets such state between steps
    ("practice", {"times": 2}),
    ("missing", {}),
    ("text", {}),
    ("text", {"message": "hi", "more": 1}),
    ("broken", {}),
]


def text(message: str) -> str:
    """Repeat."""
    return message


def number(n: int) -> int:
    return n + 1


def table() -> dict[str, Any]:
    return {"a": 1, "b": None}


def several() -> list[int]:
    return [1, 2]


def unannotated():  # type: ignore[no-untyped-def]
    return [1, 2]


def nothing() -> None:
    return None


def picture() -> Image:
    return Image(data=b"abc", format="png")


async def later(message: str) -> str:
    return message


async def counted(ctx: Context) -> int:
    count = (await ctx.get_state("count") or 0) + 1
    await ctx.set_state("count", count)
    return int(count)


def broken() -> str:
    raise ValueError("out of order")


class Tools(MCPEnvironment):
    """An environment of tools."""

    def __init__(self) -> None:
        server = FastMCP("tools")
        for function in (text, number, table, several, unannotated, nothing, picture, later, counted, broken):
            server.tool(function)
        super().__init__(server)

        @self.tool(mode="simulation")
        def practice(times: int, word: str = "x") -> str:
            """Practise."""
            return word * times

        self._mode = "simulation"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    """Print what the tools lead to."""
    env = Tools()
    called = [serialize_observation(env.step(CallToolAction(tool_name=name, arguments=args))) for name, args in CALLS]
    env.reset()
    printed = {
        "listed": serialize_observation(env.step(ListToolsAction())),
        "called": called,
        "callables": sorted(env.get_callables()),
        "code": env.execute_code("result = text('a') + practice(2)").metadata,
        "syntax": env.execute_code("a b").metadata["error"][:13],
    }
    env.close()
    printed["closed"] = [env.mcp_server, env.mcp_client]
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main()
