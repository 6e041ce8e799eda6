"""Sessions: whose is whose, what happens when one is lost, and when the server is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

import http_calls
from environments import Add, Sum, Tally
from openenv.server.app import create_app
from openenv.server.web.web_page import attach_web
from servers import Serve

pytestmark = pytest.mark.slow

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect


def begin(page: Any) -> None:
    """Start an episode."""
    page.get_by_role("button", name="Start an episode").click()
    expect(page.locator(".badges")).to_contain_text("step 0")


def add(page: Any, amount: int) -> None:
    """Step."""
    page.locator(".action").get_by_label("Amount").fill(str(amount))
    page.locator(".action").get_by_role("button", name="Step").click()


def total(page: Any) -> Any:
    """Where the sum is shown."""
    return page.locator(".seen .facts dd").first


def test_two_visitors_have_two_sessions(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    server = site(Tally, Add, Sum)
    one, other = visit(server.url).page(), visit(server.url).page()
    begin(one)
    begin(other)
    add(one, 5)
    add(other, 70)
    expect(total(one)).to_have_text("5")
    expect(total(other)).to_have_text("70")
    assert server.manager.active == 2


def test_two_tabs_of_one_visitor_see_the_same(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    server = site(Tally, Add, Sum)
    visitor = visit(server.url)
    one, other = visitor.page(), visitor.page()
    begin(one)
    expect(total(other)).to_have_text("0")
    add(other, 9)
    expect(total(one)).to_have_text("9")
    expect(one.locator(".latest li")).to_have_count(1)
    late = visitor.page()
    expect(total(late)).to_have_text("9")
    expect(late.locator(".badges")).to_contain_text("step 1")
    assert server.manager.active == 1


def test_a_lost_session_is_reported_and_a_reset_begins_a_new_one(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = site(Tally, Add, Sum)
    page = visit(server.url).page()
    begin(page)
    add(page, 4)
    expect(total(page)).to_have_text("4")
    [session] = http_calls.get(f"{server.url}/web/sessions").json()["sessions"]
    http_calls.delete(f"{server.url}/web/sessions/{session['session_id']}")
    notice = page.locator(".notice")
    expect(notice).to_contain_text("The session is lost: ended by an operator")
    expect(page.locator(".chip")).to_have_text("session lost")
    expect(total(page)).to_have_text("4")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".action").get_by_role("button", name="Step")).to_have_attribute("aria-disabled", "true")
    notice.get_by_role("button", name="Reset").click()
    expect(total(page)).to_have_text("0")
    expect(notice).to_have_count(0)
    add(page, 2)
    expect(total(page)).to_have_text("2")


def test_a_visitor_ends_the_session_and_the_episode_stays_to_be_seen(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = site(Tally, Add, Sum)
    page = visit(server.url).page()
    begin(page)
    add(page, 4)
    expect(total(page)).to_have_text("4")
    page.get_by_role("button", name="End session").click()
    expect(page.locator(".chip")).to_have_text("session ended")
    server.wait_for(lambda: server.manager.active == 0)
    expect(total(page)).to_have_text("4")
    expect(page.locator(".notice")).to_have_count(0)
    add(page, 3)
    expect(total(page)).to_have_text("3")
    expect(page.locator(".badges")).to_contain_text("step 1")
    expect(page.locator(".latest li")).to_have_count(1)


def test_an_unreachable_server_is_reported_and_found_again(
    serve: Serve, visit: Callable[..., Any], free_port: Callable[[], int]
) -> None:
    def app() -> Any:
        made = create_app(Tally, Add, Sum, env_name="counter", max_concurrent_envs=4)
        attach_web(made)
        return made

    port = free_port()
    first = serve(app(), port=port)
    page = visit(first.url).page()
    begin(page)
    add(page, 6)
    expect(total(page)).to_have_text("6")
    first.server.should_exit = True
    expect(page.locator("#connection")).to_contain_text("Connection lost, trying again")
    page.locator(".action").get_by_label("Amount").fill("11")
    expect(total(page)).to_have_text("6")
    first.wait_for(lambda: not _answers(first.url))
    serve(app(), port=port)
    expect(page.locator("#connection")).to_be_hidden()
    expect(page.locator(".notice").first).to_contain_text("The session is lost")
    expect(total(page)).to_have_text("6")
    expect(page.locator(".action").get_by_label("Amount")).to_have_value("11")
    page.locator(".notice").get_by_role("button", name="Reset").click()
    expect(total(page)).to_have_text("0")
    add(page, 11)
    expect(total(page)).to_have_text("11")


def _answers(url: str) -> bool:
    try:
        httpx2.get(url + "/health", timeout=1)
    except httpx2.TransportError:
        return False
    return True


def test_a_full_server_says_so(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    from openenv import GenericEnvClient

    server = site(Tally, Add, Sum, max_concurrent_envs=1)
    with GenericEnvClient(server.url).sync() as trainer:
        trainer.reset()
        page = visit(server.url).page()
        page.get_by_role("button", name="Start an episode").click()
        expect(page.locator(".notice")).to_contain_text("CAPACITY_REACHED")
        expect(page.get_by_text("No episode yet")).to_be_visible()
        trainer.step({"amount": 1})
    server.wait_for(lambda: server.manager.active == 0)
    page.get_by_role("button", name="Start an episode").click()
    expect(total(page)).to_have_text("0")


def test_operators_see_all_sessions_and_end_one_after_a_second_thought(
    site: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    server = site(Tally, Add, Sum)
    player, operator = visit(server.url).page(), visit(server.url).page()
    begin(player)
    begin(operator)
    add(player, 1)
    expect(total(player)).to_have_text("1")
    operator.get_by_role("tab", name="Sessions").click()
    panel = operator.locator("#panel-sessions")
    expect(panel).to_contain_text("2 of 8 in use")
    expect(panel.locator("tbody tr")).to_have_count(2)
    theirs = panel.locator("tbody tr", has_not_text="yours")
    expect(theirs).to_have_count(1)
    theirs.get_by_role("button").click()
    theirs.get_by_role("button", name="End this session?").click()
    expect(panel.locator("tbody tr")).to_have_count(1)
    expect(panel.locator("tbody tr")).to_contain_text("yours")
    expect(player.locator(".notice")).to_contain_text("ended by an operator")


MANY_STEPS = """async (count) => {
    const options = {method: "POST", headers: {"Content-Type": "application/json"}, body: '{"action": {"amount": 1}}'};
    const step = () => fetch("step", options).then(answer => answer.json()).then(reply => reply.observation.total);
    let total = 0;
    while (total < count) {  // a request may fail when a network appears or goes
        const steps = Array.from({length: Math.min(20, count - total)}, () => step().catch(() => 0));
        total = Math.max(total, ...await Promise.all(steps));
    }
}"""


@pytest.mark.slow
def test_a_thousand_steps_leave_the_page_small_and_quick(site: Callable[..., Any], visit: Callable[..., Any]) -> None:
    server = site(Tally, Add, Sum)
    visitor = visit(server.url)
    page = visitor.page()
    begin(page)
    page.evaluate(MANY_STEPS, 1100)
    expect(total(page)).to_have_text("1100")
    expect(page.locator(".badges")).to_contain_text("step 1100")
    page.get_by_role("tab", name="History").click()
    expect(page.locator("#panel-history")).to_contain_text("1000 entries, the newest of 1100")
    expect(page.locator("#panel-history tbody tr")).to_have_count(100)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator("#panel-history tbody tr")).to_have_count(200)
    assert page.evaluate("document.querySelectorAll('*').length") < 3500
    page.get_by_role("tab", name="Play").click()
    add(page, 1)
    expect(total(page)).to_have_text("1101")
    expect(page.locator("svg.plot")).to_have_attribute(
        "aria-label", "Total reward 1101 after step 1101; the last step gave +1"
    )
