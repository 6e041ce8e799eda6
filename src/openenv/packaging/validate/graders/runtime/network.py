"""The grader of network isolation: what was measured from the package's namespace is what its manifest declares."""

from __future__ import annotations

import time

from pydantic import ValidationError

from ...manifest import NormalizedManifest
from ...report import CheckOutcome, skipped
from ...report import CheckResult as CheckResult
from ...runtime.contracts import NetworkEvidence
from ...types import CheckStatus, Level, ProviderCapability
from .. import Subject
from .basic import STARTUP

_LOOPBACK = ["lo"]


class NetworkPolicyGrader:
    """The package reaches what it declares, and nothing else."""

    check_id = "runtime.network_policy"
    level = Level.RUNTIME
    requires_capabilities: frozenset[str] = frozenset()
    requires_provider = frozenset({ProviderCapability.NETWORK_POLICY})
    depends_on: tuple[str, ...] = (STARTUP,)

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        """Return True: every package declares a network mode."""
        return True

    def run(self, subject: Subject) -> CheckOutcome:
        """Compare the measurement with the declaration."""
        if subject.network_evidence_json is None:
            return skipped(self.check_id, "the network was not measured")
        started = time.monotonic()
        declared = subject.manifest.network.mode
        counted: list[str] = []
        doubt: str | None = None
        try:
            evidence = NetworkEvidence.model_validate_json(subject.network_evidence_json)
        except ValidationError:
            problems = ["the measurement of the network cannot be read"]
        else:
            # A probe proves something only where the container with a network reached the sink.
            counted = [probe.kind for probe in evidence.probes if probe.control.result == "reachable"]
            if evidence.requested_mode != declared:
                problems = [f"{evidence.requested_mode} was measured, and {declared} is declared"]
            elif declared == "public":
                isolated = evidence.subject_network_mode == "none"
                problems = ["it runs without a network, and public is declared"] if isolated else []
            else:
                problems = _leaks(evidence)
                doubt = None if problems else _doubt(evidence, counted)
        status = CheckStatus.FAIL if problems else CheckStatus.SKIP if doubt else CheckStatus.PASS
        return CheckOutcome(
            check_id=self.check_id,
            status=status,
            measured={"counted_probes": counted} if counted or not problems else {},
            evidence=problems or [doubt or "what was measured is what is declared"],
            remediation="run the package under the network mode that it declares" if problems else None,
            duration_s=time.monotonic() - started,
        )


def _leaks(evidence: NetworkEvidence) -> list[str]:
    """Return what a namespace without a network has, or reaches."""
    problems = [
        f"{probe.kind} reached the sink from the package's namespace"
        for probe in evidence.probes
        if probe.subject.result == "reachable"
    ]
    others = sorted(set(evidence.namespace.interfaces) - set(_LOOPBACK))
    if others:
        problems.append(f"the namespace has {', '.join(others)} beside lo")
    if evidence.namespace.default_route:
        problems.append("the namespace has a default route")
    if evidence.namespace.ipv6_non_loopback:
        problems.append("the namespace has IPv6 addresses beside loopback")
    return problems


def _doubt(evidence: NetworkEvidence, counted: list[str]) -> str | None:
    """Return why a measurement without a leak proves nothing, if so."""
    if "tcp" not in counted:
        return "the sink could not be reached over TCP from a container with a network, so a denial proves nothing"
    open_ends = [one.kind for one in evidence.probes if one.kind in counted and one.subject.result != "denied"]
    return f"denial is not proven for {', '.join(open_ends)}" if open_ends else None
