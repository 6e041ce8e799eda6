"""The Browser environment: actions in a real Chromium, the site and its tasks, and the package as a whole."""

from __future__ import annotations

import base64
import http.server
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install playwright")

from browser_env import BrowserAction, BrowserEnv, BrowserObservation, BrowserState
from browser_env.server.app import app
from browser_env.server.browser_environment import BrowserEnvironment
from browser_env.server.chromium import PROGRAMS, Chromium
from browser_env.server.site import HOME, STAFF_PER_PAGE, Site
from browser_env.server.tasks import KINDS, Goal, make_goal
from openenv import LocalEnv
from openenv.errors import ExecutionError, RequestValidationError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]

needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="needs Chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def shared() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process; its browser is started once for all tests."""
    with LocalEnv(BrowserEnvironment).sync() as local:
        yield local


@pytest.fixture
def env(shared: SyncLocalEnv[Any, Any, Any]) -> SyncLocalEnv[Any, Any, Any]:
    """The environment, on the home page of the site of a seed."""
    shared.reset(seed=3, screenshot=False)
    return shared


def do(env: SyncLocalEnv[Any, Any, Any], action: Any, target: str = "", text: str = "") -> Any:
    return env.step(BrowserAction(action=action, target=target, text=text))


def ref(observation: BrowserObservation, name: str) -> str:
    """Find the ref of an element by its role and name, as in the page's text."""
    match = re.search(rf"- {re.escape(name)}(?: \[[^]]*\])*? \[ref=(\w+)\]", observation.text)
    assert match is not None, observation.text
    return match.group(1)


def solve(env: SyncLocalEnv[Any, Any, Any], task_id: str, goal: Goal) -> Any:
    """Do a task as a person would."""
    if goal.answer is not None:
        return do(env, "answer", text=f" {goal.answer}. ")
    assert goal.record is not None
    record = goal.record
    if task_id in ("order", "cheapest"):
        shop = do(env, "click", ref(env.step({"action": "wait"}).observation, 'link "Shop"')).observation
        do(env, "type", ref(shop, f'spinbutton "Quantity of {record["product"]}"'), record["quantity"])
        return do(env, "click", ref(shop, f'button "Order {record["product"]}"'))
    if task_id == "message":
        do(env, "goto", "/contact")
        do(env, "select", "[name=department]", record["department"])
        do(env, "type", "[name=email]", record["email"])
        do(env, "type", "[name=message]", record["message"])
        do(env, "click", "[name=copy]")
        return do(env, "click", "button")
    do(env, "goto", "/settings")
    do(env, "select", "[name=language]", record["language"])
    do(env, "click", "[name=newsletter]")
    return do(env, "press", "button", "Enter")


@needs_browser
def test_pages_are_read_by_their_accessibility_tree_and_elements_by_their_refs(
    env: SyncLocalEnv[Any, Any, Any],
) -> None:
    home = do(env, "wait").observation
    assert (home.url, home.title, home.error) == (HOME, "Welcome - Company", None)
    staff = do(env, "click", ref(home, 'link "Staff"')).observation
    assert staff.url == f"{HOME}staff"
    people = Site(3).people
    assert people[0].phone in staff.text
    assert people[STAFF_PER_PAGE].phone not in staff.text
    following = do(env, "click", ref(staff, 'link "Next page"')).observation
    assert people[STAFF_PER_PAGE].phone in following.text
    assert do(env, "back").observation.text.count("row") == staff.text.count("row")
    assert "page=2" in do(env, "forward").observation.url
    do(env, "type", "[name=q]", people[-1].name)
    found = do(env, "press", text="Enter").observation
    assert people[-1].phone in found.text
    assert people[0].phone not in found.text
    assert env.state().url == found.url


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("task_id", KINDS)
def test_each_kind_of_task_can_be_done(env: SyncLocalEnv[Any, Any, Any], task_id: str) -> None:
    instruction = env.reset(task_id=task_id, seed=4, screenshot=False).observation.instruction
    goal = make_goal(task_id, Site(4), 4)
    assert instruction == goal.instruction
    result = solve(env, task_id, goal)
    assert (result.reward, result.done, result.observation.terminated, result.observation.error) == (
        1.0,
        True,
        True,
        None,
    )
    assert env.state().records == ([] if goal.record is None else [goal.record])
    with pytest.raises(ExecutionError, match="call reset first"):
        do(env, "wait")


@needs_browser
@pytest.mark.slow
def test_a_wrong_order_or_answer_ends_the_task_without_a_reward(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(task_id="order", seed=4, screenshot=False)
    do(env, "goto", "/shop")
    wrong = do(env, "click", "tbody tr:last-child button")
    assert (wrong.reward, wrong.done) == (0.0, True)
    for task_id in ("phone", "order"):
        env.reset(task_id=task_id, seed=4, screenshot=False)
        wrong = do(env, "answer", text="555-0000")
        assert (wrong.reward, wrong.done) == (0.0, True)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "target", "text", "error"),
    [
        ("click", "e999", "", "no element e999"),
        ("click", "#nothing", "", "no element #nothing"),
        ("click", "", "", "needs a target"),
        ("click", "][", "", "]["),
        ("type", "h1", "x", "not an <input>"),
        ("select", "[name=category]", "Boats", "Timeout"),
        ("goto", "http://example.com/", "", "example.com may not be reached, only company.test"),
        ("goto", "file:///etc/passwd", "", "no address of a page"),
        ("goto", "javascript:alert(1)", "", "no address of a page"),
        ("press", "", "NoSuchKey", "Unknown key"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_episode_goes_on(
    env: SyncLocalEnv[Any, Any, Any], action: str, target: str, text: str, error: str
) -> None:
    do(env, "goto", "/shop")
    result = do(env, action, target, text)
    assert error in result.observation.error
    assert (result.done, result.observation.url) == (False, f"{HOME}shop")


@needs_browser
@pytest.mark.slow
def test_only_allowed_hosts_are_reached() -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b"<title>Outside</title><h1>Outside</h1><img src=http://elsewhere.test/pixel.png>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/page"
        with LocalEnv(lambda: BrowserEnvironment(Chromium(allowed_hosts=["127.0.0.1"])), BrowserAction).sync() as env:
            env.reset(screenshot=False)
            seen = do(env, "goto", url).observation
            assert (seen.title, "Outside" in seen.text) == ("Outside", True)
            assert seen.error == "elsewhere.test may not be reached, only 127.0.0.1, company.test"
        with LocalEnv(BrowserEnvironment).sync() as env:
            env.reset(screenshot=False)
            assert "may not be reached" in do(env, "goto", url).observation.error
        server.shutdown()
    assert asked.count("/page") == 1


@needs_browser
@pytest.mark.slow
def test_a_screenshot_shows_the_page_and_can_be_left_out(env: SyncLocalEnv[Any, Any, Any]) -> None:
    assert env.reset(seed=3, screenshot=False).observation.screenshot is None
    picture = env.reset(seed=3).observation.screenshot
    head, _, data = picture.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data)[16:24] == (1024).to_bytes(4, "big") + (640).to_bytes(4, "big")


@needs_browser
@pytest.mark.slow
def test_an_episode_begins_with_a_new_profile_and_is_cut_off_in_time(env: SyncLocalEnv[Any, Any, Any]) -> None:
    do(env, "goto", "/settings")
    env.reset(seed=5, screenshot=False, max_steps=2)
    assert env.state().url == HOME
    assert not do(env, "wait").done
    last = do(env, "wait")
    assert (last.done, last.observation.truncated, last.reward) == (True, True, 0.0)


@needs_browser
@pytest.mark.slow
def test_environments_share_a_browser_until_the_last_one_ends() -> None:
    chromium = Chromium()
    first, second = BrowserEnvironment(chromium), BrowserEnvironment(chromium)
    first.reset(seed=1, task_id="settings", screenshot=False)
    second.reset(seed=1, task_id="settings", screenshot=False)
    first.step(BrowserAction(action="goto", target="/settings"))
    assert second.step(BrowserAction(action="wait")).url == HOME
    first.close()
    first.close()
    assert second.step(BrowserAction(action="goto", target="/staff")).title == "Staff - Company"
    chromium.run(end_browser(chromium))
    with pytest.raises(RuntimeError, match="reset to"):
        second.step(BrowserAction(action="wait"))
    assert second.reset(seed=1, screenshot=False).url == HOME
    second.close()
    with pytest.raises(RuntimeError, match="has ended"):
        chromium.run(end_browser(chromium))


async def end_browser(chromium: Chromium) -> None:
    """End the browser as a crash does."""
    assert chromium._browser is not None
    await chromium._browser.close()


def test_without_a_browser_a_reset_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    env = BrowserEnvironment()
    with pytest.raises(RuntimeError, match="apt-get install chromium"):
        env.reset()
    env.close()


def test_a_site_is_made_from_its_seed_and_escapes_what_it_gets() -> None:
    assert Site(1).products == Site(1).products != Site(2).products
    site = Site(1)
    assert "<script>" not in site.respond("GET", f"{HOME}staff?q=<script>&page=x").body
    assert site.respond("GET", f"{HOME}none").status == 404
    assert site.respond("POST", f"{HOME}none").status == 404
    assert site.respond("POST", f"{HOME}settings", "language=Polish").status == 200
    assert site.records == [{"form": "settings", "language": "Polish"}]


@pytest.mark.parametrize(
    "arguments",
    [{"task_id": "none"}, {"split": "none"}, {"split": "test", "index": 30}, {"max_steps": 0}],
)
def test_a_reset_that_is_not_possible_is_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, IndexError)):
        BrowserEnvironment().reset(**arguments)


@needs_browser
@pytest.mark.slow
def test_an_action_that_does_not_exist_is_refused(env: SyncLocalEnv[Any, Any, Any]) -> None:
    with pytest.raises(RequestValidationError):
        env.step({"action": "fly"})


def test_tasks_are_kinds_and_seeds_that_the_splits_do_not_share() -> None:
    world = BrowserEnvironment()
    train, test = world.list_tasks("train"), world.list_tasks("test")
    assert (len(train), len(test)) == (world.num_tasks("train"), world.num_tasks("test")) == (120, 30)
    assert {task["seed"] for task in train}.isdisjoint(task["seed"] for task in test)
    assert {task["task_id"] for task in test} == set(KINDS)
    assert world.get_task_range("test", 1, 3) == [world.get_task("test", 1), world.get_task("test", 2)]


def test_the_page_shows_the_picture_and_offers_links_and_buttons() -> None:
    world = BrowserEnvironment()
    seen = {
        "screenshot": "data:image/png;base64,AA==",
        "error": "<b>",
        "text": '- link "Shop" [ref=e4] [cursor=pointer]:\n- button "Order" [disabled] [ref=f1e30]\n- heading "x"',
    }
    picture = world.render_web(seen) or ""
    assert "data:image/png" in picture
    assert "&lt;b&gt;" in picture
    assert world.web_actions(seen) == [
        ("Shop", {"action": "click", "target": "e4"}),
        ("Order", {"action": "click", "target": "f1e30"}),
    ]
    assert (world.render_web({}), world.web_actions({})) == (None, [])


@needs_browser
@pytest.mark.slow
def test_the_typed_client_uses_a_browser_of_a_server(serve_env: Callable[..., Served]) -> None:
    with BrowserEnv(base_url=serve_env(app).url).sync() as env:
        result = env.reset(task_id="phone", seed=4)
        assert isinstance(result.observation, BrowserObservation)
        assert result.observation.screenshot
        answer = make_goal("phone", Site(4), 4).answer or ""
        assert env.step(BrowserAction(action="answer", text=answer)).reward == 1.0
        assert isinstance(env.state(), BrowserState)


@needs_browser
@pytest.mark.slow
@pytest.mark.timeout(900)  # a hundred profiles of a real browser
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        refs = re.findall(r"- (?:link|button) .*\[ref=(\w+)\]", observation["text"])
        if not refs or chance.random() < 0.2:
            return {"action": "answer", "text": str(chance.randint(1, 9))}
        return {"action": "click", "target": chance.choice(refs)}

    returns = try_package("browser_env", choose, most_steps=3, screenshot=False, task_id="cheapest")
    assert len(returns) == 100
    assert set(returns) <= {0.0, 1.0}
