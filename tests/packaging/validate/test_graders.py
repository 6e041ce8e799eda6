"""Graders judge what was recorded of a package; they run in order, and one that breaks does not end the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from openenv.env.manifest import VALIDATION_EXAMPLE, NetworkPolicy
from openenv.packaging.validate.graders import (
    GraderRegistry,
    NetworkPolicyGrader,
    ObservationSchemaGrader,
    RewardWellFormedGrader,
    StateContractGrader,
    StaticManifestGrader,
    Subject,
    execute_graders,
    order_graders,
)
from openenv.packaging.validate.manifest import NormalizedManifest, OpenEnvYamlParser
from openenv.packaging.validate.policy import PolicyError, load_policy
from openenv.packaging.validate.recording import RuntimeEvidence, WireExchange
from openenv.packaging.validate.report import CheckResult
from openenv.packaging.validate.rules import CheckStatus, Level, ProviderCapability
from openenv.packaging.validate.runner import default_grader_registry

PASS, FAIL, SKIP, ERROR = CheckStatus.PASS, CheckStatus.FAIL, CheckStatus.SKIP, CheckStatus.ERROR
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "reward": {}, "done": {}},
        "additionalProperties": False,
    }
)


@pytest.fixture
def manifest(tmp_path: Path) -> NormalizedManifest:
    (tmp_path / "openenv.yaml").write_text(f"name: maze\n{VALIDATION_EXAMPLE}\n")
    return OpenEnvYamlParser().parse(tmp_path)


@pytest.fixture
def subject(manifest: NormalizedManifest, tmp_path: Path) -> Callable[..., Subject]:
    def make(evidence: RuntimeEvidence | None = None, network: Any = None, mode: str = "public") -> Subject:
        policy = NetworkPolicy.model_validate({"mode": mode})
        text = None if network is None else json.dumps(network)
        changed = manifest.model_copy(update={"network": policy})
        return Subject(tmp_path, changed, None, None, tmp_path, runtime_evidence=evidence, network_evidence_json=text)

    return make


def episode(*, reward: Any = 0.5, x: Any = 1, steps: Any = 1, episode_id: str = "a", **fields: Any) -> RuntimeEvidence:
    def exchange(operation: Any, request: Any, reply: Any) -> WireExchange:
        kind = "state" if operation == "state" else "observation"
        return WireExchange(
            operation, json.dumps({"type": operation, "data": request}), json.dumps({"type": kind, "data": reply})
        )

    return RuntimeEvidence(
        (
            exchange("reset", {"episode_id": "a"}, {"observation": {"x": 1}, "reward": None, "done": False}),
            exchange("state", None, {"episode_id": "a", "step_count": 0}),
            exchange("step", {"go": 1}, {"observation": {"x": x, **fields}, "reward": reward, "done": True}),
            exchange("state", None, {"episode_id": episode_id, "step_count": steps}),
        ),
        SCHEMA,
    )


@pytest.mark.parametrize(
    ("grader", "evidence", "problem"),
    [
        (RewardWellFormedGrader(), episode(), None),
        (RewardWellFormedGrader(), episode(reward=7), "step 1: 7 is not within 0 and 1"),
        (RewardWellFormedGrader(), episode(reward="much"), "no finite number"),
        (ObservationSchemaGrader(), episode(), None),
        (ObservationSchemaGrader(), episode(x="one"), "step 1: x: 'one' is not of type integer"),
        (ObservationSchemaGrader(), episode(terminated=True, truncated=False), None),
        (ObservationSchemaGrader(), episode(terminated="yes"), "step 1: terminated: there is no such field"),
        (ObservationSchemaGrader(), episode(over=True), "step 1: over: there is no such field"),
        (StateContractGrader(), episode(), None),
        (StateContractGrader(), episode(steps=9), "after step 1: step_count is 9"),
        (StateContractGrader(), episode(episode_id="b"), "'a' was asked for"),
        (StateContractGrader(), RuntimeEvidence((WireExchange("reset", "{}", "[]"),), SCHEMA), "cannot be read"),
    ],
)
def test_a_recorded_episode_is_judged(
    grader: Any, evidence: RuntimeEvidence, problem: str | None, subject: Callable[..., Subject]
) -> None:
    result = grader.run(subject(evidence))
    assert result.status is (PASS if problem is None else FAIL)
    assert problem is None or problem in result.evidence[0]
    assert result.measured == {"exchanges": len(evidence.exchanges)}


def test_without_a_whole_episode_nothing_is_judged(subject: Callable[..., Subject]) -> None:
    cut_short = RuntimeEvidence(failure_phase="step", failure_reason="boom")
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        assert grader.run(subject()).status is SKIP
        assert grader.run(subject(cut_short)).evidence == [
            "unmet dependency: runtime.startup (the episode is incomplete)"
        ]


def test_a_schema_that_takes_forever_is_ended(subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.packaging.validate.graders._SCHEMAS_S", 2.0)
    schema = json.dumps({"properties": {"x": {"pattern": "^(a+)+$"}}})
    evidence = RuntimeEvidence(episode(x="a" * 40 + "!").exchanges, schema)
    result = ObservationSchemaGrader().run(subject(evidence))
    assert (result.status, "TimeoutError" in result.evidence[0]) == (FAIL, True)


def measured(control: str = "reachable", inside: str = "denied", mode: str = "no-network", **namespace: Any) -> Any:
    probe = {"control": {"result": control}, "subject": {"result": inside}}
    return {
        "requested_mode": mode,
        "subject_network_mode": "none",
        "namespace": {"interfaces": ["lo"], "default_route": False, "ipv6_non_loopback": 0, **namespace},
        "probes": [{"kind": kind, **probe} for kind in ("tcp", "udp")],
    }


@pytest.mark.parametrize(
    ("network", "mode", "status", "text"),
    [
        (measured(), "no-network", PASS, "what is declared"),
        (measured(inside="reachable"), "no-network", FAIL, "tcp reached the sink"),
        (measured(control="denied"), "no-network", SKIP, "a denial proves nothing"),
        (measured(inside="inconclusive"), "no-network", SKIP, "not proven for tcp, udp"),
        (measured(interfaces=["lo", "eth0"]), "no-network", FAIL, "eth0"),
        (measured(default_route=True), "no-network", FAIL, "default route"),
        (measured(ipv6_non_loopback=1), "no-network", FAIL, "IPv6"),
        (measured(), "public", FAIL, "no-network was measured"),
        (measured(mode="public"), "public", FAIL, "without a network"),
        ({"probes": []}, "public", FAIL, "cannot be read"),
        (None, "no-network", SKIP, "not measured"),
    ],
)
def test_the_network_must_be_what_is_declared(
    network: Any, mode: str, status: CheckStatus, text: str, subject: Callable[..., Subject]
) -> None:
    result = NetworkPolicyGrader().run(subject(network=network, mode=mode))
    assert (result.status, text in result.evidence[0]) == (status, True), result


class Custom:
    """A grader as another package may have one."""

    level = Level.RUNTIME
    requires_capabilities: frozenset[str] = frozenset()
    requires_provider: frozenset[ProviderCapability] = frozenset()

    def __init__(self, check_id: str, *depends_on: str, fails: bool = False, **needs: Any) -> None:
        self.check_id, self.depends_on, self._fails = check_id, depends_on, fails
        self.__dict__.update(needs)

    def applies_to(self, manifest: NormalizedManifest) -> bool:
        return True

    def run(self, subject: Subject) -> CheckResult:
        if self._fails:
            raise ValueError("a secret")
        return CheckResult(check_id=self.check_id, status=PASS, duration_s=0.0)


def test_graders_run_in_order_and_what_fails_takes_its_dependents_along(subject: Callable[..., Subject]) -> None:
    graders = [
        Custom("a.last", "a.broken"),
        Custom("a.broken", fails=True),
        Custom("a.gpu", requires_provider=frozenset({ProviderCapability.GPU})),
        Custom("a.served", "runtime.startup"),
    ]
    prior = [CheckResult(check_id="runtime.startup", status=PASS, duration_s=0.0)]
    results = execute_graders(graders, subject(), prior=prior)
    assert [(one.check_id, one.status) for one in results] == [
        ("a.broken", ERROR),
        ("a.gpu", SKIP),
        ("a.served", PASS),
        ("a.last", SKIP),
    ]
    assert results[0].evidence == ["the grader failed (ValueError)"]  # and not what the error says
    assert results[3].evidence == ["unmet dependency: a.broken"]


def test_graders_that_depend_on_each_other_are_an_error() -> None:
    with pytest.raises(PolicyError, match=r"a\.b"):
        order_graders([Custom("a.b", "a.c"), Custom("a.c", "a.b")])
    with pytest.raises(PolicyError, match="two graders"):
        order_graders([Custom("a.b"), Custom("a.b")])


def test_a_registry_selects_by_level_and_declared_capabilities(manifest: NormalizedManifest) -> None:
    registry = GraderRegistry()
    registry.register(Custom("a.always"))
    registry.register(Custom("a.oracle", requires_capabilities=frozenset({"oracle"})))
    assert [grader.check_id for grader in registry.select(manifest, Level.SEMANTIC)] == ["a.always"]
    assert registry.select(manifest, Level.STATIC) == []
    with pytest.raises(ValueError, match="already"):
        registry.register(Custom("a.always"))
    with pytest.raises(ValueError, match="nothing_such"):
        registry.register(Custom("a.other", requires_capabilities=frozenset({"nothing_such"})))
    assert registry.get("a.none") is None


def test_a_grader_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("sbom", "no_such_module:Grader", "openenv.packaging.validate.graders")
    monkeypatch.setattr("openenv.packaging.validate.graders.entry_points", lambda group: [point])
    with pytest.raises(ValueError, match=r"'sbom' \(no_such_module:Grader\) cannot be loaded: ModuleNotFoundError"):
        GraderRegistry().load_entry_points()


def test_the_default_graders_are_the_published_ones(manifest: NormalizedManifest) -> None:
    registry = default_grader_registry(load_policy("v2"))
    assert [grader.check_id for grader in registry.select(manifest, Level.SEMANTIC)] == [
        "static.manifest",
        "runtime.reward_well_formed",
        "runtime.observation_schema",
        "runtime.state_contract",
        "runtime.network_policy",
    ]
    assert isinstance(registry.get("static.manifest"), StaticManifestGrader)
