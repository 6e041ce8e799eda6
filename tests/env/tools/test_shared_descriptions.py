"""Environments of one class share the descriptions of their tools, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Annotated, Any

import fastmcp.tools.function_parsing as parsing
import pytest
from fastmcp import Context, FastMCP
from pydantic import Field

from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.env.tools.source import ToolRequest
from openenv.types import Action, Observation, State


class Shelf(MCPEnvironment):
    """One tool, made by the constructor from a function that takes the environment."""

    def __init__(self, make: Callable[[Shelf], Callable[..., Any]]) -> None:
        server = FastMCP("shelf")
        self.items: list[str] = []
        server.tool(make(self))
        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()

    def put(self, item: str, count: int = 1) -> str:
        """Put items on the shelf.

        Args:
            item: The item.
            count: How many.
        """
        self.items += [item] * count
        return ", ".join(self.items)

    def call(self, name: str, **arguments: Any) -> Any:
        return self.tools.call_blocking(ToolRequest(name, arguments)).data

    def schema(self) -> dict[str, Any]:
        (tool,) = self.tools.list_tools_blocking()
        return tool.input_schema


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions whose docstrings FastMCP reads."""
    names: list[str] = []
    parse = parsing.parse_docstring

    def counting(function: Any) -> Any:
        names.append(function.__name__)
        return parse(function)

    monkeypatch.setattr(parsing, "parse_docstring", counting)
    return names


def closure(shelf: Shelf) -> Callable[..., Any]:
    def put(item: str) -> str:
        """Put an item on the shelf."""
        shelf.items.append(item)
        return ", ".join(shelf.items)

    return put


@pytest.mark.parametrize("make", [closure, lambda shelf: shelf.put], ids=["closure", "method"])
def test_the_second_environment_is_not_described_again_and_has_its_own_items(
    parses: list[str], make: Callable[[Shelf], Callable[..., Any]]
) -> None:
    Shelf(make).close()  # from the first environment on, descriptions are shared
    first = Shelf(make)
    del parses[:]
    second = Shelf(make)
    assert parses == []
    assert first.call("put", item="a") == "a"
    assert second.call("put", item="b") == "b"
    assert first.schema() == second.schema()
    assert first.schema()["properties"]["item"]["type"] == "string"


def test_a_changed_schema_does_not_reach_other_environments() -> None:
    first, second = Shelf(closure), Shelf(closure)
    tool = first.tools._of_server.local_tools()[0]
    tool.parameters["properties"]["item"]["description"] = "changed"
    assert "changed" not in str(second.schema())
    assert "changed" not in str(Shelf(closure).schema())


def test_functions_with_other_defaults_names_texts_or_types_have_their_own_description() -> None:
    def with_default(count: int) -> Callable[[Shelf], Callable[..., Any]]:
        def make(shelf: Shelf) -> Callable[..., Any]:
            def put(count: int = count) -> int:
                return count

            return put

        return make

    def with_type(kind: Any, text: str) -> Callable[[Shelf], Callable[..., Any]]:
        def make(shelf: Shelf) -> Callable[..., Any]:
            def put(item):  # type: ignore[no-untyped-def]
                return item

            put.__annotations__["item"] = kind
            put.__doc__ = text
            return put

        return make

    defaults = [Shelf(with_default(count)).schema()["properties"]["count"]["default"] for count in (1, 2, 1)]
    assert defaults == [1, 2, 1]
    kinds = (int, str, Annotated[int, Field(ge=3)], Annotated[int, Field(ge=4)], list[int])
    schemas = [Shelf(with_type(kind, "")).schema()["properties"]["item"] for kind in (*kinds, *kinds)]
    assert schemas[:5] == schemas[5:]
    assert [schema.get("type") for schema in schemas[:5]] == ["integer", "string", "integer", "integer", "array"]
    assert [schema.get("minimum") for schema in schemas[2:4]] == [3, 4]
    texts = [Shelf(with_type(int, text)).tools.list_tools_blocking()[0].description for text in ("a", "b")]
    assert texts == ["a", "b"]


def test_a_tool_that_takes_the_context_is_called_with_its_own() -> None:
    def make(shelf: Shelf) -> Callable[..., Any]:
        async def put(item: str, ctx: Context) -> str:
            shelf.items.append(f"{item} in {ctx.fastmcp.name}")
            return ", ".join(shelf.items)

        return put

    shelves = [Shelf(make) for _ in range(3)]
    for number, shelf in enumerate(shelves):
        assert set(shelf.schema()["properties"]) == {"item"}
        assert shelf.call("put", item=str(number)) == f"{number} in shelf"


def test_a_closed_environment_is_not_kept_by_its_description() -> None:
    for make in (closure, lambda shelf: shelf.put):
        for _ in range(3):
            shelf = Shelf(make)
            reference = weakref.ref(shelf)
            shelf.close()
            del shelf
        gc.collect()
        assert reference() is None
