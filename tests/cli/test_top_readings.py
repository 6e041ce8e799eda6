"""Snapshots: figures read from metrics, quantiles, and what happened between two readings."""

from __future__ import annotations

import pytest

from openenv.cli.top import NotOurs, Snapshot, quantile, read_snapshot
from openenv.server.telemetry.prometheus import Family, Histograms, render


def reading(times: Histograms, steps: int = 0) -> Snapshot:
    calls = Family("openenv_call_seconds", "histogram", "Times.")
    calls.add_distribution(times.read()[0], {"operation": "step", "phase": "run"})
    families = [
        Family("openenv_info", "gauge", "What.").add(1, {"environment": "Maze"}),
        Family("openenv_sessions", "gauge", "Sessions.").add(2, {"state": "ready"}).add(1, {"state": "busy"}),
        Family("openenv_errors_total", "counter", "Errors.").add(4, {"code": "EXECUTION_ERROR"}),
        Family("openenv_steps_total", "counter", "Steps.").add(steps),
        calls,
    ]
    return read_snapshot(render(families).decode())


def test_a_snapshot_has_what_the_metrics_say() -> None:
    seen = reading(Histograms(1), steps=7)
    assert seen.info == {"environment": "Maze"}
    assert seen.sessions == {"ready": 2, "busy": 1}
    assert seen.errors == {"EXECUTION_ERROR": 4}
    assert seen.value("openenv_steps_total") == 7
    assert seen.value("no_such_metric") == 0
    assert seen.quantile("step", "run", 0.5) is None


def test_times_since_an_earlier_reading_leave_out_what_came_before() -> None:
    times = Histograms(1)
    for _ in range(1000):
        times.observe(10.0)
    before = reading(times)
    for _ in range(100):
        times.observe(0.0015)
    now = reading(times)
    median = now.quantile("step", "run", 0.5, since=before)
    assert median is not None
    assert 0.001 <= median <= 0.002
    overall = now.quantile("step", "run", 0.5)
    assert overall is not None
    assert 5.0 <= overall <= 10.0


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([(1.0, 10.0), (float("inf"), 10.0)], 0.5, 0.5),
        ([(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5, 1.5),
        ([(1.0, 0.0), (float("inf"), 10.0)], 0.5, 1.0),
    ],
)
def test_quantiles_are_estimated_inside_their_bucket(
    buckets: list[tuple[float, float]], share: float, expected: float | None
) -> None:
    assert quantile(buckets, share) == expected


@pytest.mark.parametrize("text", ["", "<html></html>", "up 1\n"])
def test_other_text_is_not_mistaken_for_a_server(text: str) -> None:
    with pytest.raises(NotOurs):
        read_snapshot(text)
