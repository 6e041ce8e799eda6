"""The Prometheus text format: the reference parser reads what we write, and we read it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from openenv.cli.top import parse
from openenv.telemetry.prometheus import Family, Histograms, render

# Lines are split at more characters than the format knows; none of them is in a label that we write.
LABEL = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20) | st.sampled_from(
    ['a"b', "a\\b", "a\nb", "a\\nb", "{}", "a,b", 'x="y"', ""]
)


@given(LABEL, st.integers(0, 10**12) | st.floats(allow_nan=False))
def test_any_label_and_value_survives(label: str, value: float) -> None:
    text = render([Family("some_metric", "gauge", 'Says "this"\\ and\nthat.').add(value, {"name": label})]).decode()
    (family,) = text_string_to_metric_families(text)
    (theirs,) = family.samples
    (ours,) = parse(text)
    assert theirs.labels == ours.labels == {"name": label}
    assert theirs.value == ours.value == value


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


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="not a metric"):
        parse("<!doctype html>")
