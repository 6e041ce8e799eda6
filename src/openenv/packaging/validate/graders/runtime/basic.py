"""Graders of a recorded episode: its rewards, observations and states. The rules are those of `runtime_checks`."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from typing import Any

from ...manifest import NormalizedManifest
from ...probe import Moment, PlayedEpisode
from ...report import CheckOutcome, skipped
from ...report import CheckResult as CheckResult
from ...runtime.contracts import RuntimeEvidence
from ...runtime.schema_worker import violations_elsewhere
from ...runtime_checks import described_observations, reward_problems, state_problems
from ...types import CheckStatus, Level, ProviderCapability
from .. import Subject

STARTUP = "runtime.startup"
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
        """Return what is wrong with the episode."""

    def run(self, subject: Subject) -> CheckOutcome:
        """Judge the episode; without one, or where it ended before its plan, the check is skipped."""
        evidence = subject.runtime_evidence
        if evidence is None:
            return skipped(self.check_id, "no episode was recorded")
        if evidence.failure_phase is not None:
            return skipped(self.check_id, f"unmet dependency: {STARTUP} (the episode is incomplete)")
        started = time.monotonic()
        try:
            problems = self.check(subject, evidence)
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
        """Return what is wrong with the rewards."""
        return reward_problems(episode_of(evidence).moments, subject.manifest.reward.range)


class ObservationSchemaGrader(EvidenceGrader):
    """Observations fit the schemas that the server publishes."""

    check_id = "runtime.observation_schema"

    def check(self, subject: Subject, evidence: RuntimeEvidence) -> list[str]:
        """Return what is wrong with the observations."""
        if evidence.observation_schema_json is None:
            return ["the server publishes no schema of observations"]
        of_steps = json.loads(evidence.observation_schema_json)
        text = evidence.reset_observation_schema_json
        of_reset = of_steps if text is None else json.loads(text)
        moments = episode_of(evidence).moments
        has_tools = any("type" in (moment.action or {}) for moment in moments)
        described = list(described_observations(moments, of_reset, of_steps, has_tools=has_tools))
        pairs = [(value, schema) for _, value, schema in described]
        problems = violations_elsewhere(pairs, timeout_s=_SCHEMAS_S)
        return [f"{where}: {one}" for (where, _, _), texts in zip(described, problems, strict=True) for one in texts]


class StateContractGrader(EvidenceGrader):
    """The state has the episode's id, and counts steps from zero."""

    check_id = "runtime.state_contract"

    def check(self, subject: Subject, evidence: RuntimeEvidence) -> list[str]:
        """Return what is wrong with the states."""
        episode = episode_of(evidence)
        reset = next(one for one in evidence.exchanges if one.operation == "reset")
        episode_id = json.loads(reset.request_json)["data"]["episode_id"]
        actions = [moment.action or {} for moment in episode.moments[1:]]
        problems = state_problems(episode.states, episode_id, actions)
        if len(episode.states) != len(episode.moments):
            problems.append(f"{len(episode.moments)} replies, and {len(episode.states)} states")
        return problems


def episode_of(evidence: RuntimeEvidence) -> PlayedEpisode:
    """Read the moments and states of an episode from its messages.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The messages are not those of an episode.
    """
    episode = PlayedEpisode()
    for exchange in evidence.exchanges:
        data: dict[str, Any] = json.loads(exchange.response_json)["data"]
        if exchange.operation == "state":
            episode.states.append(data)
            continue
        observation = data["observation"]
        metadata = {**(observation.get("metadata") or {}), **(data.get("metadata") or {})}
        action = None if exchange.operation == "reset" else json.loads(exchange.request_json).get("data", {})
        episode.moments.append(Moment(observation, data["reward"], bool(data["done"]), metadata, action))
    return episode
