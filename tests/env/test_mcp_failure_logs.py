"""A tool that raises is in the log with its traceback; one that refuses on purpose is not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastmcp import Context
from fastmcp.exceptions import ToolError

LOGGER = "openenv.env.tools.tool_registry"


def breaks(key: str) -> int:
    """Raise by mistake."""
    return {"a": 1}[key]


async def breaks_async(key: str) -> int:
    """Do the same asynchronously."""
    return {"a": 1}[key]


async def breaks_with_context(key: str, ctx: Context) -> int:
    """Do the same with a context."""
    return {"a": 1}[key]


def refuses(key: str) -> int:
    """Refuse, with a message for the agent."""
    raise ToolError(f"there is no {key}")


@pytest.mark.parametrize("tool", ["breaks", "breaks_async", "breaks_with_context"])
def test_a_tool_that_raises_is_logged_with_its_traceback(
    make_env: Any, call: Any, tool: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(breaks, breaks_async, breaks_with_context)
    with caplog.at_level(logging.INFO, LOGGER):
        kind, message = call.failure(env, tool, key="b")
    assert kind == "execution_error"
    assert "KeyError: 'b'" in message
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.getMessage() == f"the tool {tool} failed"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


def test_what_a_tool_says_on_purpose_is_not_logged(make_env: Any, call: Any, caplog: pytest.LogCaptureFixture) -> None:
    env = make_env(refuses)
    with caplog.at_level(logging.INFO, LOGGER):
        assert "there is no b" in call.failure(env, "refuses", key="b")[1]
    assert [record for record in caplog.records if record.name == LOGGER] == []
