"""The `validation:` block of an `openenv.yaml`: what a package promises. Must not know how a promise is checked."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from .rules import CheckFailed

SIGNATURE = "openenv.yaml"
EXAMPLE = """validation:
  reward: {range: [0.0, 1.0], floor_margin: 0.1}
  resources: {cpu: 1.0, memory_mb: 1024, disk_mb: 512, episode_timeout_s: 60.0}
  capabilities: {verifier: {kind: reward_channel}}
  types: {tags: [demo]}"""


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path:
        raise ValueError("must be a path inside the package")
    return path


PackagePath = Annotated[str, AfterValidator(_inside)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Reward(_Part):
    """Between which numbers rewards lie, and how exact they are."""

    range: tuple[float, float] = (0.0, 1.0)
    oracle_tolerance: float = Field(default=0.0, ge=0)
    floor_margin: float = Field(ge=0)
    variance_tolerance: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if not self.range[0] < self.range[1]:
            raise ValueError("range must be two numbers, the smaller one first")
        return self


class Judge(_Part):
    """Which language model judges."""

    model: str
    version: str
    params: dict[str, Any] = Field(default_factory=dict)


class Resources(_Part):
    """What an episode may use."""

    cpu: float = Field(gt=0)
    memory_mb: int = Field(gt=0)
    disk_mb: int = Field(gt=0)
    episode_timeout_s: float = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    gpu_types: list[str] = Field(default_factory=list)


class TaskDistribution(_Part):
    """Where tasks come from."""

    generator_seed: int | None = None
    dataset_version: str | None = None
    generator_model: str | None = None


class Network(_Part):
    """Which hosts an environment may reach."""

    mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _hosts_are_for_a_list(self) -> Self:
        if self.allowed_hosts and self.mode != "allowlist":
            raise ValueError("allowed_hosts needs mode: allowlist")
        return self


class OracleSpec(_Part):
    """What reaches the best reward."""

    form: Literal["injected_state", "script"]
    location: PackagePath


class Verifier(_Part):
    """Where rewards come from."""

    kind: Literal["reward_channel", "script"]
    entry: str | None = None

    @model_validator(mode="after")
    def _scripts_have_an_entry(self) -> Self:
        if (self.kind == "script") != (self.entry is not None):
            raise ValueError("entry is for kind: script, and needed there")
        return self


class Capabilities(_Part):
    """What an environment offers beyond reset and step."""

    oracle: OracleSpec | None = None
    verifier: Verifier
    set_state: bool = False
    llm_judged: bool = False
    rubric_tree: bool = False
    task_api: bool = False
    canaries: PackagePath | None = None
    declared_tools: list[str] = Field(default_factory=list)
    declared_task_count: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _states_can_be_injected(self) -> Self:
        if self.oracle is not None and self.oracle.form == "injected_state" and not self.set_state:
            raise ValueError("an oracle of form injected_state needs set_state: true")
        return self


class Types(_Part):
    """What kind of environment it is."""

    tags: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


class Execution(_Part):
    """How the package is run for its checks, and which actions they take."""

    kind: Literal["openenv_ws"] = "openenv_ws"
    probe_path: PackagePath = "validation/runtime.json"
    dockerfile: PackagePath = "Dockerfile"
    context: PackagePath = "."
    agent_boundary: Literal["api"] = "api"
    requires_credentials: bool = False


class Manifest(_Part):
    """A package's promises, with what it left out filled in."""

    manifest_schema_version: Literal["1", "2"]
    name: str
    version: str | None = None
    signature: str = SIGNATURE
    reward: Reward
    judge: Judge | None = None
    resources: Resources
    task_distribution: TaskDistribution | None = None
    network: Network = Field(default_factory=Network)
    capabilities: Capabilities
    types: Types
    execution: Execution | None = None

    @model_validator(mode="after")
    def _judges_are_pinned(self) -> Self:
        if self.capabilities.llm_judged != (self.judge is not None):
            raise ValueError("judge is for capabilities.llm_judged: true, and needed there")
        if self.capabilities.llm_judged and self.reward.variance_tolerance is None:
            raise ValueError("llm_judged needs reward.variance_tolerance")
        return self

    def report(self) -> dict[str, Any]:
        """Return the manifest for a report, without `execution` where the package declares none."""
        return self.model_dump(mode="json", exclude={"execution"} if self.execution is None else set())


def read_validation(folder: Path) -> Manifest:
    """Read the promises of a package.

    Raises:
        CheckFailed: There are none, or they do not fit.
    """
    from ...server.loading import TargetError, read_manifest

    try:
        data = read_manifest(folder / SIGNATURE)
    except (TargetError, OSError, UnicodeDecodeError) as error:
        fix = f"write {SIGNATURE} as a mapping with name, app and validation"
        raise CheckFailed(str(error), fix=fix) from error
    name, version = data.get("name"), data.get("version")
    if not isinstance(name, str) or not name:
        raise CheckFailed("there is no name", fix=f"give the environment a name in {SIGNATURE}")
    block = data.get("validation")
    if block is None:
        raise CheckFailed(f"{SIGNATURE} has no validation block", fix=f"add one, such as:\n{EXAMPLE}")
    if not isinstance(block, dict):
        raise CheckFailed("validation is not a mapping", fix=f"write it as one, such as:\n{EXAMPLE}")
    fields = {key: value for key, value in block.items() if key not in ("manifest_schema_version", "name", "signature")}
    if extra := sorted(str(key) for key in block.keys() - fields.keys()):
        raise CheckFailed(f"{', '.join(extra)}: not a field of validation", fix="remove it")
    schema: Literal["1", "2"] = "2" if "execution" in block else "1"
    version = None if version is None else str(version)
    try:
        return Manifest(manifest_schema_version=schema, **{"version": version, **fields, "name": name})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'validation'}: {one['msg']}" for one in error.errors()]
        raise CheckFailed(*problems, fix=f"correct the validation block; a complete one:\n{EXAMPLE}") from error
    except TypeError as error:
        raise CheckFailed("keys of validation must be words", fix="correct them") from error
