"""What an `openenv.yaml` may say: its keys, their types and defaults; `openenv.schema.json` is the same for editors.

Knows the file's shape. Must not know how a promise is checked, or how something is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import Self

from .manifest import DEFAULT_APP

VALIDATION_EXAMPLE = """validation:
  reward: {range: [0.0, 1.0], floor_margin: 0.1}
  resources: {cpu: 1.0, memory_mb: 1024, disk_mb: 512, episode_timeout_s: 60.0}
  capabilities: {verifier: {kind: reward_channel}}
  types: {tags: [demo]}"""
SCHEMA_FILE = "openenv.schema.json"
_SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"
_VERSION = r"^\d+(\.\d+)*((a|b|rc|\.dev|\.post|[-+])[0-9A-Za-z.]+)*$"


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path:
        raise ValueError("must be a path inside the package")
    return path


PackagePath = Annotated[str, AfterValidator(_inside)]


class ManifestPart(BaseModel):
    """A mapping in a manifest: it has no other keys than these."""

    model_config = ConfigDict(extra="forbid")


class RewardDeclaration(ManifestPart):
    """Between which numbers rewards lie, and how exact they are."""

    range: tuple[float, float] = Field(default=(0.0, 1.0), description="The least and the highest reward of a step.")
    oracle_tolerance: float = Field(default=0.0, ge=0, description="How far an oracle may stay below the best reward.")
    floor_margin: float = Field(ge=0, description="How far doing nothing must stay below the best reward.")
    variance_tolerance: float | None = Field(
        default=None, ge=0, description="How much rewards of the same episode may differ; for judges."
    )

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if not self.range[0] < self.range[1]:
            raise ValueError("range must be two numbers, the smaller one first")
        return self


class JudgePin(ManifestPart):
    """Which language model judges."""

    model: str
    version: str
    params: dict[str, Any] = Field(default_factory=dict)


class ResourceDeclaration(ManifestPart):
    """What an episode may use."""

    cpu: float = Field(gt=0, description="Cores.")
    memory_mb: int = Field(gt=0)
    disk_mb: int = Field(gt=0)
    episode_timeout_s: float = Field(gt=0, description="How long an episode of the checks may take.")
    gpus: int = Field(default=0, ge=0)
    gpu_types: list[str] = Field(default_factory=list)


class TaskDistributionPin(ManifestPart):
    """Where tasks come from."""

    generator_seed: int | None = None
    dataset_version: str | None = None
    generator_model: str | None = None


class NetworkPolicy(ManifestPart):
    """Which hosts an environment may reach."""

    mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _hosts_are_for_a_list(self) -> Self:
        if self.allowed_hosts and self.mode != "allowlist":
            raise ValueError("allowed_hosts needs mode: allowlist")
        if self.mode == "allowlist" and not self.allowed_hosts:
            raise ValueError("mode: allowlist needs allowed_hosts, at least one")
        return self


class OracleDeclaration(ManifestPart):
    """What reaches the best reward."""

    form: Literal["injected_state", "script"]
    location: PackagePath


class VerifierBinding(ManifestPart):
    """Where rewards come from."""

    kind: Literal["reward_channel", "script"] = Field(description="The step's own reward, or a script.")
    entry: str | None = Field(default=None, description="The script, for kind: script.")

    @model_validator(mode="after")
    def _scripts_have_an_entry(self) -> Self:
        if (self.kind == "script") != (self.entry is not None):
            raise ValueError("entry is for kind: script, and needed there")
        return self


class CapabilitiesSpec(ManifestPart):
    """What an environment offers beyond reset and step."""

    oracle: OracleDeclaration | None = None
    verifier: VerifierBinding
    set_state: bool = False
    llm_judged: bool = Field(default=False, description="Whether a language model judges; needs judge.")
    rubric_tree: bool = False
    task_api: bool = Field(default=False, description="Whether there is a catalogue of tasks.")
    canaries: PackagePath | None = None
    declared_tools: list[str] = Field(default_factory=list, description="The names of its tools.")
    declared_task_count: dict[str, int] = Field(default_factory=dict, description="How many tasks each split has.")

    @model_validator(mode="after")
    def _states_can_be_injected(self) -> Self:
        if self.oracle is not None and self.oracle.form == "injected_state" and not self.set_state:
            raise ValueError("an oracle of form injected_state needs set_state: true")
        return self


class Types(ManifestPart):
    """What kind of environment it is."""

    tags: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


class ExecutionDeclaration(ManifestPart):
    """How the package is run for its checks, and which actions they take."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["openenv_ws"] = "openenv_ws"
    probe_path: PackagePath = Field(default="validation/runtime.json", description="The actions of the checks.")
    dockerfile: PackagePath = "Dockerfile"
    context: PackagePath = "."
    agent_boundary: Literal["api"] = "api"
    requires_credentials: StrictBool = False


class Promises(ManifestPart):
    """What an environment promises of its rewards, its resources and its features."""

    reward: RewardDeclaration
    judge: JudgePin | None = None
    resources: ResourceDeclaration
    task_distribution: TaskDistributionPin | None = None
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    capabilities: CapabilitiesSpec
    types: Types

    @model_validator(mode="after")
    def _judges_are_pinned(self) -> Self:
        if self.capabilities.llm_judged != (self.judge is not None):
            raise ValueError("judge is for capabilities.llm_judged: true, and needed there")
        if self.capabilities.llm_judged and self.reward.variance_tolerance is None:
            raise ValueError("llm_judged needs reward.variance_tolerance")
        return self


class ValidationBlock(Promises):
    """What the environment promises; `openenv validate` holds it to that."""

    execution: ExecutionDeclaration | None = None


class ServeBlock(ManifestPart):
    """How `openenv serve` serves the package; options of the command line win."""

    max_sessions: StrictInt | None = Field(default=None, ge=1, description="Sessions held at once.")
    runner: Literal["auto", "thread", "inline", "process"] | None = Field(
        default=None, description="Where the environment's code runs."
    )
    workers: StrictInt | Literal["auto"] | None = Field(
        default=None, description="Over how many server processes sessions are spread; auto: one per core."
    )
    session_timeout: float | None = Field(default=None, gt=0, description="Seconds that an unused session is kept.")


class EnvManifest(ManifestPart):
    """An environment package: what it is called, what is served, and what it promises."""

    spec_version: Literal[1] = Field(default=1, description="The version of this format.")
    name: StrictStr = Field(min_length=1, description="The environment's name, by convention the package's.")
    version: StrictStr | None = Field(
        default=None, pattern=_VERSION, description="The environment's version; by default that of pyproject.toml."
    )
    description: StrictStr | None = Field(default=None, description="What it is, in a sentence.")
    type: Literal["space"] = Field(default="space", description="Where it is deployed: a Space.")
    runtime: Literal["fastapi"] = Field(default="fastapi", description="What the application is: an ASGI application.")
    app: StrictStr = Field(
        default=DEFAULT_APP,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="The application, an environment class or a function that makes one, as module:name.",
    )
    port: StrictInt = Field(default=8000, ge=1, le=65535, description="The port that it is served on.")
    variables: dict[StrictStr, StrictStr | StrictInt | StrictFloat | StrictBool] = Field(
        default_factory=dict, description="Environment variables, for those that are not set."
    )
    action: StrictStr | None = Field(default=None, description="The name of the action class, for AutoAction.")
    observation: StrictStr | None = Field(default=None, description="The name of the observation class.")
    serve: ServeBlock = Field(default_factory=ServeBlock, description="How openenv serve serves it.")
    validation: ValidationBlock | None = Field(default=None, description="What openenv validate checks.")


class ManifestProblem(NamedTuple):
    """What is wrong with a key of a manifest."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def manifest_problems(data: Mapping[Any, Any]) -> list[ManifestProblem]:
    """Return what is wrong with a manifest: unknown keys, wrong types, versions that are none; empty if nothing is."""
    try:
        EnvManifest.model_validate(dict(data))
    except ValidationError as exc:
        return list(_problems(exc))
    return []


def _problems(exc: ValidationError) -> Iterator[ManifestProblem]:
    for error in exc.errors():
        place = [
            part
            for part in error["loc"]
            if not (isinstance(part, str) and part.startswith(("constrained-", "literal[")))
        ]
        key = ".".join(map(str, place)) or "openenv.yaml"
        yield ManifestProblem(key, _text(error))


def _text(error: Any) -> str:
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return "there is no such key"
    if kind == "missing":
        return "is missing"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"{value} is a number; write it in quotes: '{value}'"
    if kind == "literal_error":
        return f"{value!r} is none of {error['ctx']['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{value!r} is no {'version, such as 0.1.0' if error['loc'][-1] == 'version' else 'module:name'}"
    return str(error["msg"])


def manifest_schema() -> dict[str, Any]:
    """Return the JSON schema of `openenv.yaml`."""
    schema = EnvManifest.model_json_schema(schema_generator=GenerateJsonSchema)
    return {"$schema": _SCHEMA_ID, "title": "openenv.yaml", **{k: v for k, v in schema.items() if k != "title"}}
