"""The page for everybody: narrow and wide, light and dark, by keyboard, with labels and contrast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import Field

from environments import Idle
from openenv import Action, Observation, State

pytestmark = pytest.mark.slow

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect

LONG = "averyveryverylongword" * 12


class Mixed(Action):
    choice: Literal["one", "two"]
    name: str = LONG
    count: int = 3
    tags: list[str] = Field(default=["a"])


class View(Observation):
    text: str = ""
    board: list[list[int]] = Field(default_factory=list)
    deep: dict[str, Any] = Field(default_factory=dict)


class Room(Idle):
    """Has long words in it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> View:
        self.count = 0
        return self.seen(None)

    def step(self, action: Mixed, timeout_s: float | None = None, **kwargs: Any) -> View:
        self.count += 1
        if action.name == "fail":
            raise ValueError(LONG)
        return self.seen(-1.0 if self.count % 2 else 1.0)

    def seen(self, reward: float | None) -> View:
        board = [[(row + column) % 5 for column in range(30)] for row in range(6)]
        return View(text=LONG + "\n" + LONG, board=board, deep={LONG: [LONG]}, reward=reward)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


TABS = ("Play", "History", "Sessions", "About")


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_sticks_out_of_the_page(width: int, site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(site(Room, Mixed, View).url, viewport={"width": width, "height": 800}).page()
    page.get_by_role("button", name="Seed and options").click()
    page.get_by_role("button", name="Start an episode").click()
    page.locator(".action").get_by_label("one").check(force=True)
    page.locator(".action").get_by_role("button", name="Step").click()
    expect(page.locator(".badges")).to_contain_text("step 1")
    page.locator(".action").get_by_label("Name").fill("fail")
    page.locator(".action").get_by_role("button", name="Step").click()
    expect(page.locator(".notice")).to_be_visible()
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        if tab == "History":
            page.locator(".log .what").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab


def test_the_keyboard_is_enough(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(site(Room, Mixed, View).url).page()
    expect(page.get_by_role("button", name="Start an episode")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("r")
    expect(page.locator(".badges")).to_contain_text("step 0")
    name = page.locator(".action").get_by_label("Name")
    name.fill("r")
    name.press("End")
    name.press("r")
    expect(name).to_have_value("rr")
    page.locator(".action").get_by_label("two").check(force=True)
    name.press("Control+Enter")
    expect(page.locator(".badges")).to_contain_text("step 1")
    page.get_by_role("tab", name="Play").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="History")).to_be_focused()
    expect(page.locator("#panel-history")).to_be_visible()
    page.keyboard.press("End")
    expect(page.locator("#panel-about")).to_be_visible()
    page.keyboard.press("Home")
    expect(page.locator("#panel-play")).to_be_visible()


UNNAMED = """() => {
    const visible = (e) => e.checkVisibility() && !e.closest("[aria-hidden=true]");
    const text = (id) => document.getElementById(id)?.textContent ?? "";
    const inputs = [...document.querySelectorAll("input, select, textarea")].filter(visible);
    const named = (e) => e.labels?.length || e.getAttribute("aria-label") ||
        (e.getAttribute("aria-labelledby") || "").split(" ").some(text);
    const buttons = [...document.querySelectorAll("button, a, summary, [role=tab]")].filter(visible);
    const said = (e) => e.textContent.trim() || e.getAttribute("aria-label");
    const frames = [...document.querySelectorAll("iframe")].filter((e) => !e.title);
    const pictures = [...document.querySelectorAll("img, canvas, svg[role=img]")]
        .filter((e) => visible(e) && !e.getAttribute("alt") && !e.getAttribute("aria-label"));
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    const twice = ids.filter((id, index) => ids.indexOf(id) !== index);
    return [...inputs.filter((e) => !named(e)), ...buttons.filter((e) => !said(e)), ...frames, ...pictures]
        .map((e) => e.outerHTML.slice(0, 200)).concat(twice);
}"""

CONTRAST = """() => {
    const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = (rgb) => {
        const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour.slice(0, 3);
        }
        return [255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.querySelector("#app"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
        if (element.closest(".unseen, [aria-disabled=true], svg, kbd")) continue;
        const [one, other] = [light(parse(getComputedStyle(element).color).slice(0, 3)), light(ground(element))];
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${element.className} ${element.textContent.slice(0, 40)}`);
    }
    return [...new Set(found)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read(
    scheme: str, site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(Room, Mixed, View).url, color_scheme=scheme).page()
    expect(page.get_by_text("No episode yet")).to_be_visible()
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(CONTRAST) == []
    page.get_by_role("button", name="Seed and options").click()
    page.get_by_role("button", name="Start an episode").click()
    action = page.locator(".action")
    action.get_by_role("button", name="Step").click()
    expect(action.locator("[data-field=choice] .field-error")).to_be_visible()
    assert page.evaluate(CONTRAST) == []
    action.get_by_label("two").check(force=True)
    action.get_by_role("button", name="Step").click()
    expect(page.locator(".badges")).to_contain_text("reward −1")
    action.get_by_label("Name").fill("fail")
    action.get_by_role("button", name="Step").click()
    expect(page.locator(".notice")).to_be_visible()
    page.locator(".state summary").click()
    expect(page.locator(".state .tree")).to_be_visible()
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        if tab == "History":
            page.locator(".log .what").first.click()
        if tab == "Sessions":
            expect(page.locator("#panel-sessions tbody tr")).to_have_count(1)
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(CONTRAST) == []
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (dark == "rgb(18, 19, 18)") == (scheme == "dark")
