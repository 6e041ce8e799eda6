"""Tokens: logging in by hand and by address, what an observer may do, and who is not let in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from environments import Idle
from openenv import Action, GenericEnvClient, Observation
from openenv.server.access import AccessPolicy

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect

ACCESS = {"orchestrator": "boss-1", "agent": "agent-1", "observer": "looker-1"}


class Go(Action):
    far: int = 1


class Guarded(Idle):
    """Opens."""

    def step(self, action: Go, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(reward=1.0)


@pytest.fixture
def server(site: Callable[..., Any]) -> Any:
    """A server that asks for a token."""
    return site(Guarded, Go, Observation, access=AccessPolicy(**ACCESS))


def log_in(page: Any, token: str) -> None:
    """Fill in the form."""
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_a_token_is_asked_for_and_a_wrong_one_is_refused(server: Any, visit: Callable[..., Any]) -> None:
    visitor = visit(server.url)
    page = visitor.page()
    expect(page.get_by_role("heading")).to_contain_text("requires a token")
    log_in(page, "nonsense")
    expect(page.get_by_role("alert")).to_contain_text("Unknown token")
    log_in(page, ACCESS["orchestrator"])
    page.get_by_role("button", name="Start an episode").click()
    page.locator(".action").get_by_role("button", name="Step").click()
    expect(page.locator(".badges")).to_contain_text("reward +1")
    expect(page.locator(".python").first).to_contain_text("OPENENV_TOKEN")
    assert all(ACCESS["orchestrator"] not in url for url in visitor.asked)
    page.reload()
    expect(page.locator(".badges")).to_contain_text("reward +1")


def test_an_address_brings_its_token_and_forgets_it(server: Any, visit: Callable[..., Any]) -> None:
    visitor = visit(server.url)
    page = visitor.page(f"/web/#token={ACCESS['orchestrator']}")
    expect(page.get_by_role("button", name="Start an episode")).to_be_visible()
    assert page.url == server.url + "/web/"
    assert all(ACCESS["orchestrator"] not in url for url in visitor.asked)
    other = visit(server.url).page("/web/#token=nonsense")
    expect(other.get_by_role("alert")).to_contain_text("Unknown token")
    assert other.url == server.url + "/web/"


def test_an_observer_looks_on_and_cannot_act(server: Any, visit: Callable[..., Any]) -> None:
    with GenericEnvClient(server.url, token=ACCESS["orchestrator"]).sync() as trainer:
        trainer.reset()
        page = visit(server.url).page(f"/web/#token={ACCESS['observer']}")
        expect(page.get_by_role("tab", name="Sessions")).to_have_attribute("aria-selected", "true")
        expect(page.locator("#panel-sessions tbody tr")).to_have_count(1)
        expect(page.locator("#panel-sessions tbody button")).to_have_count(0)
        expect(page.locator(".controls")).to_contain_text("observer")
        expect(page.get_by_role("button", name="Reset")).to_have_count(0)
        page.get_by_role("tab", name="Play").click()
        expect(page.get_by_text("Your token is read-only")).to_be_visible()
        expect(page.locator(".action").get_by_role("button", name="Step")).to_have_attribute("aria-disabled", "true")
        page.keyboard.press("r")
        page.keyboard.press("Control+Enter")
        refused = page.evaluate("fetch('reset', {method: 'POST', body: '{}'}).then(answer => answer.status)")
        assert refused == 403
        assert server.manager.active == 1


def test_an_agent_is_not_let_in(server: Any, visit: Callable[..., Any]) -> None:
    page = visit(server.url).page()
    log_in(page, ACCESS["agent"])
    expect(page.get_by_role("alert")).to_contain_text("agent")
    expect(page.locator(".tabs")).to_have_count(0)


def test_after_a_logout_the_page_asks_for_a_token_again(server: Any, visit: Callable[..., Any]) -> None:
    page = visit(server.url).page(f"/web/#token={ACCESS['orchestrator']}")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()
