"""The page does what a newcomer expects of it: seeds, curves, comparisons, keys, frames and one way to act."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from fastmcp import FastMCP
from pydantic import Field

from environments import Idle, Tools
from openenv import Action, Environment, GenericEnvClient, Observation, State
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class Roll(Action):
    """Guess a die."""

    face: Literal[1, 2, 3, 4, 5, 6]


class Rolled(Observation):
    """The die after a guess."""

    shown: int = 0


class SeededDie(Environment[Roll, Rolled, State]):
    """Guess the die.

    Three guesses are an episode.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, sides: int = 6) -> Rolled:
        self._die = random.Random(seed)
        self._sides = sides
        self._state = State(episode_id=episode_id)
        return Rolled()

    def step(self, action: Roll, timeout_s: float | None = None, **kwargs: Any) -> Rolled:
        self._state.step_count += 1
        shown = self._die.randint(1, self._sides)
        return Rolled(shown=shown, reward=float(shown == action.face), done=self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


class SeedlessDie(SeededDie):
    def reset(self, seed: int | None = None, episode_id: str | None = None, sides: int = 6) -> Rolled:
        if seed is not None:
            raise ValueError("this die takes no seed")
        return super().reset(None, episode_id)


class Tall(Idle):
    """Draws a picture that is higher, and wider, than a phone."""

    def render_web(self, observation: dict[str, Any]) -> str:
        rows = "".join(f"<p>row {number}</p>" for number in range(40))
        return f'<div>{rows}<svg width="900" height="450" viewBox="0 0 900 450"></svg></div>'


@pytest.fixture
def dice(site: Callable[..., Any], tmp_path: Path) -> Any:
    """A die that is served, with a folder of its own for episodes."""
    return site(SeededDie, Roll, Rolled, record_dir=tmp_path)


def play(page: Any, seed: int | None, *faces: int, **options: Any) -> None:
    """Play an episode in the page's session."""
    page.evaluate(
        """async ([options, faces]) => {
            const post = (path, body) => fetch(path, {method: "POST", body: JSON.stringify(body)});
            await post("reset", options);
            for (const face of faces) await post("step", {action: {face}});
        }""",
        [options if seed is None else {"seed": seed, **options}, list(faces)],
    )


def start(page: Any) -> None:
    page.get_by_role("button", name="Start an episode").click()
    page.locator(".badges").get_by_text("step 0").wait_for()


def press(page: Any, key: str) -> None:
    """Press a key once the page takes actions again."""
    expect(page.locator(".move").first).to_have_attribute("aria-disabled", "false")
    page.keyboard.press(key)


def test_the_header_has_the_name_and_the_first_paragraph_of_the_docstring(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(SeededDie, Roll, Rolled, env_name=None).url).page()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Seeded Die")
    expect(page.locator(".description")).to_have_text("Guess the die.")
    metadata = page.evaluate("fetch('../metadata').then((reply) => reply.json())")
    assert metadata["description"] == "Guess the die."


class Spelled(Action):
    word: str = Field(pattern="^[A-F]{4}$", examples=["FADE"])
    other: str = Field(default="", pattern="^[A-F]*$")


class Speller(SeededDie):
    """Spell with `A` to `F`."""


def test_code_in_a_description_is_code_and_a_text_field_has_an_example_or_its_pattern(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(Speller, Spelled, Rolled, env_name=None).url).page()
    expect(page.locator(".description code")).to_have_text(["A", "F"])
    expect(page.locator(".field-help")).to_contain_text(["for example FADE", "matching ^[A-F]*$"])


def test_the_page_draws_a_seed_and_records_it(dice: Any, visit: Callable[..., Any]) -> None:
    page = visit(dice.url).page()
    start(page)
    badge = page.locator(".badges .badge", has_text="seed ")
    seed = int(badge.text_content().removeprefix("seed "))
    expect(page.locator(".python code").first).to_contain_text(f"env.reset(seed={seed})")
    page.get_by_role("button", name="4").first.click()
    page.locator(".badges").get_by_text("step 1").wait_for()
    page.reload()
    expect(badge).to_have_text(f"seed {seed}")
    page.get_by_role("tab", name="Episodes").click()
    expect(page.locator("tr[data-episode]")).to_contain_text(str(seed))
    recorded = page.evaluate(
        """async () => {
            const {episodes} = await fetch("episodes").then((reply) => reply.json());
            return (await fetch(`episodes/${episodes[0].id}`).then((reply) => reply.json())).rows;
        }"""
    )
    assert next(row for row in recorded if row["kind"] == "reset")["arguments"] == {"seed": seed}
    with GenericEnvClient(dice.url).sync() as env:
        env.reset(seed=seed)
        again = env.step({"face": 4})
    assert again.observation["shown"] == next(row for row in recorded if row["kind"] == "step")["observation"]["shown"]


def test_an_environment_that_refuses_seeds_is_reset_without_one(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(site(SeedlessDie, Roll, Rolled).url).page()
    start(page)
    expect(page.locator(".badges .badge")).to_have_text(["step 0"])
    expect(page.locator(".notice")).to_have_count(0)


def test_a_discrete_action_has_buttons_and_no_form(dice: Any, visit: Callable[..., Any]) -> None:
    page = visit(dice.url).page()
    start(page)
    action = page.locator(".action")
    expect(action.locator(".move")).to_have_count(6)
    expect(action.locator(".form, select, textarea, .step")).to_have_count(0)
    expect(action.get_by_role("button", name="JSON")).to_have_count(0)
    press(page, "5")  # the digit on the button, not its place
    expect(page.locator(".latest li").first).to_contain_text("face: 5")
    page.get_by_role("tab", name="History").click()
    page.locator(".log .what").first.click()
    page.get_by_role("button", name="Use this action again").click()
    expect(action.locator(".move").nth(4)).to_be_focused()


def test_the_history_survives_the_key_r_and_every_reset(dice: Any, visit: Callable[..., Any]) -> None:
    page = visit(dice.url).page()
    start(page)
    press(page, "1")
    page.locator(".badges").get_by_text("step 1").wait_for()
    page.get_by_role("tab", name="History").click()
    rows = page.locator("tbody tr[data-kind=step]")
    expect(rows).to_have_count(1)
    page.keyboard.press("r")
    page.get_by_role("tab", name="Play").click()
    expect(page.locator(".badges")).to_contain_text("step 1")  # the key resets only where the episode is seen
    press(page, "r")
    expect(page.locator(".badges")).to_contain_text("step 0")
    press(page, "2")
    expect(page.locator(".badges")).to_contain_text("step 1")
    page.get_by_role("tab", name="History").click()
    expect(rows).to_have_count(2)
    expect(page.locator(".past-episode")).to_contain_text("1 action · total")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSON").click()
    kept = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert [entry["action"]["face"] for entry in kept["log"]] == [2]
    assert [entry["action"]["face"] for entry in kept["earlier_episodes"][0]["log"]] == [1]


def test_key_hints_appear_only_with_a_keyboard(dice: Any, visit: Callable[..., Any]) -> None:
    desk = visit(dice.url).page()
    expect(desk.locator(".move kbd").first).to_be_visible()
    phone = visit(dice.url, **PHONE).page()
    start(phone)
    expect(phone.locator("kbd:visible")).to_have_count(0)
    phone.keyboard.press("ArrowLeft")  # a keyboard was attached
    expect(phone.locator(".move kbd").first).to_be_visible()


def test_the_curve_covers_finished_episodes_and_has_their_mean(dice: Any, visit: Callable[..., Any]) -> None:
    page = visit(dice.url).page()
    returns = []
    for seed in (1, 2):
        die = random.Random(seed)
        returns.append(sum(float(die.randint(1, 6) == 3) for _ in range(3)))
        play(page, seed, 3, 3, 3)
    play(page, 3, 3)  # cut off by the next reset
    play(page, 4, 3)  # still running
    page.get_by_role("tab", name="Episodes").click()
    expect(page.locator("tr[data-episode]")).to_have_count(4)
    expect(page.locator(".curve-dot")).to_have_count(2)
    mean = sum(returns) / 2
    expect(page.locator(".curve-summary")).to_have_text(
        f"2 finished episodes, mean return {mean:g}; 2 unfinished not counted"
    )
    expect(page.locator(".curve-mean")).to_have_count(1)


def test_statuses_are_right_while_episodes_run(dice: Any, visit: Callable[..., Any]) -> None:
    page = visit(dice.url).page()
    play(page, 1, 3, 3, 3)
    play(page, 2, 3)
    page.get_by_role("tab", name="Episodes").click()
    ends = page.locator("tr[data-episode] [data-outcome]")
    expect(ends.nth(0)).to_have_text("running")
    expect(ends.nth(1)).to_contain_text("done")
    play(page, 3, 1)
    expect(ends.nth(0)).to_have_text("running")
    expect(ends.nth(1)).to_have_text("reset before its end")
    page.get_by_role("button", name="End session").click()
    expect(ends.nth(0)).not_to_have_text("running")


def test_compared_episodes_say_what_differs(dice: Any, visit: Callable[..., Any]) -> None:
    page = visit(dice.url).page()
    play(page, 5, 1, 2, 3)
    play(page, 5, 1, 2, 4)
    play(page, 6, 1, 2, 3)
    play(page, 5, 1, 2, 3, sides=4)
    play(page, 5, 1, 2, 3)
    page.get_by_role("tab", name="Episodes").click()
    rows = page.locator("tr[data-episode]")
    expect(rows).to_have_count(5)
    first, second, third, fourth, fifth = reversed(rows.evaluate_all("rows => rows.map(row => row.dataset.episode)"))
    lines = page.locator(".compared li")

    def compare(one: str, other: str) -> list[str]:
        page.goto(f"{dice.url}/web/#episodes/{one}/with/{other}")
        expect(page.locator(".side-by-side h2").nth(1)).to_have_text(other)
        return list(lines.all_text_contents())

    assert compare(first, fifth) == ["Seeds: both 5.", "Actions: the same.", "Results: the same."]
    seeds, actions, *_ = compare(first, second)
    assert (seeds, actions) == ("Seeds: both 5.", "Actions: they differ from step 3 on.")
    page.get_by_role("button", name="To the start").first.click()
    page.get_by_role("button", name="Go to the first difference").click()
    expect(page.locator(".replay-shown h3")).to_have_text(["Step 3", "Step 3"])
    seeds, actions, results = compare(first, third)
    assert (seeds, actions) == ("Seeds: 5 and 6.", "Actions: the same.")
    assert results.startswith("Results: they differ from ")
    assert "Reset: sides not given and 4." in compare(first, fourth)


@pytest.mark.parametrize("look", [{}, PHONE], ids=["desk", "phone"])
def test_a_frame_is_as_high_as_its_content(
    site: Callable[..., Any], visit: Callable[..., Any], look: dict[str, Any]
) -> None:
    page = visit(site(Tall, Action, Observation).url, **look).page()
    page.get_by_role("button", name="Start an episode").click()
    frame = page.frame_locator(".frame iframe:last-child")
    expect(frame.locator("p").last).to_have_text("row 39")
    page.wait_for_function(
        """() => {
            const frame = document.querySelector(".frame iframe");
            const root = frame.contentDocument.documentElement;
            return root.scrollHeight <= frame.clientHeight && root.scrollWidth <= frame.clientWidth
                && frame.clientHeight - root.getBoundingClientRect().height < 2;
        }"""
    )


RESULT = {
    "rollout_id": "",
    "status": "ok",
    "reward": 0.5,
    "trust": "judged",
    "model": "tiny",
    "wall_s": 3.5,
    "verify_results": [
        {"cmd": "test -e out.txt", "exit_code": 0, "stdout": "", "stderr": "", "duration_s": 0.1, "trust": "judged"},
        {"cmd": "grep -q 9 out.txt", "exit_code": 1, "stdout": "", "stderr": "8 is not 9", "duration_s": 0.1},
    ],
    "proxy_turns": [{}, {}],
    "files": {"out.txt": "8\n"},
    "agent_log_tail": "I wrote 8.",
}


class Roller(Tools):
    """Has a tool like the one of opencode_env."""

    def __init__(self) -> None:
        tools = FastMCP("roller")

        @tools.tool
        def run_rollout(instruction: str = "") -> str:
            return json.dumps(RESULT)

        super().__init__(tools)


@pytest.mark.parametrize("tab", ["Play", "Tools"])
def test_the_result_of_a_rollout_is_shown_as_one(site: Callable[..., Any], visit: Callable[..., Any], tab: str) -> None:
    page = visit(site(Roller, CallToolAction, CallToolObservation).url).page(f"/web/#{tab.lower()}")
    page.get_by_role("tabpanel", name=tab).get_by_role("button", name="Step" if tab == "Play" else "Call").click()
    shown = page.locator(".rollout-result")
    expect(shown).to_contain_text("1 of 2 checks passed · 2 model calls")
    expect(shown.locator(".reward")).to_have_text("0.5")
    expect(shown.locator(".one-check").nth(1)).to_contain_text("8 is not 9")
    shown.get_by_text("Log of the agent").click()
    expect(shown).to_contain_text("I wrote 8.")
