"""What notebooks show of results, outcomes and rubrics, and of a call that was not awaited."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openenv import GenericEnvClient, Observation, Rubric, StepResult
from openenv._notebook import hint_for
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.tasks.task import CommandResult


class Scored(Rubric):
    def forward(self, action: object, observation: object) -> float:
        return 0.25


class Whole(Rubric):
    def __init__(self) -> None:
        self.style = Scored()

    def forward(self, action: object, observation: object) -> float:
        score = self.style(action, observation)
        assert isinstance(score, float)
        return 2 * score


class Board(Observation):
    board: str = ""
    pixels: object = None


def test_a_result_is_a_table_of_its_fields() -> None:
    observation = Board(board="x.\n.o", pixels=np.zeros((84, 84), np.uint8))
    html = StepResult(observation=observation, reward=0.5, done=True)._repr_html_()
    assert "<pre" in html
    assert "x.\n.o" in html
    assert "array of shape (84, 84), uint8" in html
    assert "<code>0.5</code>" in html


def test_text_of_an_environment_is_escaped() -> None:
    html = StepResult(observation={"<b>": "<script>alert(1)</script>"}, metadata={"a": "<i>"})._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;" in html


def test_long_values_are_cut() -> None:
    html = StepResult(observation={"text": "a" * 100_000, **{str(n): n for n in range(1000)}})._repr_html_()
    assert len(html) < 10_000
    assert "(100,000 characters)" in html
    assert "981 more" in html


def test_an_outcome_shows_status_reward_and_checks() -> None:
    checks = [CommandResult(cmd="pytest -q", exit_code=0), CommandResult(cmd="grep x < y", exit_code=1)]
    html = Outcome(rollout_id="r1", status="ok", reward=0.5, trust="isolated", verify_results=checks)._repr_html_()
    assert "0.5 (isolated)" in html
    assert "ok     pytest -q\nfailed grep x &lt; y" in html
    assert "files" not in html  # there are none


def test_a_rubric_shows_the_last_score_of_each_part() -> None:
    rubric = Whole()
    rubric("action", "observation")
    html = rubric._repr_html_()
    assert "<code>0.5</code>" in html
    assert "style" in html
    assert "<code>0.25</code>" in html


def test_a_call_that_was_not_awaited_says_what_to_do() -> None:
    async def other() -> None: ...

    async def not_awaited() -> tuple[str, str]:
        calls = GenericEnvClient("http://127.0.0.1:9").reset(), other()
        texts = hint_for(calls[0]), hint_for(calls[1])  # type: ignore[arg-type]
        for call in calls:
            call.close()
        return texts

    hint, plain = asyncio.run(not_awaited())
    assert "await env.reset(...)" in hint
    assert "env.sync()" in hint
    assert "coroutine object" in plain


@pytest.mark.slow
def test_a_notebook_shows_the_hint(tmp_path: Path) -> None:
    """A real IPython shell, in an environment of its own that finds this package."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "ipython"], check=True)
    script = tmp_path / "cell.ipy"
    script.write_text(
        "from openenv import GenericEnvClient\n"
        "async def cell():\n"
        "    call = GenericEnvClient('http://127.0.0.1:9').reset()\n"
        "    print(get_ipython().display_formatter.format(call)[0]['text/plain'])\n"
        "    call.close()\n"
        "await cell()\n"
    )
    source = str(Path(__file__).parents[1] / "src")
    shown = subprocess.run(
        [python, "-m", "IPython", "--no-banner", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{source}:{_site()}"},
    )
    assert "reset() was not awaited" in shown.stdout, shown.stdout + shown.stderr


def _site() -> str:
    return next(path for path in sys.path if path.endswith("site-packages"))
