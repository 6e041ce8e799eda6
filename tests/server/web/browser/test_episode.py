"""The page's own picture of an episode: what frames make of it, in the browser, without an environment."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest

from environments import Idle
from openenv import Action, Observation

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")

BEGIN = """
    const { Episode } = await import("./static/episode.js");
    const episode = new Episode();
    const hello = { type: "hello", n: 7, log: [], render: {}, session: { state: "ready" },
        episode: { is_reset: true, current_observation: { a: 0 }, step_count: 0 } };
    const step = (n, more) => ({ type: "step", n, entry: { action: {}, observation: { a: n }, reward: 1, ...more } });
    const take = (frame, size) => episode.apply(frame, size);
"""


@pytest.fixture
def run(site: Callable[..., Any], visit: Callable[..., Any]) -> Callable[[str], Any]:
    """Run code that has an episode, in the page."""
    page = visit(site(Idle, Action, Observation).url).page()
    return lambda code: page.evaluate(f"(async () => {{{BEGIN}{code}}})()")


def test_a_missing_frame_is_noticed_and_the_whole_makes_up_for_it(run: Callable[[str], Any]) -> None:
    assert run("return [take(hello), take(step(8)), take(step(10)), episode.stepCount]") == [True, True, False, 1]
    again = "take(hello); take(step(10)); return [take({...hello, n: 12}), take(step(13)), episode.log.length]"
    assert run(again) == [True, True, 1]


def test_steps_are_counted_where_the_environment_does_not(run: Callable[[str], Any]) -> None:
    counts = "take(hello); for (const [n, step_count] of [[8, 0], [9, 0], [10, 7]]) take(step(n, {step_count}));"
    assert run(counts + "return episode.steps.map(entry => entry.step_count)") == [1, 2, 7]


def test_a_log_is_bounded_by_number_and_by_length(run: Callable[[str], Any]) -> None:
    many = "take(hello); for (let n = 8; n < 1508; n += 1) take(step(n), 100);"
    assert run(many + "return [episode.log.length, episode.dropped, episode.total]") == [1000, 500, 1500]
    large = "take(hello); for (let n = 8; n < 28; n += 1) take(step(n), 4000000);"
    assert run(large + "return [episode.log.length, episode.dropped, episode.total]") == [8, 12, 20]


def test_a_server_that_has_forgotten_the_session_has_lost_it(run: Callable[[str], Any]) -> None:
    forgotten = "take({...hello, n: 0, episode: {}, session: {state: 'none'}});"
    lost = run(f"take(hello); take(step(8)); {forgotten} return [episode.session.state, episode.log.length]")
    assert lost == ["lost", 1]
    assert run(f"{forgotten} return episode.session.state") == "none"


def test_numbers_and_words_are_written_as_python_reads_them(run: Callable[[str], Any]) -> None:
    value = {"a": [1, 2.5, True, None, 'quo"te\\ \n ü\u2028\x7f'], "1e21": 1e21}
    code = "const { pythonLiteral } = await import('./static/python.js'); return pythonLiteral(VALUE);"
    assert ast.literal_eval(run(code.replace("VALUE", json.dumps(value)))) == value
