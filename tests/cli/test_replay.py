"""`openenv replay`: a recorded episode against a server that behaves the same, and against one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from environments import Add, Counter, Sum
from openenv.cli.__main__ import build
from openenv.server.app import create_app
from servers import Serve

ROWS: list[dict[str, Any]] = [
    {"kind": "episode", "version": 1, "id": "20260101-000000-00000000", "env": "counter"},
    {"kind": "reset", "n": 0, "arguments": {"seed": 1}, "observation": {"total": 0}, "reward": None, "done": False},
    {"kind": "picture", "n": 0, "html": "<b>0</b>"},
]


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run the command, and return its exit code and what it prints."""
    return lambda *arguments: CliRunner().invoke(build(["replay"]), ["replay", *map(str, arguments)])


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Write an episode."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step(n: int, total: int, amount: int = 1, **fields: Any) -> dict[str, Any]:
    """Make the row of a step."""
    row = {"kind": "step", "n": n, "action": {"amount": amount}, "reward": float(amount), "done": False}
    return {**row, "observation": {"total": total}, **fields}


FAILED = {"kind": "step", "n": 2, "action": {"fail": True}, "error": {"type": "ValueError", "message": "asked to fail"}}


@pytest.fixture
def url(serve: Serve) -> str:
    """The address of a counter."""
    address: str = serve(create_app(Counter, Add, Sum, max_concurrent_envs=4)).url
    return address


def rows(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    """Make an episode that begins at 1."""
    return [*ROWS[:1], {**ROWS[1], "observation": {"total": 1}}, *ROWS[2:], *steps]


def test_the_same_episode_is_the_same(run: Callable[..., Any], url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "e.jsonl", *rows(step(1, 3, amount=2), FAILED, step(3, 4)))
    result = run(file, url)
    assert (result.exit_code, "The same: 4 of 4" in result.output) == (0, True), result.output


def test_the_first_difference_is_named_with_both_values(run: Callable[..., Any], url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "e.jsonl", *rows(step(1, 3, amount=2), step(2, 9), step(3, 5, reward=2.0)))
    result = run(file, url)
    assert result.exit_code == 1
    assert "step 2 differs" in result.output
    assert "observation.total: recorded 9, now 4" in result.output
    assert "step 3" not in result.output
    whole = run(file, url, "--all", "--ignore", "observation.total")
    assert "reward: recorded 2.0, now 1.0" in whole.output
    assert "1 of 4 differ" in whole.output


def test_a_step_that_failed_and_works_now_differs(run: Callable[..., Any], url: str, tmp_path: Path) -> None:
    failed = {**FAILED, "n": 1, "action": {"amount": 1}}
    result = run(write(tmp_path / "e.jsonl", *rows(failed)), url)
    assert result.exit_code == 1
    assert "error: recorded asked to fail, now None" in result.output


def test_without_a_server_the_episode_is_shown(run: Callable[..., Any], tmp_path: Path) -> None:
    hostile = step(1, 3, action={"amount": "\x1b[31mred"})
    result = run(write(tmp_path / "e.jsonl", *rows(hostile, FAILED)))
    assert result.exit_code == 0
    assert "failed: ValueError: asked to fail" in result.output
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([{"kind": "step"}], "not a recorded episode"),
        ([{"kind": "episode", "version": 2}], "version 2"),
        ([ROWS[0], step(1, 1)], "does not begin with a reset"),
    ],
    ids=["other", "newer", "copy"],
)
def test_what_cannot_be_played_is_refused(
    run: Callable[..., Any], url: str, tmp_path: Path, lines: list[dict[str, Any]], text: str
) -> None:
    result = run(write(tmp_path / "e.jsonl", *lines), url)
    assert (result.exit_code, text in result.output) == (1, True), result.output


def test_a_file_that_is_not_there_is_one_line(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run(tmp_path / "none.jsonl")
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
