"""Builds the catalogue of a repository: one entry for each environment at a commit, in a fixed order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .metadata import (
    DiscoveryDeclaration,
    discovery_declaration,
    framework_requirement,
    license_declaration,
    project_metadata,
    readme_metadata,
    yaml_mapping,
)
from .models import (
    PROFILE_VERSION,
    AgentToolsInterface,
    CatalogError,
    CatalogIssue,
    CatalogSnapshot,
    DiscoveryEntry,
    EnvironmentCard,
    EnvironmentSource,
    GitArtifact,
    Inventory,
    OrchestrationInterface,
    Owner,
    Publisher,
    RepositorySource,
)
from .repository import GitMetadataSource, MetadataError
from .serialization import catalog_digest

_INVALID = "invalid_metadata"
_NO_DIGEST = f"sha256:{'0' * 64}"


def build_catalog(
    repository: str | Path,
    *,
    repository_uri: str,
    publisher: str,
    namespace: str = "openenv",
    revision: str = "HEAD",
    root: str = "envs",
) -> CatalogSnapshot:
    """Read the environments of a repository at one commit; no code of theirs is imported.

    An environment with wrong metadata becomes an issue, and the catalogue is incomplete.

    Args:
        repository: The local clone.
        repository_uri: Where others find it: `https://github.com/OWNER/NAME.git`.
        publisher: The domain of those who publish the catalogue.
        namespace: A part of every identifier, for publishers with several catalogues.
        revision: A commit, branch or tag.
        root: The folder with the environments.

    Raises:
        CatalogError: An argument is wrong, or the repository cannot be read.
    """
    try:
        TypeAdapter(Publisher).validate_python(publisher)
    except ValidationError as error:
        raise CatalogError(f"the publisher must be a domain such as example.org, not {publisher!r}") from error
    if not re.fullmatch(r"[A-Za-z0-9._-]+", namespace):
        raise CatalogError(f"the namespace must consist of letters, digits and . _ -, not {namespace!r}")
    source = GitMetadataSource(Path(repository), repository_uri, revision, root)
    root_project = project_metadata(source, "pyproject.toml")
    entries: list[DiscoveryEntry] = []
    issues: list[CatalogIssue] = []
    for path in source.environments:
        try:
            environment = _Declared.read(source, path)
            license_found = _license(environment, root_project)
            entries.append(_entry(environment, license_found, f"urn:air:{publisher}:{namespace}"))
            issues += license_found.issues
        except MetadataError as error:
            issues.append(_error(path, error.code, str(error)))
        except ValidationError as error:
            issues.append(_error(path, _INVALID, _explained(error)))
    snapshot = CatalogSnapshot(
        publisher=publisher,
        source=RepositorySource(provider="github", id=source.repository_id, uri=source.uri, revision=source.revision),
        inventory=Inventory(root=source.root, paths=source.environments),
        entries=entries,
        issues=issues,
        complete=all(issue.severity != "error" for issue in issues),
        digest=_NO_DIGEST,
    )
    return snapshot.model_copy(update={"digest": catalog_digest(snapshot)})


def _error(path: str, code: str, message: str) -> CatalogIssue:
    return CatalogIssue(path=path, code=code, message=message[:8192], severity="error")


def _explained(error: ValidationError) -> str:
    """Return each mistake in one line: its place and its text."""
    return "; ".join(
        f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
        for detail in error.errors(include_url=False, include_input=False, include_context=False)
    )


# -- declarations in files ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Declared:
    """The files of one environment."""

    source: GitMetadataSource
    path: str
    manifest: dict[str, Any]
    project: dict[str, Any]
    readme: dict[str, Any]
    declaration: DiscoveryDeclaration

    @classmethod
    def read(cls, source: GitMetadataSource, path: str) -> _Declared:
        manifest_path = f"{path}/openenv.yaml"
        return cls(
            source,
            path,
            yaml_mapping(source.read(manifest_path, required=True) or "", manifest_path),
            project_metadata(source, f"{path}/pyproject.toml"),
            readme_metadata(source, f"{path}/README.md"),
            discovery_declaration(source, f"{path}/discovery.json"),
        )

    def text(self, key: str, files: Sequence[str]) -> tuple[str, str]:
        """Return the first value of a key in several files, and its place: `envs/maze/openenv.yaml#name`."""
        documents: dict[str, tuple[dict[str, Any], str]] = {
            "discovery.json": (self.declaration.model_dump(exclude_none=True), f"#{key}"),
            "openenv.yaml": (self.manifest, f"#{key}"),
            "pyproject.toml": (self.project, f"#project.{key}"),
            "README.md": (self.readme, f"#{key}"),
        }
        for file in files:
            # The order of files is the precedence.
            document, place = documents[file]
            value = document.get(key)
            if value is not None:
                if not isinstance(value, str) or not value.strip():
                    raise MetadataError(_INVALID, f"{file}: {key} has to be a text, not {value!r}")
                return value, f"{self.path}/{file}{place}"
        raise MetadataError(_INVALID, f"there is no {key}: write one into {' or '.join(files)}")


@dataclass(frozen=True)
class _License:
    expression: str = "unknown"
    file: str | None = None
    issues: tuple[CatalogIssue, ...] = ()


def _license(environment: _Declared, root_project: dict[str, Any]) -> _License:
    """Find the license: that of `discovery.json`, else of project and README if they agree, else the repository's."""
    source, path = environment.source, environment.path
    if environment.declaration.license is not None:
        # A declared license needs a file that shows it, at this commit.
        file = environment.declaration.license_source or f"{path}/discovery.json"
        source.read(file, required=True)
        return _License(environment.declaration.license, file)
    declared = [
        (license_declaration(environment.project.get("license")), f"{path}/pyproject.toml"),
        (license_declaration(environment.readme.get("license")), f"{path}/README.md"),
    ]
    # Files without a license do not count as a disagreement.
    licenses = [(value, file) for value, file in declared if value is not None]
    # Two that say `other` without a text may mean different licenses.
    # Comparing texts would be guessing.
    unclear = len(licenses) == 2 and licenses[0][0].expression == "other" and licenses[0][0].text is None
    if len({value for value, _ in licenses}) > 1 or unclear:
        message = "pyproject.toml and README.md declare different licenses"
        # A warning: the environment stays in the catalogue, with the license unknown.
        issue = CatalogIssue(path=path, code="license_conflict", message=message, severity="warning")
        return _License(issues=(issue,))
    if licenses:
        return _License(licenses[0][0].expression, licenses[0][1])
    of_repository = license_declaration(root_project.get("license"))
    if of_repository is None:
        return _License()
    # PEP 639: `license-files` lists the texts. The first one that exists is linked.
    files = root_project.get("license-files", [])
    texts = [one for one in files if isinstance(one, str) and one in source.files] if isinstance(files, list) else []
    if texts:
        source.read(texts[0], required=True)
    return _License(of_repository.expression, texts[0] if texts else "pyproject.toml")


# -- the entry ------------------------------------------------------------------------------------------------------


def _entry(environment: _Declared, license_found: _License, prefix: str) -> DiscoveryEntry:
    source, path, declaration = environment.source, environment.path, environment.declaration
    name, name_place = environment.text("name", ("openenv.yaml", "pyproject.toml"))
    description, description_place = environment.text(
        "description", ("discovery.json", "openenv.yaml", "pyproject.toml", "README.md")
    )
    # The provenance names the file and the key of each fact, so that readers can check them.
    places: dict[str, Any] = {"name": name_place, "description": description_place, "source": source.uri}
    if license_found.file is not None:
        places["license"] = license_found.file
    # Every environment can be orchestrated; tools for agents are optional.
    interfaces = _interfaces(environment)
    if declaration.agent_tools is not None:
        places["agent_tools"] = declaration.agent_tools.source
    requirement = framework_requirement(environment.project)
    if requirement is not None:
        places["framework_requirement"] = f"{path}/pyproject.toml#project.dependencies"
    if "spec_version" in environment.manifest:
        places["manifest_spec_version"] = f"{path}/openenv.yaml#spec_version"
    # An author may declare that the source alone does not suffice.
    is_resolvable = declaration.artifact_availability == "resolvable"
    artifact = GitArtifact(kind="git", uri=source.uri, path=path, revision=source.revision)
    has_page = license_found.file is not None and license_found.expression != "unknown"
    card = EnvironmentCard(
        schema_version=PROFILE_VERSION,
        name=name,
        description=description,
        owner=Owner(authority="github.com", id=source.repository_id.partition("/")[0]),
        source=EnvironmentSource(
            provider="github", id=source.repository_id, uri=source.uri, path=path, revision=source.revision
        ),
        artifact_availability=declaration.artifact_availability,
        artifacts=[artifact] if is_resolvable else [],
        license=license_found.expression,
        license_url=source.url(license_found.file) if has_page and license_found.file else None,
        interfaces=interfaces,
        manifest_spec_version=environment.manifest.get("spec_version"),
        framework_requirement=requirement,
    )
    # The identifier stays the same for one place and commit, on every machine.
    place = hashlib.sha256(f"{source.uri}\n{path}".encode()).hexdigest()
    return DiscoveryEntry(
        identifier=f"{prefix}:{place}:{source.revision}",
        displayName=name,
        description=description,
        data=card,
        tags=_tags(environment),
        capabilities=declaration.agent_tools.names if declaration.agent_tools is not None else [],
        representativeQueries=declaration.representative_queries,
        metadata={"provenance": places},
    )


def _interfaces(environment: _Declared) -> list[OrchestrationInterface | AgentToolsInterface]:
    interfaces: list[OrchestrationInterface | AgentToolsInterface] = [
        OrchestrationInterface(role="orchestration", protocol="openenv")
    ]
    tools = environment.declaration.agent_tools
    if tools is not None:
        # A source outside of the environment would show the tools of another one.
        if not tools.source.startswith(f"{environment.path}/"):
            raise MetadataError(_INVALID, f"the tools' source {tools.source} must be a file of the environment")
        environment.source.read(tools.source, required=True)
        revision = environment.source.revision
        interfaces.append(
            AgentToolsInterface(
                role="agent-tools", protocol=tools.protocol, status="declared", source_revision=revision
            )
        )
    return interfaces


def _tags(environment: _Declared) -> list[str]:
    tags = environment.declaration.tags or environment.readme.get("tags", [])
    # YAML allows any values as tags; a catalogue has texts.
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise MetadataError(_INVALID, "tags have to be a list of texts")
    return sorted(set(tags))
