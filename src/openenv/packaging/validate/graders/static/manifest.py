"""The grader of a manifest: what it promises is not more generous than it may be."""

from __future__ import annotations

import time

from ...manifest import NormalizedManifest
from ...policy import DeclarationBounds
from ...report import CheckOutcome
from ...report import CheckResult as CheckResult
from ...types import CheckStatus, Level, ProviderCapability
from .. import Subject


class StaticManifestGrader:
    """Compares the promises of a package with the bounds of a policy."""

    check_id = "static.manifest"
    level = Level.STATIC
    requires_capabilities: frozenset[str] = frozenset()
    requires_provider: frozenset[ProviderCapability] = frozenset()
    depends_on: tuple[str, ...] = ()

    def __init__(self, bounds: DeclarationBounds) -> None:
        self._bounds = bounds

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        """Return True: every package promises something."""
        return True

    def run(self, subject: Subject) -> CheckOutcome:
        """Compare each promise with its bound."""
        started = time.monotonic()
        reward, resources, bounds = subject.manifest.reward, subject.manifest.resources, self._bounds
        measured = {
            "oracle_tolerance": reward.oracle_tolerance,
            "floor_margin": reward.floor_margin,
            "variance_tolerance": reward.variance_tolerance,
            "episode_timeout_s": resources.episode_timeout_s,
            "bounds": bounds.model_dump(),
        }
        problems = []
        for name, value, bound, is_low in (
            ("reward.oracle_tolerance", reward.oracle_tolerance, bounds.max_oracle_tolerance, False),
            ("reward.floor_margin", reward.floor_margin, bounds.min_floor_margin, True),
            ("reward.variance_tolerance", reward.variance_tolerance, bounds.max_variance_tolerance, False),
            ("resources.episode_timeout_s", resources.episode_timeout_s, bounds.max_episode_timeout_s, False),
        ):
            if value is not None and (value < bound if is_low else value > bound):
                problems.append(f"{name} is {value:g}, and may be {bound:g} at {'least' if is_low else 'most'}")
        return CheckOutcome(
            check_id=self.check_id,
            status=CheckStatus.FAIL if problems else CheckStatus.PASS,
            measured=measured,
            evidence=problems or ["complete, and within the bounds"],
            remediation="declare values within these bounds" if problems else None,
            duration_s=time.monotonic() - started,
        )
