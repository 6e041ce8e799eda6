"""Rollouts are easy to read: tools with results, search, outline, neighbours, copies, curves, checks, episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Case, CommandResult, RolloutStore, Task, case_check
from openenv.rollout.store.store import STEPS_FILE
from openenv.rollout.tasks.task import BranchPoint
from openenv.rollout.viewer.rollout_routes import viewer_app
from servers import Serve
from stored_rollouts import PIXEL, PROGRAM, SQUARE, SYSTEM, Talk, add_square, rollout_outcome

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect

LONG = "\n".join(f"line {number} of the output" for number in range(20_000))


def add_talk(store: RolloutStore, rollout_id: str, *, turns: int, output: str = "done") -> None:
    """Store a rollout whose agent calls a tool in each turn."""
    talk = Talk(store.captures / rollout_id, rollout_id)
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Work."}]
    prompt = [1, 2]
    for number in range(turns):
        arguments = {"path": f"f{number}.py", "content": PROGRAM}
        said, prompt = talk.call(messages, prompt, f"Turn {number}.", calls=[("write", arguments)])
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": f"{output} {number}"}
        messages, prompt = [*messages, said, result], [*prompt, 5]
    store.add(rollout_outcome(rollout_id), SQUARE)


def test_a_tool_call_has_line_breaks_and_its_result_beside_it(
    store: RolloutStore, open_page: Callable[..., Any]
) -> None:
    add_talk(store, "talk", turns=3)
    page = open_page("/web/#rollouts/talk", viewport={"width": 1440, "height": 900})
    first = page.locator(".turn").first
    use = first.locator(".tool-use")
    expect(use.locator(".called h5")).to_have_text("write")
    expect(use.locator(".called pre")).to_have_text(PROGRAM)
    expect(use.locator(".returned")).to_contain_text("done 0")
    call, result = (use.locator(name).bounding_box() for name in (".called", ".returned"))
    assert result["x"] >= call["x"] + call["width"]
    # It is not shown a second time, as a message of the next turn.
    expect(page.get_by_text("done 0", exact=True)).to_have_count(1)
    expect(page.locator(".turn").nth(1).locator(".message")).to_have_count(1)


def test_search_finds_what_is_cut_and_what_is_not_drawn_yet(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    add_talk(store, "long", turns=90, output="é" + "x\n" * 200 + "NEEDLE")
    page = open_page("/web/#rollouts/long")
    expect(page.locator(".turn").first).to_be_visible()
    assert page.locator(".turn").count() < 90
    page.keyboard.press("/")
    page.keyboard.type("needle 77")
    expect(page.locator(".search [role=status]")).to_have_text("1 of 1, turn 78")
    page.wait_for_function("() => [...(CSS.highlights.get('found') ?? [])].some((range) => `${range}` === 'NEEDLE 77')")
    assert page.evaluate("""() => {
        const [range] = CSS.highlights.get("found");
        const {top, bottom} = range.getBoundingClientRect();
        return top > 0 && bottom < innerHeight;
    }""")
    page.get_by_role("searchbox").last.fill("needle")
    expect(page.locator(".search [role=status]")).to_have_text("1 of 89, turn 1")
    page.keyboard.press("Enter")
    expect(page.locator(".search [role=status]")).to_have_text("2 of 89, turn 2")
    page.get_by_role("button", name="Previous hit").click()
    expect(page.locator(".search [role=status]")).to_have_text("1 of 89, turn 1")


@pytest.mark.slow
def test_the_outline_has_turns_and_keys_go_through_them(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    add_talk(store, "long", turns=60)
    page = open_page("/web/#rollouts/long")
    entries = page.locator(".outline button")
    expect(entries).to_have_count(60)
    expect(entries.nth(54)).to_have_text("55write")
    entries.nth(54).click()
    expect(page.locator("#turn-long-55")).to_be_in_viewport()
    expect(page.locator("#turn-long-55 h3")).to_have_text("Turn 55")
    expect(entries.nth(54)).to_have_attribute("aria-current", "true")
    page.keyboard.press("j")
    expect(page.locator("#turn-long-56")).to_be_focused()
    page.keyboard.press("k")
    expect(page.locator("#turn-long-55")).to_be_focused()


@pytest.mark.slow
def test_the_rollouts_before_and_after_are_those_of_the_list(
    store: RolloutStore, open_page: Callable[..., Any]
) -> None:
    for number in range(6):
        store.add(rollout_outcome(f"r{number}", task_id=f"task-{number % 2}"), SQUARE)
    page = open_page("/web/#rollouts?task=task-0&order=oldest")
    page.locator(".virtual-row a").first.click()
    expect(page.locator(".rollout-head")).to_contain_text("r0")
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    page.get_by_role("link", name="Next").click()
    expect(page.locator(".rollout-head")).to_contain_text("r2")
    page.get_by_role("tab", name="Task").click()
    expect(page.get_by_role("link", name="Next")).to_be_visible()
    page.keyboard.press("n")
    expect(page.locator(".rollout-head")).to_contain_text("r4")
    assert page.url.endswith("#rollouts/r4/task")
    expect(page.get_by_role("link", name="Previous")).to_be_visible()
    page.keyboard.press("p")
    expect(page.locator(".rollout-head")).to_contain_text("r2")
    page.get_by_text("← All rollouts").click()
    expect(page.get_by_text("3 rollouts")).to_be_visible()
    assert "task=task-0" in page.url


@pytest.mark.slow
def test_turns_are_copied_shown_as_json_and_printed_whole(
    store: RolloutStore, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    add_square(store, "whole", folder=tmp_path)
    page = open_page("/web/#rollouts/whole", permissions=["clipboard-read", "clipboard-write"])
    turn = page.locator(".turn").nth(1)
    turn.get_by_role("button", name="Copy turn 2").click()
    expect(turn.get_by_text("Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "return n * n" in copied
    assert "[result] written\nwritten" in copied
    turn.get_by_text("JSON of the model call").click()
    expect(turn.locator(".of-json pre")).to_contain_text('"finish_reason": "tool_calls"')
    page.get_by_role("tab", name="JSON").click()
    expect(page.get_by_role("tabpanel", name="JSON")).to_contain_text("rollout_idwhole")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download JSON").click()
    assert json.loads(Path(download.value.path()).read_text())["outcome"]["rollout_id"] == "whole"
    page.get_by_role("tab", name="Transcript").click()
    page.evaluate("window.print = () => dispatchEvent(new Event('beforeprint'))")
    page.get_by_role("button", name="Print").click()
    expect(turn.get_by_text("The user wants a square.", exact=True)).to_be_visible()
    page.emulate_media(media="print")
    expect(page.locator(".outline")).to_be_hidden()
    expect(page.locator(".turn").last).to_be_visible()


def test_the_list_has_instructions_and_the_pass_rate_of_all(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    for number in range(5):
        reward = None if number == 4 else float(number == 0)
        store.add(rollout_outcome(f"r{number}", task_id=f"task-{number}", reward=reward), SQUARE)
    page = open_page()
    expect(page.locator(".virtual-space .virtual-row").first).to_contain_text("Its function square(n) returns")
    expect(page.locator(".figures")).to_contain_text("Pass rate 25.0 %")
    expect(page.locator(".figures")).to_contain_text("1 of 4")
    expect(page.locator(".figures")).to_contain_text("1 without a reward")


@pytest.mark.slow
def test_learning_curves_have_a_line_for_each_environment(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    for number in range(24):
        version, environment = number // 4, ("chess", "go")[number % 2]
        about = {"environment": environment, "policy_version": version, "group": f"g{version}"}
        reward = float(environment == "chess" and version > 2)
        store.add(rollout_outcome(f"r{number:02}", reward=reward, metadata=about), SQUARE)
    page = open_page()
    page.get_by_text("Learning curves", exact=True).click()
    curves = page.locator(".curves")
    expect(curves.locator(".curve-line")).to_have_count(1)
    curves.get_by_label("Lines").select_option("environment")
    curves.get_by_label("Axis").select_option("policy_version")
    expect(curves.locator(".legend li")).to_have_text(["chess 100 %", "go 0 %"])
    expect(curves.locator(".curve-spot")).to_have_count(12)
    label = curves.locator("svg").get_attribute("aria-label")
    assert label == "Pass rate by policy version. chess: from 0 % to 100 %; go: from 0 % to 0 %"
    curves.get_by_label("Measure").select_option("mean")
    expect(curves.locator(".legend li").first).to_have_text("chess 1.000")
    curves.get_by_label("Lines").select_option("group")
    expect(curves.locator(".legend li")).to_have_count(6)
    curves.get_by_text("Values").click()
    expect(curves.locator("tbody tr")).to_have_count(6)


@pytest.mark.slow
def test_an_empty_store_says_what_to_do_and_shows_the_first_rollout(
    tmp_path: Path, serve: Serve, visit: Callable[..., Any]
) -> None:
    page = visit(serve(viewer_app({"none": tmp_path / "none"})).url).page()
    expect(page.get_by_role("heading", name="No rollouts yet")).to_be_visible()
    expect(page.get_by_text("openenv rollouts run")).to_be_visible()
    with RolloutStore(tmp_path / "none") as store:
        store.add(rollout_outcome("first"), SQUARE)
    expect(page.locator(".virtual-space .virtual-row")).to_have_count(1)


def test_a_check_has_its_authors_name_with_expected_and_actual_output(
    store: RolloutStore, open_page: Callable[..., Any]
) -> None:
    check = case_check("./square", (Case(stdin="3", stdout="9\n"), Case(stdin="4", stdout="16\n")))
    said = "case 2: unexpected output\n  expected: 16\n  actual:   8\n1 of 2 cases are right\n"
    results = [CommandResult(cmd=check.judge, exit_code=1, stdout=said, name=str(check))]
    store.add(rollout_outcome("one", verify_results=results), SQUARE.model_copy(update={"verify": (check,)}))
    page = open_page("/web/#rollouts/one/checks")
    expect(page.locator(".check-command")).to_have_text("./square: 2 cases")
    expect(page.locator(".cases thead")).to_contain_text("1 of 2 cases failed")
    cells = page.locator(".cases tbody td")
    assert [text.strip() for text in cells.all_text_contents()] == ["4", "16", "8"]


@pytest.mark.slow
def test_a_played_episode_has_pictures_rewards_and_its_environment(
    store: RolloutStore, open_page: Callable[..., Any]
) -> None:
    task = Task(task_id="seed-3", instruction="Reach the goal.")
    store.begin("played", task, about={"agent": "play", "model": "tiny"})
    rows = [
        {"kind": "reset", "n": 0, "arguments": {"seed": 3}, "observation": {"view": PIXEL, "text": "Begin."}},
        {
            "kind": "step",
            "n": 1,
            "action": {"move": "up"},
            "observation": {"view": PIXEL},
            "reward": 0.5,
            "done": False,
        },
        {"kind": "step", "n": 2, "action": {"move": "on"}, "observation": {"view": PIXEL}, "reward": 1.0, "done": True},
    ]
    store.live_file("played", STEPS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    talk = Talk(store.captures / "played", "played")
    said, ids = talk.call([{"role": "user", "content": "Begin."}], [1], "up", tools=())
    talk.call([{"role": "user", "content": "Begin."}, said, {"role": "user", "content": "On."}], ids, "on", tools=())
    about = {"environment": "maze", "policy_version": 4, "turn_rewards": {"1": 0.5, "2": 1.0}}
    outcome = rollout_outcome(
        "played", task_id="seed-3", agent="play", reward=1.5, metadata=about, verify_results=[], setup_results=[]
    )
    store.add(outcome, task)
    page = open_page("/web/#rollouts/played")
    expect(page.locator(".rollout-head")).to_contain_text("maze")
    expect(page.locator(".turn .badge")).to_have_text(["reward +0.5", "reward +1"])
    expect(page.locator(".outline-reward")).to_have_text(["+0.5", "+1"])
    page.get_by_role("tab", name="Episode").click()
    replay = page.locator(".replay")
    expect(replay.locator("img").first).to_be_visible()
    replay.get_by_role("button", name="One step on").click()
    expect(replay).to_contain_text("reward +0.5 · total 0.5")
    expect(page.locator(".plot-bar")).not_to_have_count(0)


@pytest.mark.slow
def test_a_long_output_is_cut_and_shown_on_request(store: RolloutStore, open_page: Callable[..., Any]) -> None:
    add_talk(store, "loud", turns=2, output=LONG)
    page = open_page("/web/#rollouts/loud")
    result = page.locator(".returned").first
    expect(result).to_contain_text("line 0 of the output")
    assert len(result.inner_text()) < 5000
    result.get_by_role("button", name="Show all").click()
    expect(result).to_contain_text("line 7000 of the output")
    expect(result).to_contain_text("more characters are in exports only")


@pytest.mark.slow
def test_the_tree_of_branches_is_drawn_and_leads_to_each(
    store: RolloutStore, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    add_square(store, "root", folder=tmp_path)
    for number in range(3):
        start = BranchPoint("root", 2 + number // 2)
        store.add(rollout_outcome(f"branch{number}", reward=float(number), start=start), SQUARE)
    store.add(rollout_outcome("leaf", start=BranchPoint("branch1", 4)), SQUARE)
    page = open_page("/web/#rollouts/root")
    turn = page.locator(".turn").nth(1)
    expect(turn.locator("a.badge")).to_have_text("2 branches")
    turn.locator("a.badge").click()
    expect(page.get_by_role("tab", name="Branches (4)")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".rollout-tree .tree-line")).to_have_count(5)
    expect(page.locator(".branch-list a")).to_have_text(["root", "branch0", "branch1", "leaf", "branch2"])
    page.locator(".branch-list a", has_text="leaf").click()
    expect(page.locator(".rollout-head")).to_contain_text("leaf")
    page.get_by_role("tab", name="Branches (4)").click()
    expect(page.locator('.branch-list a[aria-current="page"]')).to_have_text("leaf")
