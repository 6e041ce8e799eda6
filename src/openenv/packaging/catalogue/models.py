"""The data of a catalogue: entries, their cards, issues, the snapshot; profile 0.1-draft.

A card declares; it verifies nothing. Models are strict and frozen, so that the same content has the same digest.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

PROFILE_VERSION: Final = "0.1-draft"
ENVIRONMENT_MEDIA_TYPE: Final = "application/vnd.openenv.environment-card+json"
ARD_CONTEXT: Final = "https://agenticresourcediscovery.org/context/v1"
# An agent with these as tools could reset or end its own episode.
SIMULATION_CONTROLS = frozenset({"reset", "step", "state", "get_state"})
# A catalogue is loaded whole, so its size has a limit.
MAX_CATALOG_BYTES = 16 * 1024 * 1024
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
# A name between slashes that is neither `.` nor `..`: many JSON schema engines have no look-ahead.
_PART = rf"(?:[^./\\{_CONTROL}]|\.[^./\\{_CONTROL}]|\.\.[^./\\{_CONTROL}]|\.\.\.)[^/\\{_CONTROL}]*"
_PATH = rf"^(?:\.|{_PART}(?:/{_PART})*)$"
_OWNER_AND_NAME = re.compile(r"/(?P<id>(?!\.\.?/)[\w.-]+/(?!\.\.?\.git$)[\w.-]+)\.git", re.ASCII)


def relative_path(value: str) -> str:
    """Return a path inside of a repository as it is.

    Raises:
        ValueError: It is absolute, has backslashes, control characters, or parts such as `..`.
    """
    if not re.fullmatch(_PATH.removeprefix("^").removesuffix("$"), value):
        raise ValueError(f"{value!r} must be a normalized path relative to the repository, with / between its parts")
    return value


def github_repository(uri: str) -> str:
    """Return `owner/name` of the address `https://github.com/owner/name.git`.

    Raises:
        ValueError: It is another address, or has a user, a query or a fragment.
    """
    # A user, a query or a fragment could point the address elsewhere, or carry a secret.
    parts = urlsplit(uri)
    match = _OWNER_AND_NAME.fullmatch(parts.path)
    if parts.scheme != "https" or parts.netloc.lower() != "github.com" or parts.query or parts.fragment or not match:
        raise ValueError(f"{uri!r} must be the address of a repository: https://github.com/OWNER/NAME.git")
    return match["id"]


def metadata_url(value: str) -> str:
    """Return an HTTPS address as it is.

    Raises:
        ValueError: The address does not use HTTPS, or has a user or a password.
    """
    parts = urlsplit(value)
    if parts.scheme != "https" or not parts.hostname or "@" in parts.netloc or "\\" in parts.netloc:
        raise ValueError(f"{value!r} must be an HTTPS address without credentials")
    return value


def license_name(value: str) -> str:
    """Return an SPDX expression in its canonical form; `other` and `unknown` stay."""
    return value if value in ("other", "unknown") else str(canonicalize_license_expression(value))


NonEmpty = Annotated[str, StringConstraints(min_length=1, max_length=8192, pattern=r"\S")]
RepresentativeQueries = (
    Annotated[list[NonEmpty], Field(max_length=0)] | Annotated[list[NonEmpty], Field(min_length=2, max_length=5)]
)
# A full hash only: branches and short hashes can come to mean another commit.
Revision = Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
# A domain name, as in the URNs of Agentic Resource Discovery.
Publisher = Annotated[
    str,
    StringConstraints(
        min_length=3,
        max_length=253,
        pattern=r"^(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?\.)+[a-zA-Z]{2,63}$",
    ),
]
RelativePath = Annotated[
    NonEmpty,
    AfterValidator(relative_path),
    Field(json_schema_extra={"allOf": [{"pattern": _PATH}, {"not": {"pattern": f"[{_CONTROL}]"}}]}),
]
MetadataURL = Annotated[NonEmpty, AfterValidator(metadata_url)]
Availability = Literal["resolvable", "external", "unknown"]


class CatalogError(ValueError):
    """A catalogue cannot be built, read, written or searched; the text says why."""


class ProfileModel(BaseModel):
    """A model of the profile: strict, immutable, without extra fields."""

    # Strict: a catalogue is exchanged between programs, which must read the same values.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


# -- one environment ------------------------------------------------------------------------------------------------


class Owner(ProfileModel):
    """The account that has the source."""

    authority: NonEmpty
    id: NonEmpty


class RepositorySource(ProfileModel):
    """A repository at one commit."""

    provider: Literal["github"]
    id: NonEmpty
    uri: NonEmpty
    revision: Revision

    @model_validator(mode="after")
    def consistent_repository(self) -> RepositorySource:
        """Raise if name and address differ."""
        # The same fact twice must agree.
        if self.id != github_repository(self.uri):
            raise ValueError(f"the id {self.id!r} is not the repository of {self.uri}")
        return self


class EnvironmentSource(RepositorySource):
    """A folder of a repository at one commit."""

    path: RelativePath


class GitArtifact(ProfileModel):
    """The source from which the environment can be fetched."""

    kind: Literal["git"]
    uri: NonEmpty
    path: RelativePath
    revision: Revision


class OrchestrationInterface(ProfileModel):
    """The interface of trainers: reset, step, state."""

    role: Literal["orchestration"]
    protocol: Literal["openenv"]


class AgentToolsInterface(ProfileModel):
    """The interface of agents, as the source declares it."""

    role: Literal["agent-tools"]
    protocol: NonEmpty
    status: Literal["declared"]
    source_revision: Revision


Interface = Annotated[OrchestrationInterface | AgentToolsInterface, Field(discriminator="role")]


def _when(field: str, value: str, then: JsonValue, otherwise: JsonValue = True) -> JsonValue:
    """Return a condition of a JSON schema: if a field has a value, another one holds."""
    condition: JsonValue = {"properties": {field: {"const": value}}, "required": [field]}
    return {"if": condition, "then": then, "else": otherwise}


class EnvironmentCard(ProfileModel):
    """An environment at one commit."""

    model_config = ConfigDict(
        json_schema_extra={
            "$comment": "Validation also compares the artifacts and tools with the source, and parses addresses, SPDX "
            "expressions and requirements; a schema cannot express that.",
            "allOf": [
                _when(
                    "artifact_availability",
                    "resolvable",
                    {"properties": {"artifacts": {"minItems": 1}}, "required": ["artifacts"]},
                    {"properties": {"artifacts": {"maxItems": 0}}},
                ),
                _when(
                    "license",
                    "other",
                    {"properties": {"license_url": {"type": "string"}}, "required": ["license_url"]},
                ),
            ],
        }
    )

    schema_version: Literal["0.1-draft"]
    name: NonEmpty
    description: NonEmpty
    owner: Owner | Literal["unknown"]
    source: EnvironmentSource
    artifact_availability: Availability
    artifacts: list[GitArtifact] = Field(default_factory=list)
    license: NonEmpty
    license_url: MetadataURL | None = None
    interfaces: list[Interface] = Field(
        json_schema_extra={
            "contains": {
                "type": "object",
                "properties": {"role": {"const": "orchestration"}},
                "required": ["role"],
            },
            "minContains": 1,
            "maxContains": 1,
        }
    )
    manifest_spec_version: int | str | None = None
    framework_requirement: NonEmpty | None = None

    @field_validator("license")
    @classmethod
    def declared_license(cls, value: str) -> str:
        """Return the canonical form of an SPDX expression."""
        return license_name(value)

    @field_validator("framework_requirement")
    @classmethod
    def declared_requirement(cls, value: str | None) -> str | None:
        """Raise for a requirement of another package than this one."""
        if value is not None and canonicalize_name(Requirement(value).name) != "openenv":
            raise ValueError(f"{value!r} must be a requirement of openenv")
        return value

    @model_validator(mode="after")
    def subject_and_claims(self) -> EnvironmentCard:
        """Raise if a claim describes another source, or contradicts another claim."""
        # Only a resolvable environment has something to fetch.
        if bool(self.artifacts) != (self.artifact_availability == "resolvable"):
            raise ValueError(f"{len(self.artifacts)} artifacts do not fit {self.artifact_availability!r}")
        # An artifact of another commit would run different code than the card describes.
        place = (self.source.uri, self.source.path, self.source.revision)
        if any((one.uri, one.path, one.revision) != place for one in self.artifacts):
            raise ValueError("an artifact is not the source of the card")
        if self.license == "other" and self.license_url is None:
            raise ValueError("the license 'other' needs license_url")
        # Trainers need one way to run an episode, not a choice.
        if sum(one.role == "orchestration" for one in self.interfaces) != 1:
            raise ValueError("a card has exactly one interface of the role 'orchestration'")
        tools = [one for one in self.interfaces if isinstance(one, AgentToolsInterface)]
        if any(one.source_revision != self.source.revision for one in tools):
            raise ValueError("tools are declared at another commit than the card's")
        if len({one.protocol for one in tools}) != len(tools):
            raise ValueError("tools are declared twice for one protocol")
        return self


class DiscoveryEntry(ProfileModel):
    """An environment in a catalogue, in the form of Agentic Resource Discovery."""

    context: Literal["https://agenticresourcediscovery.org/context/v1"] = Field(default=ARD_CONTEXT, alias="@context")
    identifier: NonEmpty
    display_name: NonEmpty = Field(alias="displayName")
    type: Literal["application/vnd.openenv.environment-card+json"] = ENVIRONMENT_MEDIA_TYPE
    data: EnvironmentCard
    description: NonEmpty
    tags: list[NonEmpty] = Field(default_factory=list)
    capabilities: list[NonEmpty] = Field(default_factory=list)
    representative_queries: RepresentativeQueries = Field(default_factory=list, alias="representativeQueries")
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def revision_card(self) -> DiscoveryEntry:
        """Raise if the identifier belongs to another commit, or the card lacks a claimed tool."""
        if not (self.identifier.startswith("urn:air:") and self.identifier.endswith(f":{self.data.source.revision}")):
            raise ValueError(f"{self.identifier!r} does not name the commit {self.data.source.revision}")
        # Checked here too, because catalogues may be written by hand.
        refuse_controls(self.capabilities)
        if self.capabilities and not any(one.role == "agent-tools" for one in self.data.interfaces):
            raise ValueError("capabilities need an interface of the role 'agent-tools'")
        return self


def refuse_controls(names: list[str]) -> None:
    """Raise for tools that would let an agent control its episode.

    Raises:
        ValueError: One of them is `reset`, `step`, `state` or `get_state`.
    """
    controls = [name for name in names if name.casefold() in SIMULATION_CONTROLS]
    if controls:
        raise ValueError(f"{', '.join(controls)} controls the simulation and cannot be a tool of agents")


# -- the whole catalogue --------------------------------------------------------------------------------------------


class Inventory(ProfileModel):
    """The folder that was searched, and the environments in it."""

    root: RelativePath
    paths: list[RelativePath]

    @model_validator(mode="after")
    def direct_children(self) -> Inventory:
        """Raise for paths that are not directly in the folder."""
        prefix = "" if self.root == "." else f"{self.root}/"
        # Environments are direct children of the folder; deeper ones would be found twice.
        for path in self.paths:
            if path == "." or not path.startswith(prefix) or "/" in path.removeprefix(prefix):
                raise ValueError(f"{path!r} is not directly in {self.root!r}")
        return self


class CatalogIssue(ProfileModel):
    """A problem of one environment. An error removes its entry from the catalogue."""

    path: RelativePath
    code: NonEmpty
    message: NonEmpty
    severity: Literal["warning", "error"]


class Generator(ProfileModel):
    """What made the catalogue."""

    name: Literal["openenv-git-catalog"] = "openenv-git-catalog"
    version: Literal["1"] = "1"


class CatalogSnapshot(ProfileModel):
    """All environments of a repository at one commit."""

    schema_version: Literal["0.1-draft"] = PROFILE_VERSION
    publisher: Publisher
    source: RepositorySource
    generator: Generator = Field(default_factory=Generator)
    inventory: Inventory
    entries: list[DiscoveryEntry]
    issues: list[CatalogIssue] = Field(default_factory=list)
    complete: bool
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def inventory_accounting(self) -> CatalogSnapshot:
        """Raise unless the inventory equals the entries and the environments with errors."""
        for entry in self.entries:
            source = entry.data.source
            if source.model_dump(exclude={"path"}) != self.source.model_dump():
                raise ValueError(f"{entry.identifier} is of another source than the catalogue")
            if not entry.identifier.startswith(f"urn:air:{self.publisher}:"):
                raise ValueError(f"{entry.identifier} is of another publisher than the catalogue")
        for what, values in (
            ("paths", self.inventory.paths),
            ("identifiers", [entry.identifier for entry in self.entries]),
            ("paths of entries", [entry.data.source.path for entry in self.entries]),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"{what} are repeated in the catalogue")
        # Every environment is accounted for: an entry, or an error.
        entries = {entry.data.source.path for entry in self.entries}
        errors = {issue.path for issue in self.issues if issue.severity == "error"}
        if entries & errors or entries | errors != set(self.inventory.paths):
            raise ValueError("each environment of the inventory needs either an entry or an error")
        if self.complete == bool(errors):
            raise ValueError("a catalogue is complete if it has no errors")
        return self


class SearchMatch(ProfileModel):
    """An entry, and how many percent of the words it has."""

    entry: DiscoveryEntry
    score: Annotated[int, Field(ge=0, le=100)]


class SupersededEntry(ProfileModel):
    """An entry before and after."""

    previous: DiscoveryEntry
    current: DiscoveryEntry


class CatalogChanges(ProfileModel):
    """The differences between two snapshots of one catalogue."""

    added: list[DiscoveryEntry]
    withdrawn: list[DiscoveryEntry]
    superseded: list[SupersededEntry]
    """Of another commit."""
    corrected: list[SupersededEntry]
    """Of the same commit, with another content."""
