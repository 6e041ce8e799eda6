"""Severity policies: the published checks in their lanes, and the verdict that follows from results."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from openenv.packaging.validate.policy import PolicyError, SeverityPolicy, apply_policy, load_policy
from openenv.packaging.validate.report import CheckResult, skipped
from openenv.packaging.validate.rules import RULES, Lane, Level, Severity, Verdict

FAIL, WARN, PASS = Verdict.FAIL, Verdict.WARN, Verdict.PASS


def result(check_id: str, status: str) -> CheckResult:
    return CheckResult(check_id=check_id, status=status, duration_s=0.0)


def test_the_versions_have_the_published_checks() -> None:
    first, second = load_policy(), load_policy("v2")
    assert (len(first.entries), len(second.entries)) == (45, 46)
    ids = {entry.check_id for entry in second.entries}
    assert ids - {entry.check_id for entry in first.entries} == {"runtime.startup"}
    by_lane = {lane: len(second.entries_for_lane(lane)) for lane in Lane}
    assert by_lane == {Lane.LOCAL: 34, Lane.HUB: 46}  # the Hub makes the local checks too
    levels = {level: sum(entry.level is level for entry in second.entries) for level in Level}
    assert levels == {Level.STATIC: 13, Level.RUNTIME: 18, Level.SEMANTIC: 8, Level.STATISTICAL: 7}
    severities = {entry.check_id: entry.severity for entry in second.entries}
    assert severities["static.layout"] is Severity.WARN
    assert severities["static.sbom"] is Severity.FAIL
    assert severities["statistical.training_signal"] is Severity.ADVISORY
    assert second.bounds.max_episode_timeout_s == 3600.0


def test_an_unknown_version_is_an_error() -> None:
    with pytest.raises(PolicyError, match="v1, v2"):
        load_policy("v3")


def test_a_policy_names_each_check_once() -> None:
    data = load_policy().model_dump()
    with pytest.raises(ValidationError, match=r"static\.manifest"):
        SeverityPolicy.model_validate({**data, "entries": data["entries"] * 2})


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([], PASS),
        ([("static.manifest", "pass")], PASS),
        ([("static.manifest", "skip")], WARN),
        ([("static.layout", "fail"), ("static.manifest", "pass")], WARN),
        ([("static.layout", "fail"), ("static.manifest", "fail")], FAIL),
        ([("static.layout", "error")], FAIL),  # a check that broke has shown nothing
        ([("runtime.session_cleanup", "fail")], FAIL),  # a check of our own
        ([("runtime.fork", "fail")], WARN),
    ],
)
def test_a_verdict_is_the_worst_that_follows(results: list[tuple[str, str]], verdict: Verdict) -> None:
    assert apply_policy([result(*one) for one in results], load_policy("v2"), Lane.LOCAL) is verdict


def test_a_check_that_does_not_apply_says_nothing() -> None:
    aside = skipped("static.manifest", "a file declares nothing", applies=False)
    assert apply_policy([aside], load_policy("v2"), Lane.LOCAL) is PASS


def test_a_check_that_no_lane_knows_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"hub\.layer_isolation"):
        apply_policy([result("hub.layer_isolation", "fail")], load_policy("v2"), Lane.LOCAL)
    assert apply_policy([result("hub.layer_isolation", "fail")], load_policy("v2"), Lane.HUB) is WARN
    with pytest.raises(PolicyError, match=r"runtime\.startup"):
        apply_policy([result("runtime.startup", "pass")], load_policy("v1"), Lane.LOCAL)


def test_our_own_checks_are_marked() -> None:
    own = {rule.id for rule in RULES if not rule.policies}
    assert own == {
        "static.entry_point",
        "runtime.fork",
        "runtime.step_before_reset",
        "runtime.invalid_action",
        "runtime.session_cleanup",
    }
