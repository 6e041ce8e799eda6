"""The viewer in a real browser: lists, transcripts, tokens, files, checks, live rollouts, hostile texts, everybody."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from environments import Idle, Tools
from openenv import Action, Observation
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.rollout import RolloutStore
from openenv.rollout.capture.records import FILE, Recorder
from openenv.rollout.progress import Progress
from openenv.rollout.viewer.rollout_routes import viewer_app
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.web.web_page import add_page
from servers import Serve
from stored_rollouts import SQUARE, Talk, add_square, fill_store, rollout_outcome

pytestmark = pytest.mark.slow

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect
HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>\u202e\x1b[2J</pre>[x](javascript:alert(1))'
)


def test_the_list_is_filtered_counted_and_leads_to_a_rollout(
    store: RolloutStore, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    for number in range(12):
        store.add(rollout_outcome(f"r{number:02}", task_id=f"task-{number % 3}", reward=float(number % 2)), SQUARE)
    add_square(store, "whole", folder=tmp_path)
    page = open_page()
    rows = page.locator(".virtual-space .virtual-row")
    expect(page.get_by_text("13 rollouts")).to_be_visible()
    expect(rows.first).to_contain_text("square")
    page.get_by_label("Task", exact=True).fill("task-1")
    expect(page.get_by_text("4 rollouts")).to_be_visible()
    assert "task=task-1" in page.url
    page.get_by_text("Pass rates", exact=True).click()
    expect(page.locator(".stats tbody tr").first).to_contain_text("50.0 %")
    page.get_by_role("button", name="Clear", exact=True).click()
    expect(page.get_by_text("13 rollouts")).to_be_visible()
    page.get_by_label("Status").select_option("truncated")
    expect(page.get_by_text("No rollouts match the filters")).to_be_visible()
    page.get_by_role("button", name="Clear the filters").click()
    rows.first.get_by_role("link").click()
    expect(page.get_by_role("heading", name="square")).to_be_visible()
    assert "#rollouts/whole" in page.url
    page.get_by_text("← All rollouts").click()
    expect(page.get_by_text("13 rollouts")).to_be_visible()


def test_a_rollout_is_read_as_a_transcript_with_coloured_tokens(
    store: RolloutStore, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    add_square(store, "whole", folder=tmp_path)
    page = open_page("/web/#rollouts/whole")
    turns = page.locator(".turn")
    expect(turns).to_have_count(5)
    expect(turns.nth(1)).to_contain_text("I will write it.")
    expect(turns.nth(2).locator(".badge")).to_have_text("retry")
    expect(turns.nth(1).locator(".called")).to_contain_text("return n * n")
    assert turns.nth(3).locator("img").evaluate("image => image.complete && image.naturalWidth") == 1
    turns.nth(1).get_by_text("Tokens, coloured").click()
    tokens = turns.nth(1).locator(".tokens .token")
    expect(tokens).to_have_count(21)
    assert "p-0" in tokens.nth(0).get_attribute("class")
    assert "p-3" in tokens.nth(2).get_attribute("class")
    assert "is-masked" not in tokens.nth(0).get_attribute("class")
    turns.nth(2).get_by_text("Tokens, coloured").click()
    expect(turns.nth(2).locator(".tokens .token.is-masked")).to_have_count(3)
    turns.nth(1).locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(turns.nth(1).locator(".token-readout")).to_contain_text("id 2000")
    expect(page.locator(".branches .branch-node")).to_have_count(5)
    page.locator(".outline button").nth(4).click()
    expect(turns.nth(4)).to_be_in_viewport()


def test_files_checks_time_and_task_have_tabs_with_addresses(
    store: RolloutStore, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    add_square(store, "whole", folder=tmp_path)
    store.add_verification(rollout_outcome("whole", reward=0.25), SQUARE, verdict="strict")
    page = open_page("/web/#rollouts/whole/files")
    expect(page.locator('.diff-line[data-mark="added"]').first).to_contain_text("new")
    expect(page.get_by_text("2 added, 1 changed, 1 removed")).to_be_visible()
    page.get_by_role("tab", name="Checks (3)").click()
    assert page.url.endswith("#rollouts/whole/checks")
    expect(page.get_by_text("not passed: no test passed")).to_be_visible()
    expect(page.get_by_text("AssertionError", exact=True)).to_be_visible()
    expect(page.locator(".verdict")).to_have_count(2)
    page.get_by_role("tab", name="Time and log").click()
    expect(page.locator(".phase")).to_have_count(5)
    expect(page.get_by_text("I end")).to_be_visible()
    page.get_by_role("tab", name="Task").click()
    expect(page.get_by_role("tabpanel", name="Task").get_by_text("Its function square(n)")).to_be_visible()
    page.reload()
    expect(page.get_by_role("tab", name="Task")).to_have_attribute("aria-selected", "true")


def test_two_rollouts_are_compared(store: RolloutStore, open_page: Callable[..., Any], tmp_path: Path) -> None:
    add_square(store, "one", folder=tmp_path)
    add_square(store, "two", folder=tmp_path, note="Another end.", reward=1.0)
    page = open_page()
    for name in ("one", "two"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare two").click()
    expect(page.locator(".differs")).not_to_have_count(0)
    sides = page.locator(".side-by-side > section")
    expect(sides.nth(0)).to_contain_text("Done.")
    expect(sides.nth(1)).to_contain_text("Another end.")
    assert re.search(r"#rollouts/\w+/with/\w+$", page.url)


def test_a_running_rollout_is_followed_to_its_end(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    store.begin("live", SQUARE, about={"agent": "opencode", "model": "tiny"})
    page = open_page()
    page.locator(".running-one").click()
    head = page.locator(".rollout-head")
    expect(head).to_contain_text("running")
    event = Progress(rollout_id="live", phase="agent", message="starting opencode", elapsed_s=1.0)
    Recorder(store.captures / "live" / FILE).event(event)
    expect(head).to_contain_text("running: agent")
    talk = Talk(store.captures / "live", "live")
    message, ids = talk.call([{"role": "user", "content": "go"}], [1], "first words")
    expect(page.locator(".turn")).to_contain_text(["first words"])
    talk.call([{"role": "user", "content": "go"}, message, {"role": "user", "content": "on"}], [*ids, 2], "second")
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("tab", name="Time and log").click()
    store.live_file("live", "agent.log").write_text("printed by the agent\n")
    expect(page.get_by_text("printed by the agent")).to_be_visible()
    store.add(rollout_outcome("live", reward=1.0), SQUARE)
    expect(head).to_contain_text("Reward")
    expect(page.get_by_role("tab", name="Checks (3)")).to_be_visible()


def test_hostile_content_is_shown_and_never_run(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    talk = Talk(store.captures / "evil", "evil")
    calls = [(HOSTILE, {"path": HOSTILE})]
    talk.call([{"role": HOSTILE, "content": HOSTILE}], [1], HOSTILE, reasoning=HOSTILE, calls=calls)
    checks = [{"cmd": HOSTILE, "exit_code": 1, "stdout": HOSTILE, "stderr": HOSTILE, "note": HOSTILE}]
    outcome = rollout_outcome(
        "evil",
        task_id=HOSTILE,
        agent=HOSTILE,
        model=HOSTILE,
        reason=HOSTILE,
        verify_results=checks,
        status="policy_failed",
    )
    store.add(outcome, SQUARE.model_copy(update={"instruction": HOSTILE, "files": {HOSTILE: HOSTILE}}))
    page = open_page()
    expect(page.locator(".virtual-space .virtual-row").first).to_contain_text("<img src=x")
    page.get_by_text("Pass rates", exact=True).click()
    expect(page.locator(".stats tbody tr").first).to_contain_text("<img src=x")
    for part in ("", "/files", "/checks", "/timeline", "/task"):
        page.goto(page.url.split("#")[0] + f"#rollouts/evil{part}")
        expect(page.get_by_role("tabpanel")).to_be_visible()
        page.wait_for_timeout(200)
    page.goto(page.url.split("#")[0] + "#rollouts/evil")
    page.get_by_text("Tokens, coloured").click()
    expect(page.locator(".tokens")).to_contain_text("<script>")
    expect(page.locator(".odd").first).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#app img, #app script").count() == 0


def test_a_hundred_thousand_rollouts_are_scrolled_and_filtered(
    tmp_path: Path, serve: Serve, visit: Callable[..., Any]
) -> None:
    fill_store(tmp_path / "many", 100_000)
    with RolloutStore(tmp_path / "many") as store:
        assert store.count() == 100_000
    page = visit(serve(viewer_app({"many": tmp_path / "many"})).url).page()
    expect(page.get_by_text("100,000 rollouts")).to_be_visible()
    assert page.locator(".virtual-space .virtual-row").count() < 100
    grid = page.get_by_role("grid")
    grid.focus()
    page.keyboard.press("End")
    expect(page.locator(".virtual-row.is-active")).to_contain_text("00000000")
    expect(page.locator(".virtual-row.is-active")).to_have_attribute("aria-rowindex", "100001")
    page.get_by_label("Task", exact=True).fill("task-007")
    expect(page.get_by_text("500 rollouts")).to_be_visible()
    grid.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="task-007")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_for_everybody(
    store: RolloutStore,
    open_page: Callable[..., Any],
    tmp_path: Path,
    axe_findings: Callable[..., Any],
    scheme: str,
    width: int,
) -> None:
    add_square(store, "one", folder=tmp_path)
    add_square(store, "two", folder=tmp_path, task_id="averyveryverylongword" * 12)
    store.begin("live", SQUARE, about={"agent": "opencode"})
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 844})
    problems: dict[str, list[str]] = {}
    for part in ("", "/one", "/one/files", "/one/checks", "/one/timeline", "/one/task", "/one/with/two", "/live"):
        page.goto(page.url.split("#")[0] + f"#rollouts{part}")
        page.wait_for_timeout(600)
        for _ in range(2):  # what is folded inside of what is folded, too
            page.evaluate("document.querySelectorAll('#app details').forEach(each => { each.open = true; })")
            page.wait_for_timeout(400)
        problems[part] = axe_findings(page)
        if page.evaluate("document.documentElement.scrollWidth") > width:
            problems[part].append("wider than the window")
    assert {part: found for part, found in problems.items() if found} == {}


def test_a_token_is_asked_for(store: RolloutStore, serve: Serve, visit: Callable[..., Any]) -> None:
    store.add(rollout_outcome("one"), SQUARE)
    server = serve(viewer_app({"store": store.root}, AccessPolicy(orchestrator="secret")))
    page = visit(server.url).page()
    page.get_by_label("Token").fill("secret")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_text("1 rollout", exact=True)).to_be_visible()
    other = visit(server.url).page("/web/#token=secret")
    expect(other.get_by_text("1 rollout", exact=True)).to_be_visible()


def test_a_server_that_runs_rollouts_has_a_tab_for_them(
    store: RolloutStore, serve: Serve, visit: Callable[..., Any], tmp_path: Path
) -> None:
    add_square(store, "whole", folder=tmp_path)
    app = create_app(Idle, Action, Observation, env_name="test_env", rollout_store=store.root)
    add_page(app, app.state.openenv_page_arguments)
    server = serve(app)
    page = visit(server.url).page()
    page.get_by_role("tab", name="Rollouts").click()
    expect(page.get_by_text("1 rollout", exact=True)).to_be_visible()
    page.locator(".virtual-row a").click()
    expect(page.locator(".turn")).to_have_count(5)
    address = page.url
    page.get_by_role("tab", name="Sessions").click()
    assert "#rollouts" not in page.url
    again = visit(server.url).page("/web/" + address[address.index("#") :])
    expect(again.locator(".turn")).to_have_count(5)


class RolloutTool(Tools):
    """Has a tool that returns a rollout which was run before."""

    TOOLS = ("run_rollout",)

    def run_rollout(
        self,
        instruction: Annotated[
            str, Field(description="What to do", json_schema_extra={"x-openenv-required": True})
        ] = "",
        verify: list[str] = [],  # noqa: B006 - never changed
    ) -> str:
        """Run a rollout."""
        return json.dumps({"rollout_id": "whole", "task_id": f"{instruction} {verify}"})


def test_a_tool_that_runs_a_rollout_has_a_form_with_help_and_shows_the_rollout(
    store: RolloutStore, serve: Serve, visit: Callable[..., Any], tmp_path: Path
) -> None:
    add_square(store, "whole", folder=tmp_path)
    app = create_app(RolloutTool, CallToolAction, CallToolObservation, rollout_store=store.root)
    add_page(app, app.state.openenv_page_arguments)
    page = visit(serve(app).url).page("/web/#tools")
    panel = page.get_by_role("tabpanel", name="Tools")
    expect(panel.get_by_text("What to do")).to_be_visible()
    expect(panel.locator('[data-field="instruction"] .required')).to_be_visible()
    panel.get_by_role("button", name="Call").click()
    expect(panel.get_by_text("Enter a value.")).to_be_visible()
    panel.locator('[data-field="instruction"] textarea').fill("Square it")
    expect(panel.get_by_text("Enter a value.")).to_be_hidden()
    expect(panel.locator(".python code")).to_contain_text("Square it")
    panel.get_by_role("button", name="Call").click()
    expect(panel.locator(".result .turn")).to_have_count(5)
    panel.get_by_role("link", name="Open it in Rollouts").click()
    expect(page.get_by_role("tab", name="Rollouts")).to_have_attribute("aria-selected", "true")
