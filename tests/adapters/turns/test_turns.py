"""Configuration, events, names of tools, and what every adapter inherits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError

from openenv.adapters.turns import (
    AgenticHarnessAdapter,
    HarnessConfig,
    HarnessEvent,
    HarnessEventType,
    events_to_metadata,
    resolve_tool_conflicts,
)
from openenv.errors import HarnessError, HarnessTurnTimeoutError, OpenEnvError
from openenv.protocol.tool_messages import Tool

pytestmark = pytest.mark.anyio


class Played(AgenticHarnessAdapter):
    """Yields what it was given."""

    def __init__(self, *items: Any) -> None:
        super().__init__(HarnessConfig(name="played", command=["none"]))
        self.items = items
        self.was_closed = False

    async def start(self, working_directory: str) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    async def inject_tools(self, tools: list[Tool], bridge_url: str | None = None) -> None:
        """Do nothing."""

    async def is_alive(self) -> bool:
        """Always."""
        return True

    async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        """Yield the items."""
        try:
            for item in self.items:
                yield item
        finally:
            self.was_closed = True


def event(kind: str, **data: Any) -> HarnessEvent:
    return HarnessEvent(type=HarnessEventType(kind), data=data)


@pytest.mark.parametrize(
    "fields",
    [
        {"command": []},
        {"command": [""]},
        {"startup_timeout_s": 0},
        {"session_timeout_s": -1},
        {"transport": "pigeon"},
        {"timeout": 3},
    ],
)
def test_a_bad_configuration_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HarnessConfig(**{"name": "a", "command": ["a"], **fields})


async def test_a_turn_is_its_events_and_the_response_of_the_last() -> None:
    adapter = Played(event("text_output", text="hi"), event("turn_complete", response="done", done=True))
    turn = await adapter.send_message("go")
    assert (turn.response, turn.done) == ("done", True)
    assert [each.type.value for each in turn.events] == ["text_output", "turn_complete"]
    assert events_to_metadata(turn.events)[0]["data"] == {"text": "hi"}


async def test_a_turn_ends_with_turn_complete_even_if_the_stream_goes_on() -> None:
    adapter = Played(event("turn_complete", response="r"), event("text_output", text="late"))
    assert len((await adapter.send_message("go")).events) == 1
    assert adapter.was_closed


async def test_a_stream_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(HarnessError, match="without a TURN_COMPLETE"):
        await Played(event("text_output")).send_message("go")


async def test_events_may_be_dicts_and_anything_else_is_an_error() -> None:
    turn = await Played({"type": "turn_complete", "data": {"response": "r"}}).send_message("go")
    assert turn.response == "r"
    adapter = Played("turn_complete")
    with pytest.raises(HarnessError, match="yielded str; yield HarnessEvent"):
        await adapter.send_message("go")
    assert adapter.was_closed


def tool(name: str) -> Tool:
    return Tool(name=name, description="", input_schema={})


def test_tools_that_the_agent_has_itself_get_another_name() -> None:
    tools = resolve_tool_conflicts([tool("add"), tool("bash")], {"bash", "read"})
    assert [each.name for each in tools] == ["add", "env_bash"]


@pytest.mark.parametrize(
    ("names", "builtin", "text"),
    [
        (["bash", "env_bash"], {"bash"}, "env_bash"),
        (["bash"], {"bash", "env_bash"}, "env_bash"),
        (["add", "add"], set(), "Duplicate"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(names: list[str], builtin: set[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_tool_conflicts([tool(name) for name in names], builtin)


def test_errors_of_harnesses_are_errors_of_the_framework() -> None:
    assert issubclass(HarnessError, OpenEnvError)
    assert issubclass(HarnessError, RuntimeError)
    assert issubclass(HarnessTurnTimeoutError, TimeoutError)
