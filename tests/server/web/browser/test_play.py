"""Playing: resets and steps, the views of observations, rewards, history, and the same call in Python."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image
from pydantic import Field

from environments import Idle
from openenv import Action, Environment, Observation, State

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect


def png(width: int = 20, height: int = 10) -> bytes:
    """A picture."""
    target = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(target, "PNG")
    return target.getvalue()


class Show(Action):
    what: Literal["words", "lines", "data", "bytes", "pixels", "board", "rows", "numbers", "deep"]
    reward: float = 0.0
    done: bool = False


class Seen(Observation):
    view: Any = None
    count: int = 0


VIEWS: dict[str, Callable[[], Any]] = {
    "words": lambda: (
        "A long sentence that says what happened in the episode so far, and what could be done about it now."
    ),
    "lines": lambda: "first line\nsecond line",
    "data": lambda: "data:image/png;base64," + base64.b64encode(png()).decode(),
    "bytes": lambda: base64.urlsafe_b64encode(png(300, 200)).decode(),
    "pixels": lambda: [[[x * 8, y * 8, 0] for x in range(24)] for y in range(16)],
    "board": lambda: [[0, 1, 2], [2, 0, 1], [1, 2, 0]],
    "rows": lambda: ["#..#", "#.G#", "####"],
    "numbers": lambda: [0.25, -1.5, None, 3.0],
    "deep": lambda: {"a": {"b": [1, {"c": "found"}]}},
}


class Stage(Idle):
    """Shows what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seed: int | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, size: int = 8, hard: bool = False, **kwargs: Any
    ) -> Seen:
        if size > 100:
            raise ValueError("no stage is as large as that")
        self.count, self.seed = 0, seed
        return Seen(view=f"seed {seed}, size {size}, hard {hard}")

    def step(self, action: Show, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.count += 1
        return Seen(view=VIEWS[action.what](), count=self.count, reward=action.reward, done=action.done)

    @property
    def state(self) -> State:
        return State(episode_id="a-stage", step_count=self.count, secret_seed=self.seed)


@pytest.fixture
def page(site: Callable[..., Any], visit: Callable[..., Any]) -> Any:
    """The page of the stage, with an episode."""
    page = visit(site(Stage, Show, Seen).url).page()
    page.get_by_role("button", name="Start an episode").click()
    expect(page.locator(".seen")).to_contain_text("size 8, hard False")
    return page


def show(page: Any, what: str, *, reward: float = 0.0, done: bool = False) -> None:
    """Step, and wait for the answer."""
    action = page.locator(".action")
    before = page.locator(".badges .badge").first.text_content()
    label = what if action.locator("[data-field=what] select").count() == 0 else None
    if label is None:
        action.locator("[data-field=what] select").select_option(label=what)
    else:
        action.get_by_label(what, exact=True).check(force=True)
    action.get_by_label("Reward").fill(str(reward))
    action.get_by_label("Done").set_checked(done)
    action.get_by_role("button", name="Step").click()
    expect(page.locator(".badges .badge").first).to_have_text(f"step {int(before.split()[1]) + 1}")


def test_a_stranger_sees_what_the_environment_is_before_anything_was_done(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(Stage, Show, Seen, env_name="stage_env").url).page()
    expect(page).to_have_title("OpenEnv Agentic Environment: stage_env")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Stage")
    expect(page.locator(".head")).to_contain_text("no session")
    expect(page.get_by_text("No episode yet")).to_be_visible()
    expect(page.get_by_role("button", name="Start an episode")).to_be_visible()


def test_a_reset_takes_a_seed_and_what_the_environment_accepts(page: Any) -> None:
    page.get_by_role("button", name="Seed and options").click()
    panel = page.locator("#reset-panel")
    panel.get_by_label("Seed", exact=True).fill("7")
    panel.get_by_label("Size").fill("5")
    panel.get_by_label("Hard").check()
    panel.get_by_role("button", name="Reset with these").click()
    expect(page.locator(".seen")).to_contain_text("seed 7, size 5, hard True")
    expect(page.locator(".reset-summary")).to_contain_text("seed 7")
    expect(page.locator(".python").first).to_contain_text("env.reset(seed=7, size=5, hard=True)")
    panel.get_by_label("Size").fill("1000")
    panel.get_by_role("button", name="Reset with these").click()
    expect(page.locator(".notice")).to_contain_text("no stage is as large as that")
    expect(page.locator(".notice")).to_contain_text("EXECUTION_ERROR")
    panel.get_by_role("button", name="Clear").click()
    page.locator(".controls").get_by_role("button", name="Reset", exact=True).click()
    expect(page.locator(".seen")).to_contain_text("size 8, hard False")
    expect(page.locator(".notice")).to_have_count(0)


def test_each_kind_of_value_has_its_view(page: Any) -> None:
    seen = page.locator(".seen")
    show(page, "words")
    expect(seen.locator("p.text")).to_contain_text("A long sentence")
    show(page, "lines")
    expect(seen.locator("pre.text")).to_have_text("first line\nsecond line")
    for what, width in (("data", 20), ("bytes", 300)):
        show(page, what)
        expect(seen.locator("img")).to_be_visible()
        page.wait_for_function("width => document.querySelector('.seen img')?.naturalWidth === width", arg=width)
    show(page, "pixels")
    expect(seen.locator("canvas")).to_have_attribute("width", "24")
    colour = seen.locator("canvas").evaluate("canvas => [...canvas.getContext('2d').getImageData(3, 2, 1, 1).data]")
    assert colour == [24, 16, 0, 255]
    show(page, "board")
    expect(seen.locator(".cell")).to_have_text(["", "1", "2", "2", "", "1", "1", "2", ""])
    show(page, "rows")
    expect(seen.locator(".cell[data-kind=wall]")).to_have_count(8)
    show(page, "numbers")
    expect(seen.locator(".numbers li")).to_have_text(["0.25", "−1.5", "–", "3"])
    show(page, "deep")
    expect(seen.locator(".tree")).to_contain_text("found")
    expect(seen.locator(".facts")).to_contain_text("Count")
    seen.get_by_role("button", name="JSON").click()
    expect(seen.locator(".json-view")).to_contain_text("view")


def test_rewards_are_plotted_and_added_up(page: Any) -> None:
    for reward in (1.0, -0.5, 0.25):
        show(page, "words", reward=reward)
    show(page, "words", reward=2.0, done=True)
    expect(page.locator(".badges")).to_contain_text("reward +2")
    expect(page.locator(".badges")).to_contain_text("done")
    plot = page.locator("svg.plot")
    expect(plot).to_have_attribute("aria-label", "Total reward 2.75 after step 4; the last step gave +2")
    assert plot.locator(".plot-line").get_attribute("d").count("L") == 3
    assert plot.locator(".plot-bar:not(.is-negative)").get_attribute("d").count("M") == 3
    assert plot.locator(".plot-bar.is-negative").get_attribute("d").count("M") == 1
    plot.hover(position={"x": 60, "y": 40})
    expect(page.locator(".readout")).to_contain_text("Step 1")
    expect(page.locator(".latest li")).to_have_count(4)
    expect(page.locator(".rewards")).to_contain_text("total 2.75")


def test_the_state_is_shown_when_it_is_asked_for_and_follows_the_episode(page: Any) -> None:
    page.locator(".state summary").click()
    expect(page.locator(".state")).to_contain_text("secret_seed")
    expect(page.locator(".state")).to_contain_text("step_count0")
    show(page, "words")
    expect(page.locator(".state")).to_contain_text("step_count1")


def test_the_history_can_be_filtered_looked_into_used_again_and_kept(page: Any) -> None:
    show(page, "words", reward=1.0)
    show(page, "board", reward=-2.0)
    show(page, "lines")
    page.get_by_role("tab", name="History").click()
    rows = page.locator("tbody tr[data-kind=step]")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("lines")
    page.get_by_label("Filter the history").fill("board")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("−2")
    rows.first.locator("button").click()
    expect(page.locator(".details .cell")).to_have_count(9)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSON").click()
    kept = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert [entry["action"]["what"] for entry in kept["log"]] == ["words", "board", "lines"]
    assert kept["total_reward"] == -1.0
    page.get_by_role("button", name="Use this action again").click()
    expect(page.get_by_role("tab", name="Play")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".action").get_by_label("Reward")).to_have_value("-2")


def test_a_failing_step_says_why_and_the_form_keeps_its_content(page: Any) -> None:
    show(page, "words", reward=3.0)
    page.locator(".action").get_by_role("button", name="JSON").click()
    page.locator(".action").get_by_label("Value as JSON").fill('{"what": "nothing"}')
    page.locator(".action").get_by_role("button", name="Step").click()
    expect(page.locator(".action .form > .field-error")).to_contain_text("what")
    expect(page.locator(".action").get_by_label("Value as JSON")).to_have_value('{"what": "nothing"}')
    expect(page.locator(".badges")).to_contain_text("step 1")


def test_the_same_call_in_python_follows_the_form_and_runs(page: Any) -> None:
    action = page.locator(".action")
    action.locator("[data-field=what]").get_by_role("combobox").select_option(label="lines")
    action.get_by_label("Reward").fill("0.75")
    action.get_by_label("Done").check()
    source = page.locator(".python code").first
    expect(source).to_contain_text('"what": "lines"')
    expect(source).to_contain_text("True")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.locator(".python button").first
    button.click()
    expect(button).to_contain_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == source.text_content()
    run = subprocess.run([sys.executable, "-c", copied], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.returncode) == ("0.75 True\n", 0), run.stderr


class Guess(Action):
    """A guess."""

    move: Literal["up", "down", "left", "right"]


class Board(Observation):
    place: list[int] = Field(default=[0, 0])


class Drawn(Idle):
    """Draws itself, and offers buttons until the end."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        self.row = 0
        return Board()

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Board:
        self.row += 1 if action.move == "down" else -1
        return Board(place=[self.row, 0], done=self.row >= 3)

    def render_web(self, observation: dict[str, Any]) -> str:
        row = observation["place"][0]
        return f'<svg viewBox="0 0 60 40" width="60" height="40"><text x="5" y="20">row {row}</text></svg>'

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [("↑ go up", {"move": "up"}), ("↓ go down", {"move": "down"})]


def test_an_environment_draws_itself_and_offers_its_own_buttons(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(Drawn, Guess, Board).url).page()
    page.get_by_role("button", name="Start an episode").click()
    picture = page.frame_locator(".frame iframe:last-child").locator("text")

    def shows(row: str) -> None:
        expect(picture).to_have_text(row)
        expect(page.locator(".move").first).to_have_attribute("aria-disabled", "false")  # the next key counts

    shows("row 0")
    page.get_by_role("button", name="go down").click()
    shows("row 1")
    page.keyboard.press("ArrowDown")
    shows("row 2")
    page.keyboard.press("1")
    shows("row 1")
    expect(page.locator(".frame iframe")).to_have_count(1)
    page.keyboard.press("2")
    shows("row 2")
    page.keyboard.press("2")
    expect(page.locator(".badges")).to_contain_text("done")
    expect(page.locator(".over")).to_contain_text("Episode over")
    expect(page.locator(".move").first).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("1")
    expect(page.locator(".latest li").first).to_contain_text("down")
    page.locator(".views").get_by_text("Fields").click()
    expect(page.locator(".views")).to_contain_text("Place")


def test_an_action_that_is_one_choice_has_buttons_of_its_own(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    class Plain(Drawn):
        render_web = Environment.render_web
        web_actions = Environment.web_actions

    page = visit(site(Plain, Guess, Board).url).page()
    page.get_by_role("button", name="Start an episode").click()
    expect(page.locator(".move span")).to_have_text(["up", "down", "left", "right"])
    page.locator(".move").nth(1).click()
    expect(page.locator(".badges")).to_contain_text("step 1")
    expect(page.locator(".numbers li")).to_have_text(["1", "0"])


class Say(Action):
    message: str


class Reply(Observation):
    response: str = ""


class Talker(Idle):
    """Answers."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Reply:
        return Reply(response="Hello, who are you?")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Reply:
        return Reply(response=f"You said: {action.message}", reward=0.5, done=action.message == "bye")


def test_an_environment_that_takes_a_message_is_talked_to(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(site(Talker, Say, Reply).url).page()
    page.get_by_role("button", name="Start an episode").click()
    chat = page.locator(".chat")
    expect(chat.locator(".bubble")).to_contain_text(["Hello, who are you?"])
    line = chat.get_by_label("Message")
    line.fill("good day")
    line.press("Enter")
    expect(chat.locator(".bubble.is-me")).to_contain_text(["good day"])
    expect(chat.locator(".bubble.is-env").last).to_contain_text("You said: good day")
    expect(chat.locator(".bubble.is-env").last).to_contain_text("reward +0.5")
    expect(line).to_have_value("")
    line.press_sequentially("two")
    line.press("Shift+Enter")
    line.press_sequentially("lines")
    line.press("Enter")
    expect(chat.locator(".bubble.is-env").last).to_contain_text("You said: two\nlines")
    line.fill("bye")
    chat.get_by_role("button", name="Send").click()
    expect(page.locator(".badges")).to_contain_text("done")
