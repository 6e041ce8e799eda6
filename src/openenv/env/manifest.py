"""`openenv.yaml`, the manifest of a package: reading it, its keys with types and defaults, and its problems.

    read_manifest       plain data, for callers that use a few keys
    manifest_problems   every unknown key, wrong type and invalid version
    package_facts       the name and version around a class, for its metadata

`openenv.schema.json` describes the same keys for editors (`scripts/manifest_schema.py` writes it). This module must not
know how a declaration is checked or how a package is served.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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

MANIFEST = "openenv.yaml"
DEFAULT_APP = "server.app:app"
_DEEPEST_YAML = 64
_LEVELS = 3  # a class may be in PACKAGE/, PACKAGE/server/ or PACKAGE/server/part/
_PROJECT = re.compile(r"(?ms)^\[project\]\s*$(.*?)(?=^\[|\Z)")
_VERSION = re.compile(r"""(?m)^\s*version\s*=\s*["']([^"'\n]+)["']""")
VALIDATION_EXAMPLE = """validation:
  reward: {range: [0.0, 1.0], floor_margin: 0.1}
  resources: {cpu: 1.0, memory_mb: 1024, disk_mb: 512, episode_timeout_s: 60.0}
  capabilities: {verifier: {kind: reward_channel}}
  types: {tags: [demo]}"""
SCHEMA_FILE = "openenv.schema.json"
_SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"
_VERSION_TEXT = r"^\d+(\.\d+)*((a|b|rc|\.dev|\.post|[-+])[0-9A-Za-z.]+)*$"


class ManifestError(ValueError):
    """A manifest cannot be read or is invalid; the text lists each problem and its correction."""

    def __init__(self, errors: list[str], *, remediation: str | None = None) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors
        self.remediation = remediation


def read_manifest(path: Path) -> dict[str, Any]:
    """Read an `openenv.yaml` without checking its values.

    Raises:
        ManifestError: It is not valid YAML, or not a mapping.
        OSError: It cannot be read.
    """
    try:
        return parse_manifest(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as exc:
        raise ManifestError([f"{path} is not valid YAML: {exc}"]) from exc


def parse_manifest(text: str, place: str) -> dict[str, Any]:
    """Read the text of an `openenv.yaml` without checking its values.

    Args:
        text: The text.
        place: Where it is from, for messages.

    Raises:
        ManifestError: It is not valid YAML, has aliases, or is not a mapping.
    """
    import yaml  # only packages have a manifest

    try:
        problem = yaml_problem(text)
        data = yaml.safe_load(text) if problem is None else None
    except (yaml.YAMLError, RecursionError, ValueError) as exc:  # ValueError: 2001-99-99 is read as a date
        raise ManifestError([f"{place} is not valid YAML: {exc}"]) from exc
    if problem is not None:
        raise ManifestError([f"{place} {problem}"])
    if not isinstance(data, dict):
        raise ManifestError([f"{place} must be a mapping (a YAML dictionary) with at least a name"])
    return data


def yaml_problem(text: str) -> str | None:
    """Return why a YAML text of others is not read, and where: aliases, or values that are nested too deeply.

    Raises:
        yaml.YAMLError: It is not valid YAML.
    """
    import yaml

    # Aliases make a few lines a document of gigabytes (`b: [*a, *a]`, `c: [*b, *b]`), or one that contains itself. Time
    # grows with the square of the depth: 5,000 brackets take seconds.
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if getattr(event, "anchor", None) is not None:
            return f"has a YAML anchor or alias in line {event.start_mark.line + 1}: write the value itself"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            return f"is nested more than {_DEEPEST_YAML} deep in line {event.start_mark.line + 1}"
    return None


def project_version(folder: Path) -> str | None:
    """Return the version that the `pyproject.toml` of a folder declares, if there is one."""
    try:
        project = _PROJECT.search((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    version = None if project is None else _VERSION.search(project.group(1))
    return None if version is None else version.group(1)


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """Facts from the files around a class; None for a fact that no file has."""

    name: str | None = None
    version: str | None = None


def package_facts(cls: type[Any]) -> PackageFacts:
    """Read name and version from the `openenv.yaml` of a class's package, and the version from its `pyproject.toml`.

    The package is the folder of the class's module, or one of two above it, if it has an `openenv.yaml`. Without one, a
    `pyproject.toml` beside the module itself gives the version.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return PackageFacts()
    folders = Path(file).resolve().parents[:_LEVELS]
    folder = next((one for one in folders if (one / MANIFEST).is_file()), None)
    if folder is None:
        return PackageFacts(version=project_version(folders[0])) if folders else PackageFacts()
    try:
        data = read_manifest(folder / MANIFEST)
    except (ManifestError, OSError):  # `openenv serve` and `validate` report the problem
        data = {}
    name, version = data.get("name"), data.get("version")
    return PackageFacts(
        name if isinstance(name, str) and name else None,
        version if isinstance(version, str) and version else project_version(folder),
    )


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path:
        raise ValueError("must be a path inside the package")
    return path


PackagePath = Annotated[str, AfterValidator(_inside)]


class ManifestPart(BaseModel):
    """A mapping in a manifest; unknown keys are invalid."""

    # Most programs read no manifest, so the validators are built on first use.
    model_config = ConfigDict(extra="forbid", defer_build=True)


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
    """The resources of an episode."""

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
    """An environment's features beyond reset and step."""

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
    """An environment's promises about its rewards, its resources and its features."""

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
    """The environment's promises, which `openenv validate` checks."""

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
    """An environment package: its name, its served classes, and its promises."""

    spec_version: Literal[1] = Field(default=1, description="The version of this format.")
    name: StrictStr = Field(min_length=1, description="The environment's name, by convention the package's.")
    version: StrictStr | None = Field(
        default=None, pattern=_VERSION_TEXT, description="The environment's version; by default that of pyproject.toml."
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
    """A problem with a key of a manifest."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def manifest_problems(data: Mapping[Any, Any]) -> list[ManifestProblem]:
    """Return a manifest's problems: unknown keys, wrong types, invalid versions; empty for a valid one."""
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
        return "unknown key"
    if kind == "missing":
        return "is missing"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"{value} is a number; write it in quotes: '{value}'"
    if kind == "literal_error":
        return f"{value!r} is not valid; choose from {error['ctx']['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{value!r} is not a {'version such as 0.1.0' if error['loc'][-1] == 'version' else 'module:name path'}"
    return str(error["msg"])


def manifest_schema() -> dict[str, Any]:
    """Return the JSON schema of `openenv.yaml`."""
    schema = EnvManifest.model_json_schema(schema_generator=GenerateJsonSchema)
    return {"$schema": _SCHEMA_ID, "title": "openenv.yaml", **{k: v for k, v in schema.items() if k != "title"}}
