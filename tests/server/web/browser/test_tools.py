"""Tools: a form for each, their results, and what is seen of a call that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from fastmcp import Context, FastMCP

from environments import Tools
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.types import Observation

pytestmark = pytest.mark.slow

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect

GATES: dict[str, threading.Event] = {}


class Workshop(Tools):
    """Three tools."""

    def __init__(self) -> None:
        tools = FastMCP("workshop")

        @tools.tool
        def add(one: int, other: int = 2) -> int:
            """Add two numbers.

            Both are whole.
            """
            return one + other

        @tools.tool
        def break_it(api_key: str = "") -> str:
            """Fail."""
            raise ValueError("it is broken")

        @tools.tool
        async def saw(name: str, ctx: Context) -> list[str]:
            """Take a while, and report how far it is."""
            for done in (1, 2):
                await ctx.report_progress(done, 3, f"cut {done}")
            await anyio.to_thread.run_sync(GATES[name].wait, 60)
            return ["plank", "plank", "rest"]

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"message": "ready"})


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[tuple[str, threading.Event]]:
    """Something that the saw waits for."""
    name = request.node.name
    GATES[name] = threading.Event()
    yield name, GATES[name]
    GATES.pop(name).set()


@pytest.fixture
def page(site: Callable[..., Any], visit: Callable[..., Any]) -> Any:
    """The page of the workshop."""
    return visit(site(Workshop, CallToolAction, CallToolObservation).url).page()


def choose(page: Any, name: str) -> Any:
    """Go to a tool."""
    page.get_by_role("tab", name="Tools").click()
    page.locator(".tool-name", has_text=name).click()
    return page.locator("#panel-tools")


def test_a_tool_is_called_from_its_form_and_shows_its_result(page: Any) -> None:
    panel = choose(page, "add")
    expect(panel.get_by_text("Add two numbers.").first).to_be_visible()
    panel.get_by_label("One").fill("40")
    expect(panel.locator(".python code")).to_contain_text('env.call_tool("add", one=40)')
    panel.get_by_label("Other").fill("3")
    expect(panel.locator(".python code")).to_contain_text('env.call_tool("add", one=40, other=3)')
    panel.get_by_role("button", name="Call").click()
    expect(panel.locator(".result")).to_contain_text("43")
    page.get_by_role("tab", name="History").click()
    expect(page.locator("tr[data-kind=call]")).to_contain_text("add")


def test_a_tool_that_fails_says_why(page: Any) -> None:
    panel = choose(page, "break_it")
    panel.get_by_label("Api key").fill("sk-very-secret")
    expect(panel.get_by_label("Api key")).to_have_attribute("type", "password")
    expect(panel.locator(".python code")).to_contain_text('env.call_tool("break_it", api_key="...")')
    panel.get_by_role("button", name="Call").click()
    expect(panel.locator(".result [role=alert]")).to_contain_text("it is broken")
    panel = choose(page, "add")
    panel.get_by_role("button", name="Call").click()
    expect(panel.locator(".result [role=alert]")).to_be_visible()


def test_a_step_of_an_environment_with_tools_is_a_choice_of_tools(page: Any) -> None:
    action = page.locator(".action")
    action.get_by_label("Tool", exact=True).select_option("add")
    action.get_by_label("One").fill("3")
    action.get_by_label("Other").fill("4")
    expect(page.locator(".python").first).to_contain_text('"tool_name": "add"')
    action.get_by_role("button", name="Step").click()
    expect(page.locator(".seen")).to_contain_text("7")
    expect(page.locator(".latest li").first).to_contain_text("add(one: 3, other: 4)")


def test_a_long_call_shows_how_long_it_takes_and_what_it_reports(page: Any, gate: tuple[str, threading.Event]) -> None:
    name, opened = gate
    panel = choose(page, "saw")
    panel.get_by_label("Name").fill(name)
    panel.get_by_role("button", name="Call").click()
    expect(panel.locator(".working")).to_contain_text("Working")
    expect(panel.locator(".elapsed")).to_contain_text(" s")
    expect(panel.locator(".events li")).to_contain_text(["cut 1", "cut 2"])
    expect(panel.locator("progress")).to_have_js_property("value", 2)
    expect(page.locator(".chip")).to_contain_text("working")
    expect(panel.get_by_role("button", name="Call")).to_have_attribute("aria-disabled", "true")
    opened.set()
    expect(panel.locator(".result")).to_contain_text("plank")
    expect(panel.locator(".working")).to_be_hidden()
    expect(panel.get_by_role("button", name="Call")).to_have_attribute("aria-disabled", "false")


def test_a_long_step_shows_how_long_it_takes_and_what_it_reports(page: Any, gate: tuple[str, threading.Event]) -> None:
    name, opened = gate
    action = page.locator(".action")
    action.get_by_label("Tool", exact=True).select_option("saw")
    action.get_by_label("Name").fill(name)
    action.get_by_role("button", name="Step").click()
    expect(action.locator(".working")).to_be_visible()
    expect(action.locator(".events li")).to_contain_text(["cut 1", "cut 2"])
    page.keyboard.press("Control+Enter")
    opened.set()
    expect(page.locator(".seen")).to_contain_text("plank")
    expect(page.locator(".latest li")).to_have_count(1)
