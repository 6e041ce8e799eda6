"""The Prometheus text format: the reference parser reads it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from openenv.server.telemetry.prometheus import Family, Histograms, counters, merge, render

# Lines are split at more characters than the format knows; none of them is in a label that we write.
LABEL = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20) | st.sampled_from(
    ['a"b', "a\\b", "a\nb", "a\\nb", "{}", "a,b", 'x="y"', ""]
)


@given(LABEL, st.integers(0, 10**12) | st.floats(allow_nan=False))
def test_any_label_and_value_survives(label: str, value: float) -> None:
    text = render([Family("some_metric", "gauge", 'Says "this"\\ and\nthat.').add(value, {"name": label})]).decode()
    (family,) = text_string_to_metric_families(text)
    (theirs,) = family.samples
    assert theirs.labels == {"name": label}
    assert theirs.value == value


def test_a_histogram_has_cumulative_buckets_a_sum_and_a_count() -> None:
    histograms = Histograms(1, bounds=(0.1, 1.0))
    for value in (0.05, 0.5, 5.0):
        histograms.observe(value)
    family = Family("seconds", "histogram", "Time.").add_distribution(histograms.read()[0], {"phase": "run"})
    (read,) = text_string_to_metric_families(render([family]).decode())
    assert {(sample.name, sample.labels.get("le")): sample.value for sample in read.samples} == {
        ("seconds_bucket", "0.1"): 1,
        ("seconds_bucket", "1"): 2,
        ("seconds_bucket", "+Inf"): 3,
        ("seconds_sum", None): 5.55,
        ("seconds_count", None): 3,
    }


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read a text as Prometheus does."""
    families = text_string_to_metric_families(text.decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def process(steps: int, uptime_s: float, **errors: int) -> bytes:
    """Write the metrics of one process."""
    histograms = Histograms(1, bounds=(0.1, 1.0))
    for _ in range(steps):
        histograms.observe(0.5)
    return render(
        [
            Family("steps_total", "counter", "Steps.").add(steps),
            Family("uptime_seconds", "gauge", "Age.").add(uptime_s),
            Family("errors_total", "counter", "Errors.").add_all("code", sorted(errors.items())),
            Family("seconds", "histogram", "Time.").add_distribution(histograms.read()[0], {"phase": "run"}),
        ]
    )


def test_the_metrics_of_processes_are_added_but_for_those_that_are_no_sums() -> None:
    merged = samples(merge([process(2, 7.5, A=1), process(3, 5.0, A=2, B=4)], {"uptime_seconds": max}))
    assert merged["steps_total", ()] == 5
    assert merged["uptime_seconds", ()] == 7.5
    assert merged["errors_total", (("code", "A"),)] == 3
    assert merged["errors_total", (("code", "B"),)] == 4
    assert merged["seconds_bucket", (("le", "1"), ("phase", "run"))] == 5
    assert merged["seconds_bucket", (("le", "0.1"), ("phase", "run"))] == 0
    assert merged["seconds_sum", (("phase", "run"),)] == 2.5
    text = merge([process(2, 7.5), process(3, 5.0)])
    assert text.count(b"# TYPE steps_total") == 1
    assert merge([]) == merge([b""]) == b""


def test_what_a_process_leaves_are_its_counters() -> None:
    left = counters(process(4, 9.0, A=1))
    assert b"uptime" not in left
    after = samples(merge([left, process(1, 2.0)]))
    assert after["steps_total", ()] == 5
    assert after["uptime_seconds", ()] == 2.0
    assert after["seconds_count", (("phase", "run"),)] == 5
    assert counters(b"") == b""


@given(LABEL | st.sampled_from(["a\u2028b", "a\x85b", "a\x0bb"]), st.integers(0, 10**12))
def test_any_label_survives_a_merge(label: str, value: int) -> None:
    text = render([Family("some_total", "counter", "Some.").add(value, {"name": label})])
    assert merge([text]) == text
    assert float(merge([text, text]).split()[-1]) == 2 * value
