"""Severity policies: the checks of a version in each lane, and the verdict that follows from their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from .report import CheckOutcome
from .rules import RULE, RULES, CheckStatus, Level, ReportVerdict, Severity, ValidationLane

_VERSIONS = ("v1", "v2")
_LOCAL, _HUB = ValidationLane.LOCAL, ValidationLane.HUB
_FAIL, _WARN, _ADVISORY = Severity.FAIL, Severity.WARN, Severity.ADVISORY


class PolicyError(Exception):
    """A policy or its use is wrong: an unknown version, an unknown check, graders that need each other."""


class DeclarationBounds(BaseModel):
    """How generous the promises of a manifest may be."""

    model_config = ConfigDict(extra="forbid")
    # Bounds keep promises meaningful: a tolerance of 1 would accept every reward.
    max_oracle_tolerance: float
    min_floor_margin: float
    max_variance_tolerance: float
    max_episode_timeout_s: float


class PolicyEntry(BaseModel):
    """The policy for one check."""

    model_config = ConfigDict(extra="forbid")
    check_id: str
    level: Level
    lane: ValidationLane
    severity: Severity


class SeverityPolicy(BaseModel):
    """A version of the policy."""

    model_config = ConfigDict(extra="forbid")
    policy_version: str
    entries: list[PolicyEntry]
    bounds: DeclarationBounds

    @model_validator(mode="after")
    def _names_each_check_once(self) -> Self:
        # Two severities for one check would make the verdict depend on their order.
        repeated = [name for name, count in Counter(entry.check_id for entry in self.entries).items() if count > 1]
        if repeated:
            raise ValueError(f"duplicate check ids: {', '.join(repeated)}")
        return self

    def entries_for_lane(self, lane: ValidationLane) -> dict[str, PolicyEntry]:
        """Return the entries of a lane by check ID; the Hub's lane includes the local one."""
        lanes = (_LOCAL, _HUB) if lane is _HUB else (_LOCAL,)
        return {entry.check_id: entry for entry in self.entries if entry.lane in lanes}


BOUNDS = DeclarationBounds(
    max_oracle_tolerance=0.1, min_floor_margin=0.1, max_variance_tolerance=0.2, max_episode_timeout_s=3600.0
)
# Checks that the policies name and no grader of ours makes: of images and dependencies, of the Hub, of many episodes.
_NOT_MADE_HERE = (
    ("static.reproducible_build", Level.STATIC, _LOCAL, _FAIL),
    ("static.image_hygiene", Level.STATIC, _LOCAL, _WARN),
    ("static.sbom", Level.STATIC, _LOCAL, _FAIL),
    ("static.oci_labels", Level.STATIC, _LOCAL, _FAIL),
    ("static.resource_declaration", Level.STATIC, _LOCAL, _FAIL),
    ("static.timeout_ceiling", Level.STATIC, _LOCAL, _FAIL),
    ("static.dependency_pinning", Level.STATIC, _LOCAL, _FAIL),
    ("static.task_distribution_pinning", Level.STATIC, _LOCAL, _FAIL),
    ("hub.layer_isolation", Level.STATIC, _HUB, _WARN),
    ("hub.cosign_signature", Level.STATIC, _HUB, _WARN),
    ("hub.immutable_versioning", Level.STATIC, _HUB, _FAIL),
    ("hub.time_to_first_work", Level.RUNTIME, _HUB, _WARN),
    ("hub.cross_host_determinism", Level.RUNTIME, _HUB, _FAIL),
    ("statistical.reward_reachability", Level.STATISTICAL, _HUB, _FAIL),
    ("statistical.difficulty_separation", Level.STATISTICAL, _HUB, _FAIL),
    ("statistical.headroom", Level.STATISTICAL, _HUB, _WARN),
    ("statistical.variance_bound", Level.STATISTICAL, _HUB, _FAIL),
    ("statistical.training_signal", Level.STATISTICAL, _HUB, _ADVISORY),
    ("statistical.adversarial_floor", Level.STATISTICAL, _HUB, _FAIL),
    ("statistical.gameability_gap", Level.STATISTICAL, _HUB, _WARN),
)


def load_policy(version: str = "v1") -> SeverityPolicy:
    """Return a version of the policy.

    Raises:
        PolicyError: There is no such version.
    """
    if version not in _VERSIONS:
        raise PolicyError(f"no severity policy for version {version!r}: there are {', '.join(_VERSIONS)}")
    rows = [(rule.id, rule.level, _LOCAL, rule.severity) for rule in RULES if version in rule.policies]
    entries = [
        PolicyEntry(check_id=check_id, level=level, lane=lane, severity=severity)
        for check_id, level, lane, severity in (*rows, *_NOT_MADE_HERE)
    ]
    return SeverityPolicy(policy_version=version, entries=entries, bounds=BOUNDS)


def apply_policy(results: Iterable[CheckOutcome], policy: SeverityPolicy, lane: ValidationLane) -> ReportVerdict:
    """Return what follows from results.

    A check that should have been made and was skipped is not known to be good, hence a warning; one that does not apply
    says nothing. A check that broke fails at any severity.

    Raises:
        PolicyError: Neither the lane nor our own checks have one of these ids.
    """
    entries = policy.entries_for_lane(lane)
    # PASS < WARN < FAIL
    worst = ReportVerdict.PASS
    # FAIL ends the search; WARN can still become FAIL.
    for result in results:
        own = RULE.get(result.check_id)
        # The policy decides. Checks that only we have bring their severity with them.
        if result.check_id in entries:
            severity = entries[result.check_id].severity
        elif own is not None and not own.policies:
            severity = own.severity
        else:
            raise PolicyError(
                f"check id {result.check_id!r} is unknown to policy {policy.policy_version!r} in lane {lane.value!r}"
            )
        # "Does not apply" is neither good nor bad.
        if result.status is CheckStatus.PASS or not result.applies:
            continue
        if result.status is CheckStatus.ERROR or (result.status is CheckStatus.FAIL and severity is Severity.FAIL):
            return ReportVerdict.FAIL
        worst = ReportVerdict.WARN
    return worst
