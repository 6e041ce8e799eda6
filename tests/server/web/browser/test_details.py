"""What a new visitor notices: keys, one primary button, ends that look different, JSON, themes, cancelling."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import Field

from openenv.env.environment import Environment
from openenv.types import Action, Observation, State
from servers import Serve


class Place(Action):
    """Put a symbol somewhere."""

    cell: int = 0
    symbol: str = "X"
    names: list[str] = Field(default_factory=list)
    slow: bool = False


class Board(Observation):
    """A board, in words and cells."""

    steps: int = 0
    board: list[list[str]] = Field(default_factory=list)
    message: str = ""
    score: float = 0.0


class Game(Environment[Place, Board, State]):
    """Ends as the cell says: 1 won, 2 lost, 3 truncated, 4 raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    gate = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self._cells = [" "] * 9
        self._steps = 0

    def _seen(self, message: str, **fields: Any) -> Board:
        rows = [self._cells[at : at + 3] for at in (0, 3, 6)]
        return Board(steps=self._steps, board=rows, message=message, **fields)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        self._cells, self._steps = [" "] * 9, 0
        return self._seen("Your move.")

    def step(self, action: Place, timeout_s: float | None = None, **kwargs: Any) -> Board:
        raise AssertionError("the server prefers the coroutine")

    async def step_async(self, action: Place, timeout_s: float | None = None, **kwargs: Any) -> Board:
        if action.slow:
            await asyncio.Event().wait()
        if action.cell == 4:
            raise ValueError("there is no such cell")
        self._steps += 1
        self._cells[action.cell] = action.symbol
        ends = {1: {"reward": 1.0, "done": True}, 2: {"reward": -1.0, "done": True}}
        ends[3] = {"reward": 0.0, "done": True, "truncated": True}  # type: ignore[dict-item]
        return self._seen(f"names: {json.dumps(action.names)}", **ends.get(action.cell, {"reward": 0.0}))

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


class Themed(Game):
    """Draws for the colours of the page."""

    def render_web(self, observation: dict[str, Any], theme: str = "unknown") -> str:
        return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 90 20'><text y='15'>{theme}</text></svg>"


@pytest.fixture(scope="module")
def game(serve_once: Serve) -> Any:
    """A game that is served."""
    from openenv.server.app import create_app
    from openenv.server.web.web_page import attach_web

    app = create_app(Game, Place, Board, env_name="game", max_concurrent_envs=16)
    attach_web(app)
    return serve_once(app)


def primary(page: Any) -> list[str]:
    """Return the texts of the primary buttons that can be seen."""
    return [text.split("\n")[0].strip() for text in page.locator("button.primary:visible").all_inner_texts()]


def begin(page: Any) -> None:
    page.get_by_role("button", name="Start an episode").click()
    page.locator(".observation").get_by_text("Your move.").wait_for()


def cell(page: Any, number: int) -> None:
    page.get_by_label("Cell").fill(str(number))
    page.get_by_label("Cell").press("Enter")  # submits


def test_one_button_is_primary_and_enter_submits(game: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(game.url).page()
    assert primary(page) == ["Start an episode"]
    begin(page)
    expect(page.locator("button.primary:visible")).to_have_count(1)
    assert primary(page)[0].startswith("Step")
    cell(page, 1)
    expect(page.locator(".over")).to_have_attribute("data-outcome", "won")
    expect(page.locator(".chip")).to_contain_text("episode over")
    expect(page.locator("button.primary:visible").first).to_contain_text("Reset")


@pytest.mark.parametrize(("number", "kind"), [(1, "won"), (2, "lost"), (3, "truncated")])
@pytest.mark.slow_but_for("2-lost")
def test_ends_look_different(game: Any, visit: Callable[..., Any], number: int, kind: str) -> None:
    from playwright.sync_api import expect

    page = visit(game.url).page()
    begin(page)
    cell(page, number)
    expect(page.locator(f'.badges [data-outcome="{kind}"]')).to_be_visible()
    expect(page.locator(".over")).to_have_attribute("data-outcome", kind)


def test_the_pill_says_what_the_notice_says(game: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(game.url).page()
    begin(page)
    cell(page, 4)
    expect(page.locator(".notice.is-error")).to_contain_text("no such cell")
    expect(page.locator(".chip")).to_contain_text("step failed")
    cell(page, 0)
    expect(page.locator(".chip")).to_contain_text("session ready")


def test_a_slow_step_can_be_cancelled_and_the_episode_goes_on(game: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(game.url).page()
    begin(page)
    page.get_by_label("Slow").check()
    cell(page, 0)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".notice")).to_contain_text("Cancelled")
    page.get_by_label("Slow").uncheck()
    cell(page, 0)
    expect(page.locator(".badges")).to_contain_text("step 1")


@pytest.mark.slow
def test_fields_keep_their_order_and_the_text_is_large(game: Any, visit: Callable[..., Any]) -> None:
    page = visit(game.url).page()
    begin(page)
    shown = page.locator(".views > *")
    kinds = shown.evaluate_all("nodes => nodes.map(n => n.querySelector('h3, dt')?.textContent)")
    assert kinds == ["Steps", "Board", "Message", "Score"]
    sizes = page.evaluate(
        """() => [".part.is-main .text", ".facts dd"].map(
            (one) => Number.parseFloat(getComputedStyle(document.querySelector(one)).fontSize))"""
    )
    assert sizes[0] > sizes[1]


@pytest.mark.slow
def test_json_is_json_and_can_be_copied(game: Any, visit: Callable[..., Any]) -> None:
    visitor = visit(game.url, permissions=["clipboard-read", "clipboard-write"])
    page = visitor.page()
    begin(page)
    page.locator(".seen").get_by_role("button", name="JSON").click()
    shown = json.loads(page.locator(".json-view code").inner_text())
    assert (shown["message"], shown["steps"]) == ("Your move.", 0)
    page.locator(".json-view button").click()
    page.get_by_text("Copied").wait_for()
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == shown


@pytest.mark.slow
def test_a_symbol_keeps_its_colour_whatever_else_is_on_the_board(game: Any, visit: Callable[..., Any]) -> None:
    page = visit(game.url).page()
    begin(page)

    def put(number: int, symbol: str, steps: int) -> None:
        page.get_by_label("Symbol").fill(symbol)
        cell(page, number)
        page.locator(".badges").get_by_text(f"step {steps}").wait_for()

    def colours() -> dict[str, str]:
        cells = page.locator(".cell").evaluate_all("cells => cells.map(c => [c.textContent, c.dataset.kind])")
        return {text: kind for text, kind in cells if text}

    put(8, "X", 1)
    before = colours()["X"]
    put(0, "O", 2)  # comes first on the board now
    assert colours()["X"] == before
    assert colours()["O"] != before


@pytest.mark.slow
def test_lists_hold_no_blank_lines(game: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(game.url).page()
    begin(page)
    names = page.locator('[data-field="names"]')
    for _ in range(3):
        names.get_by_role("button", name="Add").click()
    names.get_by_role("textbox").nth(1).fill("Ada")
    page.get_by_role("button", name="Step").click()
    expect(page.locator(".observation")).to_contain_text('names: ["Ada"]')


def test_the_picture_gets_the_theme_and_the_switch_is_kept(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(site(Themed, Place, Board).url, color_scheme="light").page()
    picture = page.frame_locator(".frame iframe:last-child").locator("text")
    page.get_by_role("button", name="Start an episode").click()
    expect(picture).to_have_text("light")
    page.get_by_role("button", name="Switch to dark colours").click()
    page.keyboard.press("r")
    expect(picture).to_have_text("dark")
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    expect(page.locator(".plate")).to_contain_text("OpenEnv")
    expect(page.get_by_role("link", name="API docs")).to_have_attribute("href", "../docs")


@pytest.mark.slow
def test_every_tab_has_an_address(game: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(game.url).page()
    for name in ("History", "Episodes", "Sessions", "About", "Play"):
        page.get_by_role("tab", name=name).click()
        assert page.url.endswith(f"#{name.lower()}")
    page.go_back()
    expect(page.get_by_role("tab", name="About")).to_have_attribute("aria-selected", "true")
    page.reload()
    expect(page.get_by_role("tab", name="About")).to_have_attribute("aria-selected", "true")
