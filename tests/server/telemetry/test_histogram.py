"""Histograms: what they count agrees with the values, from any thread and however many."""

from __future__ import annotations

import threading
from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from openenv.server.telemetry.prometheus import SECONDS, Histograms

TIMES = st.floats(min_value=0, max_value=1000, allow_nan=False)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=700))
def test_counts_totals_and_buckets_are_those_of_the_values(pairs: list[tuple[float, float]]) -> None:
    histograms = Histograms(2)
    for pair in pairs:
        histograms.observe(*pair)
    for index, seen in enumerate(histograms.read()):
        values = sorted(pair[index] for pair in pairs)
        assert seen.observed == len(values)
        assert abs(seen.total - sum(values)) <= 1e-6 * max(1.0, sum(values))
        assert list(seen.counts) == [bisect_right(values, bound) for bound in SECONDS]


def test_values_of_many_threads_are_all_counted_and_never_mixed() -> None:
    histograms = Histograms(2, bounds=(1.0,))
    stop = threading.Event()

    def write() -> None:
        for _ in range(5000):
            histograms.observe(0.5, 2.0)

    def look() -> None:
        while not stop.is_set():
            small, large = histograms.read()
            assert small.counts[0] == small.observed
            assert large.counts[0] == 0

    failures: list[BaseException] = []

    def looking() -> None:
        try:
            look()
        except BaseException as exc:
            failures.append(exc)

    reader = threading.Thread(target=looking)
    writers = [threading.Thread(target=write) for _ in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    small, large = histograms.read()
    assert not failures
    assert small.observed == large.observed == 20_000
    assert (small.total, large.total) == (10_000.0, 40_000.0)


def test_values_without_a_reader_take_no_more_memory() -> None:
    histograms = Histograms(3)
    for _ in range(10_000):
        histograms.observe(1e-5, 1e-4, 1e-3)
    assert len(histograms._pending) <= 3 * 256
