"""Episodes through broken connections, in short: identical to their undisturbed twins, or ended by a typed error.

`make chaos` has the long form. The published package is put through the same, which shows that lies are found.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from storm.environment import Deed
from storm.episode import Ask, Renewed, Trace
from storm.faults import DOWN, UP, Kind, plan_of
from storm.runner import Run, Storm
from storm.verdict import Outcome, judge

from program_interpreters import Interpreter

HERE = Path(__file__).resolve().parent


# Where a fault finds no victim is a matter of timing: the vector plays half as many episodes again as its faults need.
@pytest.mark.slow_but_for("ours-40-40-20", "mcp-16-16-6")
@pytest.mark.parametrize(
    ("package", "episodes", "judged", "faults"),
    [
        ("ours", 40, 40, 20),
        ("vector", 24, 96, 32),
        pytest.param("http", 24, 24, 10, marks=pytest.mark.slow),
        ("tools", 24, 24, 12),
        ("keys", 24, 24, 10),
        ("mcp", 16, 16, 6),
        ("first-k", 12, 48, 16),
    ],
)
def test_every_episode_is_identical_to_its_twin_or_ends_in_a_typed_error(
    package: str, episodes: int, judged: int, faults: int
) -> None:
    result = Run(Storm(package, episodes, at_once=8), lambda _: None).run()
    assert not result.violations
    assert (result.sessions_left, result.environments_left, result.threads_left) == (0, 0, [])
    assert not result.others_left
    assert sum(result.outcomes.values()) == judged
    assert result.outcomes[Outcome.IDENTICAL.value] >= judged // 2  # most faults are survived, not only reported
    assert sum(result.faults.values()) >= faults


@pytest.mark.published
@pytest.mark.slow
def test_lies_are_found(published: Interpreter, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [published.python, "-m", "storm", "--package", "published", "--episodes", "12", "--json", str(file)]
    done = subprocess.run(
        command, env=published.environment(HERE), capture_output=True, text=True, timeout=280, check=False
    )
    assert file.exists(), done.stderr
    assert done.returncode == 1
    assert json.loads(file.read_text(encoding="utf-8"))["outcomes"][Outcome.SILENT_RESET.value]


def test_the_first_faults_of_all_seeds_are_every_kind_at_every_point() -> None:
    places = {(kind, direction) for seed in range(1000) for kind, direction in _first(seed)}
    assert places == {(kind, direction) for kind in Kind if kind is not Kind.LATE for direction in (UP, DOWN)}
    points = {
        (fault.kind, fault.direction, fault.point) for seed in range(1000) for fault in plan_of(seed).faults.values()
    }
    assert len(points) > 200
    assert plan_of(7) == plan_of(7)


def test_requests_come_late_only_where_they_are_whole_by_themselves() -> None:
    assert all(fault.kind is not Kind.LATE for seed in range(100) for fault in plan_of(seed).faults.values())
    late = [fault for fault in plan_of(7, late=True).faults.values() if fault.kind is Kind.LATE]
    assert {fault.direction for fault in late} == {UP}


def _first(seed: int) -> set[tuple[Kind, str]]:
    return {(fault.kind, fault.direction) for fault in plan_of(seed).faults.values()}


SCRIPT = [Ask("reset", 0), Ask("step", 1), Ask("step", 2)]
DONE = [Deed("reset", 0), Deed("step", 1), Deed("step", 2)]


def _reply(ask: Ask, **changes: Any) -> dict[str, Any]:
    return {"kind": ask.kind, "owner": 5, "number": ask.number, "count": ask.number, "digest": "x", **changes}


@pytest.mark.parametrize(
    ("last", "deeds", "expected"),
    [
        ({}, DONE, Outcome.IDENTICAL),
        ({"count": 3, "digest": "y"}, DONE, Outcome.RUN_TWICE),
        ({"count": 1, "digest": "y"}, DONE, Outcome.SILENT_RESET),
        ({"count": 1, "owner": -1}, DONE, Outcome.SILENT_RESET),
        ({"owner": 6}, DONE, Outcome.WRONG_REPLY),
        ({"number": 1, "count": 1}, DONE, Outcome.WRONG_REPLY),
        ({"digest": "y"}, DONE, Outcome.WRONG_REPLY),
        ({}, [*DONE, DONE[2]], Outcome.RUN_TWICE),
        ({}, [DONE[0], DONE[2]], Outcome.LEFT_OUT),
        ({}, DONE[1:], Outcome.SILENT_RESET),
        ({}, DONE[:2], Outcome.WRONG_REPLY),
    ],
)
def test_a_verdict_names_the_lie(last: dict[str, Any], deeds: list[Deed], expected: Outcome) -> None:
    twin = Trace([_reply(ask) for ask in SCRIPT])
    trace = Trace([*twin.replies[:2], _reply(SCRIPT[2], **last)])
    assert judge(5, SCRIPT, trace, twin, {"1": deeds}).outcome is expected


def test_going_on_after_an_error_is_a_lie_if_it_works() -> None:
    twin = Trace([_reply(ask) for ask in SCRIPT])
    error = ConnectionError("gone")
    honest = Trace(twin.replies[:2], error, ConnectionError("still gone"))
    assert judge(5, SCRIPT, honest, twin, {"1": DONE}).outcome is Outcome.OTHER_ERROR
    fooled = Trace(twin.replies[:2], error, _reply(Ask("step", 3), owner=-1, count=1), after_number=3)
    assert judge(5, SCRIPT, fooled, twin, {"1": DONE}).outcome is Outcome.SILENT_RESET


def test_a_new_episode_that_is_announced_is_no_lie() -> None:
    twin = Trace([_reply(ask) for ask in SCRIPT])
    again = [Deed("reset", 0), Deed("step", 3)]
    announced = Trace(twin.replies[:2], Renewed("expired"), Renewed("expired"), 3, again)
    assert judge(5, SCRIPT, announced, twin, {"1": DONE, "2": again}).outcome is Outcome.TYPED_ERROR
    hardly_begun = Trace(twin.replies[:1], Renewed("expired"), Renewed("expired"), 3, again[:1])
    assert judge(5, SCRIPT, hardly_begun, twin, {"1": DONE[:1], "2": again[:1]}).outcome is Outcome.TYPED_ERROR
    unannounced = Trace(twin.replies[:2], ConnectionError("gone"), ConnectionError("gone"))
    assert judge(5, SCRIPT, unannounced, twin, {"1": DONE, "2": again}).outcome is Outcome.LEFT_OUT
