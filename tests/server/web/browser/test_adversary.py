"""The page of an environment that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from environments import Idle
from openenv import Action, Observation

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect


class Push(Action):
    force: int = 1


class Gate(Observation):
    text: str = ""


class Stuck(Idle):
    """Hangs in each step until the test ends."""

    gate = threading.Event()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Gate:
        return Gate(text="closed")

    def step(self, action: Push, timeout_s: float | None = None, **kwargs: Any) -> Gate:
        self.gate.wait(60)
        return Gate(text="open")


@pytest.mark.slow
def test_a_session_that_hangs_is_ended_by_its_button(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    server = site(Stuck, Push, Gate)
    page = visit(server.url).page()
    chip, reset = page.locator(".chip"), page.get_by_role("banner").get_by_role("button", name="Reset", exact=True)
    try:
        reset.click()
        expect(chip).to_have_text("session ready")
        page.locator(".action").get_by_role("button", name="Step").click()
        expect(chip).to_contain_text("working")
        page.get_by_role("button", name="End session").click()
        expect(chip).to_have_text("session ended")
        expect(page.locator(".notice")).to_have_count(0)
        reset.click()
        expect(chip).to_have_text("session ready")
    finally:
        Stuck.gate.set()
