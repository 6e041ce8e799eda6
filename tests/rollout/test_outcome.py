"""Labels: whose fault a failed rollout is. What the host saw counts before what the agent says."""

from __future__ import annotations

import pytest

from openenv.rollout.store.outcome import AgentFacts, ModelUse, Outcome, is_endpoint_suspect, is_hopeless, label_of

FINE = AgentFacts(0, False, 60, None)
CRASHED = AgentFacts(1, False, 60, "the agent exited with code 1")
HUNG = AgentFacts(124, True, 60, "the agent exited with code 124")
USED = ModelUse(needed=True, calls=3, answered=3)
NONE = ModelUse(needed=False)
DEAD = ModelUse(needed=True, calls=2, answered=0, failures=1, last_error="500", outage="connection refused")


@pytest.mark.parametrize(
    ("agent", "model", "status", "reason"),
    [
        (FINE, USED, None, ""),
        (FINE, NONE, None, ""),
        (CRASHED, USED, "policy_failed", "code 1"),
        (CRASHED, NONE, "policy_failed", "code 1"),
        (AgentFacts(137, False, 60, "x"), USED, "policy_failed", "memory"),
        (HUNG, USED, "truncated", "agent timeout"),
        (FINE, ModelUse(needed=True, calls=3, answered=3, refused="max_calls"), "truncated", "max_calls"),
        (CRASHED, DEAD, "env_failed", "connection refused"),
        (FINE, DEAD, "env_failed", "no call was answered"),
        (HUNG, DEAD, "env_failed", "connection refused"),
        (CRASHED, ModelUse(needed=True, calls=3, answered=2, failures=1, outage="503"), "env_failed", "503"),
        (CRASHED, ModelUse(needed=True, calls=3, answered=2, failures=1, last_status=503), "policy_failed", "1"),
        (FINE, ModelUse(needed=True, calls=3, answered=2, failures=1, last_status=503), None, ""),
        (FINE, ModelUse(needed=True, calls=3, answered=2, last_status=400), None, ""),
        (CRASHED, ModelUse(needed=True, calls=3, answered=0, last_status=400), "policy_failed", "1"),
        (HUNG, ModelUse(needed=True, calls=1), "truncated", "agent timeout"),
        (AgentFacts(None, False, 60, "its end was not seen"), USED, "policy_failed", "not seen"),
        (CRASHED, ModelUse(needed=True), "env_failed", "no model call"),
        (FINE, ModelUse(needed=True), "env_failed", "no model call"),
        (HUNG, ModelUse(needed=True), "env_failed", "no model call"),
    ],
)
def test_each_failure_has_its_status(agent: AgentFacts, model: ModelUse, status: str | None, reason: str) -> None:
    label = label_of(agent, model)
    assert (label.status if label else None) == status
    assert label is None or reason in label.reason


@pytest.mark.parametrize(
    ("model", "suspect"),
    [
        (NONE, False),
        (USED, False),
        (ModelUse(needed=True), False),
        (ModelUse(needed=True, calls=1), True),
        (ModelUse(needed=True, calls=1, tokens=5), False),
        (ModelUse(needed=True, calls=3, answered=2, failures=1, last_status=503), True),
        (ModelUse(needed=True, calls=3, answered=2, failures=1), True),
        (ModelUse(needed=True, calls=3, answered=2, failures=1, last_status=400), False),
    ],
)
def test_an_endpoint_is_asked_before_an_agent_is_blamed_for_a_failed_call(model: ModelUse, suspect: bool) -> None:
    assert is_endpoint_suspect(model) is suspect


def test_an_outcome_can_be_written_whatever_an_agent_called_its_files() -> None:
    odd = "a\udcffb"
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {odd: deep}
    outcome = Outcome(
        rollout_id="r",
        status="ok",
        reason=odd,
        files={odd: "x"},
        files_extra=[odd],
        metadata={"removed": [odd], **deep},
    )
    assert list(outcome.files) == ["a\\udcffb"]
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome


@pytest.mark.parametrize(
    ("failures", "status", "hopeless"),
    [(8, None, False), (9, None, True), (9, 503, False), (30, 503, True), (100, 400, False), (0, None, False)],
)
def test_a_dead_endpoint_is_given_up_and_a_busy_one_is_waited_for(
    failures: int, status: int | None, hopeless: bool
) -> None:
    assert is_hopeless(ModelUse(needed=True, calls=9, failures=failures, last_status=status)) is hopeless
