"""The Episodes tab: what was played stays, can be replayed step by step and compared; sessions can be watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv import GenericEnvClient
from openenv.env.environment import Environment
from openenv.types import Action, Observation, State


class Climb(Action):
    """Go up, or ask for trouble."""

    by: int = 1
    note: str = ""


class Height(Observation):
    """How high one is."""

    height: int = 0
    sign: str = ""


class Tower(Environment[Climb, Height, State]):
    """Five is the top, above six one falls; its picture and its texts are as hostile as its visitors."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Height:
        self._height = seed or 0
        self._state = State(episode_id=episode_id, step_count=0)
        return Height(height=self._height, sign="<img src=x onerror=alert(1)>")

    def step(self, action: Climb, timeout_s: float | None = None, **kwargs: Any) -> Height:
        if action.by > 9:
            raise ValueError("<script>alert(2)</script> is no step")
        self._height += action.by
        self._state.step_count += 1
        is_over = self._height >= 5
        reward = 1.0 if self._height == 5 else -1.0 if is_over else 0.0
        return Height(height=self._height, sign=action.note, reward=reward, done=is_over)

    @property
    def state(self) -> State:
        return self._state

    def render_web(self, observation: dict[str, Any]) -> str:
        return f"<h1>at {observation['height']}</h1><script>parent.alert(3)</script>"


@pytest.fixture
def tower(site: Callable[..., Any], tmp_path: Path) -> Any:
    """A tower that is served, with a folder of its own for episodes."""
    return site(Tower, Climb, Height, record_dir=tmp_path, env_name="tower")


def play(page: Any, *heights: int, seed: int = 0) -> None:
    """Play an episode in the page's session; what fails, fails."""
    page.evaluate(
        """async ([seed, heights]) => {
            const post = (path, body) => fetch(path, {method: "POST", body: JSON.stringify(body)});
            await post("reset", {seed});
            for (const by of heights) await post("step", {action: {by}});
        }""",
        [seed, list(heights)],
    )


def picture(page: Any, number: int = 0) -> Any:
    return page.locator(".replay-shown").nth(number).frame_locator(".frame iframe:last-child").locator("h1")


def test_a_reset_keeps_the_episode_and_its_replay_has_the_pictures(
    tower: Any, visit: Callable[..., Any], browser: Any
) -> None:
    from playwright.sync_api import expect

    page = visit(tower.url).page()
    play(page, 1, 10, 4, seed=0)
    play(page, 2, 9, seed=1)
    page.get_by_role("tab", name="Episodes").click()
    rows = page.locator("table.log tbody tr[data-episode]")
    expect(rows).to_have_count(2)
    expect(rows.nth(0).locator("[data-outcome]")).to_have_attribute("data-outcome", "lost")
    expect(rows.nth(1).locator('[data-outcome="won"]')).to_have_count(1)
    expect(rows.nth(1).locator('[data-outcome="failed"]')).to_contain_text("1 failed")

    rows.nth(1).get_by_role("link").click()
    slider = page.get_by_role("slider", name="Step of the episode")
    expect(picture(page)).to_have_text("at 5")
    slider.press("Home")
    expect(picture(page)).to_have_text("at 0")
    page.get_by_role("button", name="One step on").click()
    expect(picture(page)).to_have_text("at 1")
    assert page.url.endswith("?step=1")

    slider.press("ArrowRight")
    failure = page.locator(".replay-shown .notice.is-error")
    expect(failure).to_contain_text("<script>alert(2)</script> is no step")
    failure.get_by_text("Traceback", exact=True).click()
    expect(failure.locator("pre")).to_contain_text("raise ValueError")

    page.reload()  # an episode and a step have an address
    expect(page.locator(".replay-shown h3").first).to_have_text("Step 2")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download JSONL").click()
    assert download.value.path().read_text().count("\n") >= 6


@pytest.mark.slow
def test_two_episodes_are_compared_step_by_step(tower: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(tower.url).page("/web/#episodes")
    play(page, 1, 1, 3)
    play(page, 1, 2, 2)
    rows = page.locator("table.log tbody tr[data-episode]")
    expect(rows).to_have_count(2)
    for index in range(2):
        rows.nth(index).get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare two").click()
    expect(page.get_by_text("Seeds: both 0.")).to_be_visible()
    expect(page.get_by_text("Actions: they differ from step 2 on.")).to_be_visible()
    expect(page.get_by_role("slider").first).to_have_value("2")
    page.get_by_role("slider").first.press("End")
    expect(picture(page, 0)).to_have_text("at 5")
    expect(picture(page, 1)).to_have_text("at 5")
    expect(page.locator(".curve-dot")).to_have_count(0)
    page.go_back()
    expect(page.locator(".curve-dot")).to_have_count(2)


def test_a_trainer_s_session_is_watched(tower: Any, visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit(tower.url).page("/web/#sessions")
    with GenericEnvClient(tower.url).sync() as env:
        env.reset()
        page.get_by_role("link", name="Watch").click()
        card = page.locator(".watch")
        expect(card).to_contain_text("No actions yet")
        env.step({"by": 2, "note": "<b>on my way</b>"})
        expect(card).to_contain_text("WebSocket client")
        expect(card.frame_locator(".frame iframe:last-child").locator("h1")).to_have_text("at 2")
        env.step({"by": 3})
        expect(card.locator('[data-outcome="won"]')).to_have_count(1)
        expect(card.locator("dd").nth(2)).to_have_text("1")
    expect(card).to_contain_text("The session has ended")


@pytest.mark.slow
def test_episodes_fit_a_phone_in_the_dark(tower: Any, visit: Callable[..., Any]) -> None:
    page = visit(tower.url, viewport={"width": 390, "height": 844}, color_scheme="dark").page()
    play(page, 1, 10, 2, 2)
    for place in ("#episodes", "#sessions"):
        page.goto(f"{tower.url}/web/{place}")
        page.locator("table.log tbody tr:visible").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.goto(f"{tower.url}/web/#episodes")
    page.locator("tr[data-episode] a").click()
    page.locator(".replay-shown").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
