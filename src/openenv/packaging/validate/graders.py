"""Graders: each makes one check of a package and returns its result. Other packages add graders by an entry point.

    registry ── select (level, capabilities) ── order (depends_on) ── run ── CheckOutcome

A grader that breaks or lacks its requirements becomes a skipped or failed result; it never ends the validation.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from openenv.env.manifest import CapabilitiesSpec
from openenv.errors import message_of

from .checks_behaviour import described_observations, reward_problems, state_problems
from .json_schema import violations_elsewhere
from .manifest import NormalizedManifest
from .policy import DeclarationBounds, PolicyError
from .probe import Moment, ProbeEpisode
from .recording import NetworkEvidence, RuntimeEvidence
from .report import UNMET, CheckOutcome, skipped
from .rules import CheckStatus, Level, ProviderCapability
from .served_package import RunningSubject

ENTRY_POINT_GROUP = "openenv.validation.graders"  # published: other packages register under this name
"""Where other packages name their graders: an object, or a class or function that makes one."""


@dataclass(frozen=True)
class Subject:
    """The subject of a grader: the package, and evidence of its run if it is served."""

    root: Path
    manifest: NormalizedManifest
    image_ref: str | None
    running: RunningSubject | None
    outputs_dir: Path
    runtime_evidence: RuntimeEvidence | None = None
    network_evidence_json: str | None = None


@runtime_checkable
class Grader(Protocol):
    """Makes one check.

    `requires_capabilities` names fields of `CapabilitiesSpec` that a package must declare, `requires_provider` the
    capabilities of the provider, and `depends_on` the checks that must pass first.
    """

    check_id: str
    level: Level
    requires_capabilities: frozenset[str]
    requires_provider: frozenset[ProviderCapability]
    depends_on: tuple[str, ...]

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        """Return whether the check applies to a package."""
        ...

    def run(self, subject: Subject) -> CheckOutcome:
        """Make the check."""
        ...


class GraderRegistry:
    """The graders, by the ids of their checks."""

    def __init__(self) -> None:
        self._graders: dict[str, Grader] = {}

    def register(self, grader: Grader) -> None:
        """Add a grader.

        Raises:
            ValueError: There is one for this check, or it needs a capability that no manifest can declare.
        """
        if grader.check_id in self._graders:
            raise ValueError(f"a grader for {grader.check_id!r} is registered already")
        # A misspelled capability would never be declared, and the grader never run.
        unknown = sorted(grader.requires_capabilities - CapabilitiesSpec.model_fields.keys())
        if unknown:
            raise ValueError(f"grader {grader.check_id!r} requires unknown capabilities: {', '.join(unknown)}")
        self._graders[grader.check_id] = grader

    def load_entry_points(self) -> int:
        """Add the graders that installed packages offer, and return how many there are.

        Raises:
            ValueError: One cannot be loaded, or cannot be added.
        """
        points = entry_points(group=ENTRY_POINT_GROUP)
        for point in points:
            try:
                grader = point.load()
                # An entry point may name a class, a factory, or a grader.
                if isinstance(grader, type) or not hasattr(grader, "run"):
                    grader = grader()
            except Exception as error:  # it is the code of another package
                reason = f"{type(error).__name__}: {message_of(error)}"
                raise ValueError(f"the grader {point.name!r} ({point.value}) cannot be loaded: {reason}") from error
            self.register(grader)
        return len(points)

    def get(self, check_id: str) -> Grader | None:
        """Return the grader of a check, if there is one."""
        return self._graders.get(check_id)

    def select(self, manifest: NormalizedManifest, max_level: Level) -> list[Grader]:
        """Return the graders up to a level that a package has something for."""
        return [
            grader
            for grader in self._graders.values()
            if grader.level <= max_level
            and all(getattr(manifest.capabilities, name) for name in grader.requires_capabilities)
            and grader.applies_to(manifest)
        ]


def order_graders(graders: Iterable[Grader]) -> list[Grader]:
    """Order graders so that each follows its dependencies; otherwise by ID.

    Raises:
        PolicyError: Two have one id, or some depend on each other.
    """
    # IDs identify checks in policies and reports, so they are unique.
    by_id: dict[str, Grader] = {}
    for grader in graders:
        if grader.check_id in by_id:
            raise PolicyError(f"two graders make the check {grader.check_id}")
        by_id[grader.check_id] = grader
    sorter = TopologicalSorter(
        # Dependencies outside of this run are judged by their results, not by order.
        {check_id: [other for other in grader.depends_on if other in by_id] for check_id, grader in by_id.items()}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        raise PolicyError(f"graders depend on each other: {' -> '.join(error.args[1])}") from error
    ordered: list[Grader] = []
    while sorter.is_active():
        # Sorted, so that reports are the same on every run.
        ready = sorted(sorter.get_ready())
        ordered += [by_id[check_id] for check_id in ready]
        sorter.done(*ready)
    return ordered


def execute_graders(
    graders: Iterable[Grader],
    subject: Subject,
    *,
    provider_capabilities: Collection[ProviderCapability] = frozenset(),
    prior: Sequence[CheckOutcome] = (),
) -> list[CheckOutcome]:
    """Run graders in their order and return their results; one that breaks is a result, not the end of the others.

    Args:
        graders: The graders to run.
        subject: The package under test.
        provider_capabilities: The provider's capabilities; a grader that needs more is skipped.
        prior: Results of checks that were made before, for graders that depend on them.
    """
    # Only a passed check satisfies a dependency; a skipped one proves nothing.
    passed = {result.check_id for result in prior if result.status is CheckStatus.PASS}
    results: list[CheckOutcome] = []
    for grader in order_graders(graders):
        # For example: a grader that measures the network needs a provider that can isolate it.
        missing = sorted(one.value for one in grader.requires_provider if one not in provider_capabilities)
        unmet = [check_id for check_id in grader.depends_on if check_id not in passed]
        if unmet:
            result = skipped(grader.check_id, f"{UNMET}{', '.join(unmet)}")
        elif missing:
            result = skipped(grader.check_id, f"missing provider capabilities: {', '.join(missing)}")
        else:
            result = _run(grader, subject)
        if result.status is CheckStatus.PASS:
            passed.add(result.check_id)
        results.append(result)
    return results


def _run(grader: Grader, subject: Subject) -> CheckOutcome:
    started = time.monotonic()
    try:
        result = grader.run(subject)
        # A grader of another package may return anything.
        if not isinstance(result, CheckOutcome) or result.check_id != grader.check_id:
            raise TypeError(f"returned no result of {grader.check_id}")
    except Exception as error:
        # Only the type of the error: messages of another package's grader may contain secrets.
        text = f"the grader failed ({type(error).__name__})"
        duration_s = time.monotonic() - started
        return CheckOutcome(check_id=grader.check_id, status=CheckStatus.ERROR, evidence=[text], duration_s=duration_s)
    return result


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
        # Generous promises would let a check pass that says nothing, so policies bound them.
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


STARTUP = "runtime.startup"
# Evaluating a hostile schema may never end; see `json_schema`.
_SCHEMAS_S = 30.0
_SHOWN = 4


class EvidenceGrader(ABC):
    """A grader that judges the recorded episode of a package."""

    check_id: str
    level = Level.RUNTIME
    requires_capabilities: frozenset[str] = frozenset()
    requires_provider: frozenset[ProviderCapability] = frozenset()
    depends_on: tuple[str, ...] = (STARTUP,)

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        """Return True: every package has episodes."""
        return True

    @abstractmethod
    def check(self, subject: Subject, evidence: RuntimeEvidence) -> list[str]:
        """Return the problems of the episode."""

    def run(self, subject: Subject) -> CheckOutcome:
        """Judge the episode. Without a complete episode, the check is skipped."""
        evidence = subject.runtime_evidence
        if evidence is None:
            return skipped(self.check_id, "no episode was recorded")
        # An incomplete episode fails `runtime.startup`; repeating that here would hide the cause.
        if evidence.failure_phase is not None:
            return skipped(self.check_id, f"{UNMET}{STARTUP} (the episode is incomplete)")
        started = time.monotonic()
        try:
            problems = self.check(subject, evidence)
        # The record is the server's text, so any shape is possible.
        except (ValueError, KeyError, TypeError, AttributeError, TimeoutError) as error:
            problems = [f"the recorded episode cannot be read: {type(error).__name__}"]
        return CheckOutcome(
            check_id=self.check_id,
            status=CheckStatus.FAIL if problems else CheckStatus.PASS,
            measured={"exchanges": len(evidence.exchanges)},
            evidence=problems[:_SHOWN] or ["the recorded episode is right"],
            remediation="correct the environment where the evidence says" if problems else None,
            duration_s=time.monotonic() - started,
        )


class RewardWellFormedGrader(EvidenceGrader):
    """Rewards are finite numbers within the range, or none."""

    check_id = "runtime.reward_well_formed"

    def check(self, subject: Subject, evidence: RuntimeEvidence) -> list[str]:
        """Return the problems of the rewards."""
        return reward_problems(episode_of(evidence).moments, subject.manifest.reward.range)


class ObservationSchemaGrader(EvidenceGrader):
    """Observations fit the schemas that the server publishes."""

    check_id = "runtime.observation_schema"

    def check(self, subject: Subject, evidence: RuntimeEvidence) -> list[str]:
        """Return the problems of the observations."""
        if evidence.observation_schema_json is None:
            return ["the server publishes no schema of observations"]
        of_steps = json.loads(evidence.observation_schema_json)
        text = evidence.reset_observation_schema_json
        of_reset = of_steps if text is None else json.loads(text)
        moments = episode_of(evidence).moments
        # Tool actions have a `type`; other actions have the environment's fields.
        has_tools = any("type" in (moment.action or {}) for moment in moments)
        described = list(described_observations(moments, of_reset, of_steps, has_tools=has_tools))
        pairs = [(value, schema) for _, value, schema in described]
        # In another process, because the schemas come from the package.
        problems = violations_elsewhere(pairs, timeout_s=_SCHEMAS_S)
        return [f"{where}: {one}" for (where, _, _), texts in zip(described, problems, strict=True) for one in texts]


class StateContractGrader(EvidenceGrader):
    """The state has the episode's id, and counts steps from zero."""

    check_id = "runtime.state_contract"

    def check(self, subject: Subject, evidence: RuntimeEvidence) -> list[str]:
        """Return the problems of the states."""
        episode = episode_of(evidence)
        # The ID that was sent, not the one that came back.
        reset = next(one for one in evidence.exchanges if one.operation == "reset")
        episode_id = json.loads(reset.request_json)["data"]["episode_id"]
        actions = [moment.action or {} for moment in episode.moments[1:]]
        problems = state_problems(episode.states, episode_id, actions)
        # One state belongs to each reply.
        if len(episode.states) != len(episode.moments):
            problems.append(f"{len(episode.moments)} replies, and {len(episode.states)} states")
        return problems


def episode_of(evidence: RuntimeEvidence) -> ProbeEpisode:
    """Read the moments and states of an episode from its messages.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The messages do not form an episode.
    """
    episode = ProbeEpisode()
    for exchange in evidence.exchanges:
        data: dict[str, Any] = json.loads(exchange.response_json)["data"]
        if exchange.operation == "state":
            episode.states.append(data)
            continue
        observation = data["observation"]
        # Servers send metadata in the observation, beside it, or both.
        metadata = {**(observation.get("metadata") or {}), **(data.get("metadata") or {})}
        action = None if exchange.operation == "reset" else json.loads(exchange.request_json).get("data", {})
        episode.moments.append(Moment(observation, data["reward"], bool(data["done"]), metadata, action))
    return episode


# The only interface that a namespace without a network may have.
_LOOPBACK = ["lo"]


class NetworkPolicyGrader:
    """The package reaches the declared hosts and no others."""

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
            # A probe proves isolation only if the control container, which has a network, reached the sink.
            counted = [probe.kind for probe in evidence.probes if probe.control.result == "reachable"]
            # A measurement of another mode says nothing about this one.
            if evidence.requested_mode != declared:
                problems = [f"{evidence.requested_mode} was measured, and {declared} is declared"]
            elif declared == "public":
                isolated = evidence.subject_network_mode == "none"
                problems = ["it runs without a network, and public is declared"] if isolated else []
            else:
                problems = _leaks(evidence)
                doubt = None if problems else _doubt(evidence, counted)
        status = CheckStatus.SKIP if doubt else CheckStatus.PASS
        if problems:
            status = CheckStatus.FAIL
        return CheckOutcome(
            check_id=self.check_id,
            status=status,
            measured={"counted_probes": counted} if counted or not problems else {},
            evidence=problems or [doubt or "what was measured is what is declared"],
            remediation="run the package under the network mode that it declares" if problems else None,
            duration_s=time.monotonic() - started,
        )


def _leaks(evidence: NetworkEvidence) -> list[str]:
    """Return the interfaces and hosts that a namespace without a network should not have."""
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
    # TCP is what agents would use; without its control the measurement is worthless.
    if "tcp" not in counted:
        return "the sink could not be reached over TCP from a container with a network, so a denial proves nothing"
    open_ends = [one.kind for one in evidence.probes if one.kind in counted and one.subject.result != "denied"]
    return f"denial is not proven for {', '.join(open_ends)}" if open_ends else None
