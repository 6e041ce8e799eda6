"""What an environment sends cannot do anything: it is text, or sits in a frame that is shut in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastmcp import FastMCP
from pydantic import Field

from environments import Idle, Tools
from openenv import Action, Observation, State
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.types import EnvironmentMetadata

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect

ATTACK = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><b id='injected'>bold</b>"
FRAMED = """
<style>p { color: rgb(1, 2, 3); }</style>
<p style="font-size: 20px">own words</p>
<script>parent.hacked = 1; top.location = 'https://example.invalid/';</script>
<img src="x" onerror="parent.hacked = 1">
<form action="https://example.invalid/"><button>send</button></form>
<a href="javascript:parent.hacked=1">script</a>
"""


class Message(Action):
    words: str = ATTACK


class Page(Observation):
    text: str = ""
    rows: list[str] = Field(default_factory=list)
    table: list[list[str]] = Field(default_factory=list)
    html: dict[str, Any] = Field(default_factory=dict)


class Attacker(Idle):
    """Tries everything."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Page:
        return Page(text=ATTACK, rows=[ATTACK, ATTACK + "."], table=[["<b>", "<i>"], ["<b>", "<u>"]])

    def step(self, action: Message, timeout_s: float | None = None, **kwargs: Any) -> Page:
        if action.words == "fail":
            raise ValueError(ATTACK)
        return Page(text=ATTACK, html={ATTACK: [ATTACK]}, metadata={ATTACK: ATTACK})

    @property
    def state(self) -> State:
        return State(episode_id=ATTACK, words=ATTACK)

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [(ATTACK, {"words": ATTACK})]

    def get_metadata(self) -> EnvironmentMetadata:
        readme = (
            f"# Title {ATTACK}\n\n{ATTACK}\n\n[x](javascript:window.hacked=1) ![badge](https://example.invalid/b.svg)"
        )
        return EnvironmentMetadata(name=f"attacker {ATTACK}", description=ATTACK, readme_content=readme, author=ATTACK)


def is_unharmed(page: Any) -> bool:
    """Whether nothing of the attack has become part of the page."""
    return page.evaluate(
        "window.hacked === undefined && document.querySelector('#injected, #app script, #app [onerror]') === null"
    )


def test_what_an_environment_says_is_text_wherever_it_is_shown(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(Attacker, Message, Page).url).page()
    expect(page.locator(".description")).to_have_text(ATTACK)
    page.get_by_role("button", name="Start an episode").click()
    expect(page.locator(".seen")).to_contain_text("onerror")
    page.locator(".state summary").click()
    expect(page.locator(".state")).to_contain_text("onerror")
    page.locator(".move").click()
    expect(page.locator(".badges")).to_contain_text("step")
    expect(page.locator(".latest")).to_contain_text("onerror")
    page.locator(".action [data-field=words]").locator("input, textarea").fill("fail")
    page.locator(".action").get_by_role("button", name="Step").click()
    expect(page.locator(".notice")).to_contain_text("onerror")
    page.locator(".seen").get_by_role("button", name="JSON").click()
    assert is_unharmed(page)
    page.get_by_role("tab", name="History").click()
    page.locator(".log .what").first.click()
    expect(page.locator(".details")).to_contain_text("onerror")
    page.get_by_role("tab", name="About").click()
    expect(page.locator(".readme")).to_contain_text("onerror")
    expect(page.locator(".readme")).to_contain_text("badge")
    expect(page.locator(".readme img")).to_have_count(0)
    expect(page.locator('.readme a[href^="javascript"]')).to_have_count(0)
    assert is_unharmed(page)


class Framer(Attacker):
    """Draws a page of its own."""

    def render_web(self, observation: dict[str, Any]) -> str:
        return FRAMED


def test_the_frame_of_an_environment_is_shut_in(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    visitor = visit(site(Framer, Message, Page).url)
    page = visitor.page()
    page.get_by_role("button", name="Start an episode").click()
    frame = page.frame_locator(".frame iframe:last-child")
    expect(frame.locator("p")).to_have_text("own words")
    expect(frame.locator("p")).to_have_css("font-size", "20px")
    expect(frame.locator("p")).to_have_css("color", "rgb(1, 2, 3)")
    assert page.locator(".frame iframe").get_attribute("sandbox") == "allow-same-origin"  # and no scripts
    frame.locator("button").click()
    frame.locator("a").click()
    visitor.said.clear()  # the browser says that it has blocked the link
    page.locator(".move").click()
    expect(page.locator(".badges")).to_contain_text("step 1")
    assert page.url == visitor.server + "/web/"
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelector('.frame iframe').contentWindow.hacked") is None


class Trickster(Tools):
    """A tool with evil words."""

    def __init__(self) -> None:
        tools = FastMCP("trickster")

        @tools.tool(description=ATTACK)
        def trick(word: str = ATTACK) -> str:
            return ATTACK

        super().__init__(tools)


def test_what_a_tool_says_is_text(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(site(Trickster, CallToolAction, CallToolObservation).url).page()
    page.get_by_role("tab", name="Tools").click()
    expect(page.locator(".tool-about")).to_have_text(ATTACK)
    page.get_by_role("button", name="Call").click()
    expect(page.locator(".result")).to_contain_text("onerror")
    assert is_unharmed(page)
