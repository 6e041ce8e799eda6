"""Environments with tools: their forms' schemas, calls in the visitor's session, and what tools report meanwhile."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
from fastmcp import Context

import environments
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.server.app import create_app
from servers import Serve


class Shelf(environments.Shelf):
    """Counts with progress."""

    TOOLS = ("put", "drop", "count")

    def put(self, item: str, times: int = 1) -> int:
        """Put something onto the shelf."""
        self.items += [item] * times
        return len(self.items)

    async def count(self, ctx: Context) -> int:
        await ctx.report_progress(1, 2, "half")
        await ctx.info("nearly done")
        return len(self.items)


def shelf_app(**kwargs: Any) -> Any:
    from openenv.server.web.web_page import add_page

    app = create_app(Shelf, CallToolAction, CallToolObservation, max_concurrent_envs=32, **kwargs)
    add_page(app)
    return app


@pytest.fixture(scope="module", params=["thread", "process"])
def shelf(serve_once: Serve, request: pytest.FixtureRequest) -> Any:
    """A server whose environment has tools."""
    return serve_once(shelf_app(runner=request.param))


def described_tools(visitor: Any) -> list[dict[str, Any]]:
    """Ask until the environment has answered: the page does not wait for one that starts slowly."""
    for _ in range(10):
        tools: list[dict[str, Any]] | None = visitor.get("/web/page").json()["tools"]
        if tools is not None:
            return tools
    raise AssertionError("the tools were never listed")


def test_the_description_lists_the_tools(shelf: Any, visit: Callable[..., Any]) -> None:
    tools = {tool["name"]: tool for tool in described_tools(visit(shelf.url))}
    assert set(tools) == {"put", "drop", "count"}
    assert tools["put"]["description"] == "Put something onto the shelf."
    assert tools["put"]["input_schema"]["required"] == ["item"]


def test_a_tool_is_called_in_the_visitors_session(shelf: Any, visit: Callable[..., Any]) -> None:
    one, other = visit(shelf.url), visit(shelf.url)
    with one.live() as live:
        live.until("hello")
        put = {"name": "put", "arguments": {"item": "cup", "times": 2}}
        called = one.post("/web/call", put).json()
        assert (called["error"], called["result"]["structuredContent"]) == (None, {"result": 2})
        entry = live.until("call")["entry"]
        assert (entry["name"], entry["arguments"], entry["error"]) == ("put", put["arguments"], None)
        assert entry["duration_ms"] >= 0
        live.until("session", state="ready")
    assert one.get("/web/state").json()["step_count"] == 2
    assert other.post("/web/call", {"name": "count"}).json()["result"]["structuredContent"] == {"result": 0}
    with one.live() as live:
        assert [entry["name"] for entry in live.next()["log"]] == ["put"]


def test_a_tool_that_fails_says_so_and_a_step_calls_tools_as_well(shelf: Any, visit: Callable[..., Any]) -> None:
    browser = visit(shelf.url)
    failed = browser.post("/web/call", {"name": "drop"}).json()
    assert failed["result"] is None
    assert "too high" in failed["error"]["message"]
    unknown = browser.post("/web/call", {"name": "fly"}).json()["error"]
    assert unknown["code"] == "TOOL_NOT_FOUND"
    step = {"action": {"tool_name": "put", "arguments": '{"item": "cup"}', "type": "call_tool"}}
    assert browser.post("/web/step", step).json()["observation"]["tool_name"] == "put"
    for body in ({}, {"name": 5}, {"name": "put", "arguments": [1]}):
        assert browser.post("/web/call", body).status_code == 422


@pytest.mark.parametrize("as_step", [False, True])
def test_what_a_tool_reports_is_shown_while_it_runs(shelf: Any, visit: Callable[..., Any], as_step: bool) -> None:
    browser = visit(shelf.url)
    with browser.live() as live:
        if as_step:
            browser.post("/web/step", {"action": {"tool_name": "count", "arguments": {}}})
        else:
            browser.post("/web/call", {"name": "count"})
        progress, log = live.until("event"), live.until("event")
        live.until("step" if as_step else "call")
    assert progress["data"] == {"event": "progress", "progress": 1, "total": 2, "message": "half"}
    assert (log["data"]["event"], log["data"]["level"]) == ("log", "info")
    assert progress["timestamp"]


def test_an_environment_without_tools_refuses_calls(street: Any, visit: Callable[..., Any]) -> None:
    answer = visit(street.url).post("/web/call", {"name": "put"})
    assert (answer.status_code, answer.json()["code"]) == (404, "NO_TOOLS")


def test_in_production_tools_can_be_called_and_the_quick_start_runs(serve: Serve, visit: Callable[..., Any]) -> None:
    browser = visit(serve(shelf_app(mode="production")).url)
    put = browser.post("/web/call", {"name": "put", "arguments": {"item": "cup"}})
    assert put.json()["result"]["structuredContent"] == {"result": 1}
    assert browser.post("/web/reset").status_code == 404
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(browser.get("/web/page").json()["quick_start"]["text"], "quick_start", "exec"), {})
    assert "put Put something onto the shelf." in output.getvalue()


def test_the_quick_start_of_an_environment_with_tools_runs(shelf: Any, visit: Callable[..., Any]) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(visit(shelf.url).get("/web/page").json()["quick_start"]["text"], "quick_start", "exec"), {})
    assert "put Put something onto the shelf." in output.getvalue()
