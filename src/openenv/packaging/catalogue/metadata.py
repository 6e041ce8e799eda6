"""Declarations in the files of an environment: manifest, project, README, and a `discovery.json` for catalogues."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import yaml
from packaging.licenses import InvalidLicenseExpression
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import Field, field_validator

from openenv.env.manifest import yaml_problem

from .models import (
    Availability,
    CatalogError,
    NonEmpty,
    ProfileModel,
    RelativePath,
    RepresentativeQueries,
    license_name,
    refuse_controls,
)
from .repository import GitMetadataSource, MetadataError
from .serialization import parse_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The code of issues whose cause is the content of a file.
_INVALID = "invalid_metadata"


class ToolDeclaration(ProfileModel):
    """The tools that agents have, and the file that shows it."""

    protocol: NonEmpty
    names: list[NonEmpty] = Field(min_length=1, max_length=256)
    source: RelativePath

    @field_validator("names")
    @classmethod
    def task_tools_only(cls, value: list[str]) -> list[str]:
        """Raise for names that are repeated or control the simulation."""
        if len(set(value)) != len(value):
            raise ValueError("a tool is named twice")
        # Agents must not be offered the controls of the simulation as tools.
        refuse_controls(value)
        return value


class DiscoveryDeclaration(ProfileModel):
    """The content of a `discovery.json`, which overrides the other files."""

    description: NonEmpty | None = None
    tags: list[NonEmpty] = Field(default_factory=list)
    representative_queries: RepresentativeQueries = Field(default_factory=list)
    license: NonEmpty | None = None
    license_source: RelativePath | None = None
    artifact_availability: Availability = "resolvable"
    agent_tools: ToolDeclaration | None = None

    @field_validator("license")
    @classmethod
    def license_expression(cls, value: str | None) -> str | None:
        """Return the canonical form of an SPDX expression."""
        return None if value is None else license_name(value)


def discovery_declaration(source: GitMetadataSource, path: str) -> DiscoveryDeclaration:
    """Read a `discovery.json`; without one everything has its default.

    Raises:
        MetadataError: The text is not JSON.
        pydantic.ValidationError: It has other fields or values.
    """
    text = source.read(path)
    if text is None:
        return DiscoveryDeclaration()
    try:
        data = parse_json(text)
    except CatalogError as error:
        raise MetadataError(_INVALID, f"{path}: {error}") from error
    return DiscoveryDeclaration.model_validate(data)


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML and refuses duplicate keys: the second `a: 1` would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # `deep`: keys may be nested structures, which are then refused.
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
            raise yaml.constructor.ConstructorError(None, None, "keys must be unique texts", node.start_mark)
        return {key: self.construct_object(value, deep=deep) for key, (_, value) in zip(keys, node.value, strict=True)}


def yaml_mapping(value: str, path: str) -> dict[str, Any]:
    """Return the mapping that a YAML text is; the path is for messages.

    Raises:
        MetadataError: It is something else.
    """
    try:
        problem = yaml_problem(value)
        if problem is not None:
            raise MetadataError(_INVALID, f"{path} {problem}")
        data = yaml.load(value, Loader=_StrictLoader)  # a SafeLoader
    # RecursionError: deeply nested YAML of an untrusted repository must not end the whole run.
    except (yaml.YAMLError, RecursionError) as error:
        raise MetadataError(_INVALID, f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise MetadataError(_INVALID, f"{path} has to be a mapping")
    return data


def project_metadata(source: GitMetadataSource, path: str) -> dict[str, Any]:
    """Return the table `[project]` of a `pyproject.toml`, empty without one.

    Raises:
        MetadataError: The text is not TOML, or the name belongs to a value instead of a table.
    """
    text = source.read(path)
    if text is None:
        return {}
    try:
        project = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise MetadataError(_INVALID, f"{path} is not valid TOML: {error}") from error
    if not isinstance(project, dict):
        raise MetadataError(_INVALID, f"{path}: project has to be a table")
    return project


def readme_metadata(source: GitMetadataSource, path: str) -> dict[str, Any]:
    """Return the front matter of a README, empty without one.

    Raises:
        MetadataError: The front matter has no end, or is not a YAML mapping.
    """
    lines = (source.read(path) or "").splitlines()
    # Front matter counts only at the very beginning, as on the Hub.
    if lines[:1] != ["---"]:
        return {}
    if "---" not in lines[1:]:
        raise MetadataError(_INVALID, f"the front matter of {path} has no end")
    return yaml_mapping("\n".join(lines[1 : lines.index("---", 1)]), path)


@dataclass(frozen=True)
class _DeclaredLicense:
    """An SPDX expression, `unknown`, or `other` with the text that is none."""

    expression: str
    text: str | None = None


def license_declaration(value: object) -> _DeclaredLicense | None:
    """Return the license that a project or a README declares: an SPDX expression, or `{text: ...}`, `{file: ...}`.

    Raises:
        MetadataError: It has both a file and a text.
    """
    if isinstance(value, dict):
        if "file" in value and "text" in value:
            raise MetadataError(_INVALID, "a license has either a file or a text")
        # Old projects write {text = "MIT"}; the table form is deprecated since PEP 639.
        value = value.get("text", "")  # a file alone does not say which license it is
    if value is None:
        return None
    # Present but empty: the author meant something that cannot be read.
    if not isinstance(value, str) or not value.strip():
        return _DeclaredLicense("unknown")
    text = value.strip()
    try:
        return _DeclaredLicense(license_name(text))
    except InvalidLicenseExpression:
        return _DeclaredLicense("other", "\n".join(text.splitlines()))


def framework_requirement(project: dict[str, Any]) -> str | None:
    """Return the requirement of openenv in a project, or None without one.

    Raises:
        MetadataError: Dependencies are malformed, or several of them are openenv.
    """
    dependencies = project.get("dependencies", [])
    # Dynamic dependencies are absent here, and so is the requirement.
    if not isinstance(dependencies, list) or not all(isinstance(one, str) for one in dependencies):
        raise MetadataError(_INVALID, "dependencies have to be a list of texts")
    ours: list[str] = []
    for dependency in dependencies:
        try:
            name = canonicalize_name(Requirement(dependency).name)
        except InvalidRequirement as error:
            raise MetadataError(_INVALID, f"{dependency!r} is not a valid requirement") from error
        if name == "openenv":
            ours.append(dependency)
    if len(ours) > 1:
        raise MetadataError(_INVALID, f"openenv is required more than once: {', '.join(ours)}")
    return ours[0] if ours else None
