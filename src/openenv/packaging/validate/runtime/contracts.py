"""What passes between the runner, providers and graders: plans, how an image is launched, what was seen of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..manifest import ExecutionDeclaration, NetworkPolicy, ResourceDeclaration

MAX_PLAN_BYTES = 65536
MAX_PLAN_ACTIONS = 100
MAX_JSON_DEPTH = 32
MAX_JSON_NODES = 10000
_RESERVED_OPTIONS = ("episode_id", "seed")


class RuntimePlanError(ValueError):
    """The plan of a package cannot be read, or is none."""


class RuntimeReset(BaseModel):
    """The arguments of the measured episode's reset."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    episode_id: str = Field(min_length=1, max_length=128)
    seed: int = Field(ge=0, le=2**32 - 1)
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("options")
    @classmethod
    def _leaves_the_others_alone(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in _RESERVED_OPTIONS if name in options]:
            raise ValueError(f"{' and '.join(taken)} must stand beside options, not in them")
        return options


class RuntimePlan(BaseModel):
    """The measured episode: its reset and its actions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    plan_schema_version: Literal["1"]
    reset: RuntimeReset
    actions: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_PLAN_ACTIONS)


def load_runtime_plan(root: Path, execution: ExecutionDeclaration) -> RuntimePlan:
    """Read the plan that a manifest names.

    Raises:
        RuntimePlanError: It cannot be read, is too long or too deep, or something in it does not fit.
    """
    return read_runtime_plan(root / execution.probe_path)


def read_runtime_plan(path: Path, defaults: Mapping[str, Any] | None = None) -> RuntimePlan:
    """Read a plan from a file; `defaults` are the fields, also of the reset, that it may leave out.

    Raises:
        RuntimePlanError: As for `load_runtime_plan`.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise RuntimePlanError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_PLAN_BYTES:
        raise RuntimePlanError(f"{path.name} is longer than {MAX_PLAN_BYTES} bytes")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        _require_small(data)
        if defaults is not None and isinstance(data, dict):
            data = {**defaults, **data}
            if isinstance(data["reset"], dict):
                data["reset"] = {**defaults["reset"], **data["reset"]}
        return RuntimePlan.model_validate(data)
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, one['loc'])) or path.name}: {one['msg']}" for one in error.errors()[:3])
        raise RuntimePlanError(f"{path.name} is no plan: {where}") from error
    except (ValueError, RecursionError) as error:
        raise RuntimePlanError(f"{path.name} is no plan: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a key twice: which value counts depends on the reader."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def _require_small(data: Any) -> None:
    nodes, todo = 0, [(data, 1)]
    while todo:
        value, depth = todo.pop()
        nodes += 1
        if nodes > MAX_JSON_NODES or depth > MAX_JSON_DEPTH:
            raise ValueError(f"more than {MAX_JSON_NODES} values, or more than {MAX_JSON_DEPTH} levels of them")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        todo += [(child, depth + 1) for child in children]


class LaunchSpec(BaseModel):
    """How an image is run for the checks of its package."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image_ref: str = Field(pattern=r"^(?:[^@\s]+@)?sha256:[0-9a-f]{64}$")
    resources: ResourceDeclaration
    network: NetworkPolicy
    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    startup_timeout_s: float = Field(default=30.0, gt=0, le=300)
    env_vars: dict[str, str] = Field(default_factory=dict, max_length=64)


@dataclass(frozen=True)
class WireExchange:
    """A request to the environment and its reply, as they were on the wire."""

    operation: Literal["reset", "step", "state"]
    request_json: str
    response_json: str


@dataclass(frozen=True)
class RuntimeEvidence:
    """What was seen of an episode; with a `failure_phase` it ended before its plan did."""

    exchanges: tuple[WireExchange, ...] = ()
    observation_schema_json: str | None = None
    failure_phase: str | None = None
    failure_reason: str | None = None
    reset_observation_schema_json: str | None = None


class ProbeOutcome(BaseModel):
    """What came of an attempt to reach something."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    result: Literal["reachable", "denied", "inconclusive"]
    errno: int | None = None


class NetworkProbe(BaseModel):
    """The same attempt from a container with a network (`control`) and from the package's namespace (`subject`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["tcp", "udp", "icmp"]
    control: ProbeOutcome
    subject: ProbeOutcome


class NamespaceEvidence(BaseModel):
    """What a network namespace has."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    interfaces: list[str]
    default_route: bool
    ipv6_non_loopback: int = Field(ge=0)
    listening_ports: list[int] = Field(default_factory=list)


class NetworkEvidence(BaseModel):
    """What a package can reach, measured from its network namespace."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    requested_mode: Literal["public", "no-network"]
    subject_network_mode: str
    namespace: NamespaceEvidence
    probes: list[NetworkProbe]
