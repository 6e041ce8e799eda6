"""Catalogues of a repository's environments: what is declared, what is wrong, the file, searches, changes."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from openenv.cli.__main__ import build
from openenv.cli.discover import REFERENCE, reference_environments
from openenv.discovery import (
    CatalogError,
    CatalogSnapshot,
    EnvironmentCard,
    build_catalog,
    compare_catalogs,
    load_catalog,
    resolve_entry,
    search_catalog,
    write_catalog,
)
from openenv.packaging.catalogue.metadata import framework_requirement, license_declaration, yaml_mapping
from openenv.packaging.catalogue.models import github_repository, metadata_url, relative_path
from openenv.packaging.catalogue.repository import GitMetadataSource, MetadataError
from openenv.packaging.catalogue.serialization import catalog_digest, parse_json
from program_interpreters import Interpreter

ROOT = Path(__file__).resolve().parents[3]

NAMES = {
    "openenv.discovery.errors": "CatalogError",
    "openenv.discovery.metadata": """
        CatalogError DiscoveryDeclaration GitMetadataSource MetadataError ProfileModel
        ToolDeclaration discovery_declaration framework_requirement license_declaration parse_json project_metadata
        readme_metadata yaml_mapping
    """,
    "openenv.discovery.models": """
        ARD_CONTEXT AgentToolsInterface CatalogChanges CatalogIssue CatalogSnapshot DiscoveryEntry
        ENVIRONMENT_MEDIA_TYPE EnvironmentCard EnvironmentSource Generator GitArtifact Inventory MAX_CATALOG_BYTES
        OrchestrationInterface Owner PROFILE_VERSION ProfileModel RepositorySource SIMULATION_CONTROLS SearchMatch
        SupersededEntry github_repository metadata_url relative_path
    """,
    "openenv.discovery.producer": """
        AgentToolsInterface CatalogError CatalogIssue CatalogSnapshot DiscoveryDeclaration DiscoveryEntry
        EnvironmentCard EnvironmentSource GitArtifact GitMetadataSource Inventory MetadataError
        OrchestrationInterface Owner PROFILE_VERSION RepositorySource build_catalog catalog_digest
        discovery_declaration framework_requirement license_declaration project_metadata readme_metadata yaml_mapping
    """,
    "openenv.discovery.repository": """
        CatalogError GIT_TIMEOUT_SECONDS GitMetadataSource MAX_ENVIRONMENTS MAX_METADATA_BYTES MAX_TREE_BYTES
        MetadataError github_repository relative_path
    """,
    "openenv.discovery.search": """
        CatalogChanges CatalogError CatalogSnapshot DiscoveryEntry SUPPORTED_FILTERS SearchMatch SupersededEntry
        compare_catalogs require_complete resolve_entry search_catalog
    """,
    "openenv.discovery.serialization": """
        CatalogError CatalogSnapshot MAX_CATALOG_BYTES catalog_digest load_catalog parse_json require_complete
        write_catalog
    """,
}
URI = "https://github.com/me/envs.git"
FILES = {
    "LICENSE": "terms",
    "pyproject.toml": '[project]\nname = "all"\nversion = "1"\nlicense = "Apache-2.0"\nlicense-files = ["LICENSE"]\n',
    "envs/maze/openenv.yaml": "spec_version: 1\nname: maze\ndescription: Find the way out of a maze\n",
    "envs/maze/pyproject.toml": '[project]\nname = "openenv-maze"\nversion = "1"\nlicense = {text = "mit"}\n'
    'dependencies = ["numpy", "openenv[core]>=0.2"]\n',
    "envs/maze/README.md": "---\ntags: [grid, openenv]\nlicense: MIT\n---\n# Maze\n",
    "envs/chess_env/openenv.yaml": "name: chess\ndescription: Schach spielen, größer\n",
    "envs/tools/openenv.yaml": "name: tools\n",
    "envs/tools/discovery.json": json.dumps(
        {
            "description": "Add numbers",
            "tags": ["b", "a"],
            "representative_queries": ["who adds", "what is a sum"],
            "license": "other",
            "license_source": "LICENSE",
            "artifact_availability": "external",
            "agent_tools": {"protocol": "mcp", "names": ["add"], "source": "envs/tools/openenv.yaml"},
        }
    ),
    "envs/deep/er/openenv.yaml": "name: not directly in the folder\n",
    "envs/notes.txt": "no environment",
}


def commit(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a change"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    commit(tmp_path / "envs-repo", FILES)
    return tmp_path / "envs-repo"


def made(repository: Path, **options: Any) -> CatalogSnapshot:
    return build_catalog(repository, repository_uri=URI, publisher="example.org", **options)


def cards(snapshot: CatalogSnapshot) -> dict[str, EnvironmentCard]:
    return {entry.data.name: entry.data for entry in snapshot.entries}


# -- building -------------------------------------------------------------------------------------------------------


def test_each_environment_directly_in_the_folder_has_an_entry(repository: Path) -> None:
    snapshot = made(repository)
    assert snapshot.complete
    assert snapshot.inventory.paths == ["envs/chess_env", "envs/maze", "envs/tools"]
    maze = cards(snapshot)["maze"]
    assert maze.license == "MIT"
    assert maze.license_url == f"https://github.com/me/envs/blob/{snapshot.source.revision}/envs/maze/pyproject.toml"
    assert maze.framework_requirement == "openenv[core]>=0.2"
    assert maze.manifest_spec_version == 1
    assert maze.source.id == "me/envs"
    assert cards(snapshot)["chess"].license == "Apache-2.0"  # the repository's
    entry = snapshot.entries[1]
    assert entry.tags == ["grid", "openenv"]
    assert entry.metadata["provenance"] == {
        "name": "envs/maze/openenv.yaml#name",
        "description": "envs/maze/openenv.yaml#description",
        "source": URI,
        "license": "envs/maze/pyproject.toml",
        "framework_requirement": "envs/maze/pyproject.toml#project.dependencies",
        "manifest_spec_version": "envs/maze/openenv.yaml#spec_version",
    }


def test_a_declaration_for_catalogues_comes_first(repository: Path) -> None:
    entry = made(repository).entries[2]
    assert (entry.description, entry.tags, entry.capabilities) == ("Add numbers", ["a", "b"], ["add"])
    assert entry.representative_queries == ["who adds", "what is a sum"]
    assert [one.role for one in entry.data.interfaces] == ["orchestration", "agent-tools"]
    assert (entry.data.artifact_availability, entry.data.artifacts) == ("external", [])
    assert (entry.data.license, str(entry.data.license_url).rpartition("/")[2]) == ("other", "LICENSE")


def test_only_what_is_committed_counts(repository: Path) -> None:
    digest = made(repository).digest
    (repository / "envs" / "maze" / "openenv.yaml").write_text("name: changed\ndescription: x\n")
    (repository / "envs" / "new").mkdir()
    (repository / "envs" / "new" / "openenv.yaml").write_text("name: new\ndescription: x\n")
    assert made(repository).digest == digest


def test_a_license_that_two_files_declare_differently_is_unknown_with_a_warning(repository: Path) -> None:
    commit(repository, {"envs/maze/README.md": "---\nlicense: GPL-3.0-only\n---\n"})
    snapshot = made(repository)
    assert snapshot.complete
    assert [(issue.path, issue.code, issue.severity) for issue in snapshot.issues] == [
        ("envs/maze", "license_conflict", "warning")
    ]
    assert (cards(snapshot)["maze"].license, cards(snapshot)["maze"].license_url) == ("unknown", None)


@pytest.mark.parametrize(
    ("file", "text", "code", "fragment"),
    [
        ("openenv.yaml", "name: [", "invalid_metadata", "not valid YAML"),
        ("openenv.yaml", "name: a\nname: b\ndescription: c", "invalid_metadata", "unique"),
        ("openenv.yaml", "- a", "invalid_metadata", "mapping"),
        ("openenv.yaml", "name: 3\ndescription: x", "invalid_metadata", "name has to be a text"),
        ("openenv.yaml", "name: a", "invalid_metadata", "no description"),
        ("pyproject.toml", "[project", "invalid_metadata", "not valid TOML"),
        ("pyproject.toml", "project = 3", "invalid_metadata", "table"),
        ("README.md", "---\ntags: [a]\n", "invalid_metadata", "no end"),
        ("README.md", "---\ntags: a\n---\n", "invalid_metadata", "tags"),
        ("discovery.json", "{", "invalid_metadata", "JSON"),
        ("discovery.json", '{"colour": "red"}', "invalid_metadata", "colour"),
        ("discovery.json", '{"license": "MIT", "license_source": "nowhere"}', "missing_metadata", "nowhere"),
        (
            "discovery.json",
            '{"agent_tools": {"protocol": "mcp", "names": ["reset"], "source": "envs/maze/x"}}',
            "invalid_metadata",
            "reset",
        ),
        (
            "discovery.json",
            '{"agent_tools": {"protocol": "mcp", "names": ["a"], "source": "LICENSE"}}',
            "invalid_metadata",
            "must be a file of the environment",
        ),
    ],
)
def test_an_environment_with_wrong_metadata_makes_the_catalogue_incomplete(
    repository: Path, file: str, text: str, code: str, fragment: str
) -> None:
    commit(repository, {f"envs/maze/{file}": text})
    snapshot = made(repository)
    assert not snapshot.complete
    (issue,) = [one for one in snapshot.issues if one.severity == "error"]
    assert (issue.path, issue.code) == ("envs/maze", code)
    assert fragment in issue.message
    with pytest.raises(CatalogError, match="incomplete: envs/maze"):
        search_catalog(snapshot, "maze")


def test_links_and_large_files_are_not_read(repository: Path) -> None:
    (repository / "envs" / "maze" / "openenv.yaml").unlink()
    (repository / "envs" / "maze" / "openenv.yaml").symlink_to("../tools/openenv.yaml")
    commit(repository, {"envs/tools/openenv.yaml": f"name: tools\n# {'x' * 1024 * 1024}\n"})
    assert [issue.code for issue in made(repository).issues] == ["symlink_metadata", "metadata_limit"]


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"publisher": "somebody"}, "domain"),
        ({"namespace": "a:b"}, "namespace"),
        ({"revision": "nowhere"}, "git cannot read"),
        ({"revision": "--help"}, "git cannot read"),
        ({"root": "other"}, "other does not exist"),
        ({"root": "../x"}, "normalized"),
        ({"repository_uri": "https://user@github.com/me/envs.git"}, "must be the address of a repository"),
        ({"repository_uri": "https://github.com/me/envs"}, "must be the address of a repository"),
    ],
)
def test_a_wrong_argument_says_what_to_do(repository: Path, options: dict[str, str], fragment: str) -> None:
    arguments = {"repository_uri": URI, "publisher": "example.org", **options}
    with pytest.raises(CatalogError, match=fragment):
        build_catalog(repository, **arguments)


def test_a_folder_without_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="git cannot read"):
        made(tmp_path)


def test_the_root_of_the_repository_can_be_the_folder(tmp_path: Path) -> None:
    commit(tmp_path / "r", {"maze/openenv.yaml": "name: maze\ndescription: x\n", "openenv.yaml": "name: root\n"})
    assert made(tmp_path / "r", root=".").inventory.paths == ["maze"]


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_catalogue_survives_a_file(repository: Path, tmp_path: Path) -> None:
    snapshot = made(repository)
    write_catalog(snapshot, tmp_path / "catalog.json")
    assert load_catalog(tmp_path / "catalog.json") == snapshot
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["catalog.json"]
    assert snapshot.digest == catalog_digest(snapshot)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda text: text.replace("Find the way", "Lose the way"), "digest"),
        (lambda text: text.replace('"complete": true', '"complete": false'), "complete"),
        (lambda text: text[:-40], "not valid JSON"),
        (lambda text: text.replace('"complete"', '"complete": true, "complete"', 1), "twice"),
        (lambda text: text.replace('"0.1-draft"', '"0.2"'), "0.1-draft"),
        (lambda text: text.replace('"complete": true', '"complete": NaN'), "NaN"),
    ],
)
def test_a_changed_file_is_refused(
    repository: Path, tmp_path: Path, change: Callable[[str], str], fragment: str
) -> None:
    path = tmp_path / "catalog.json"
    write_catalog(made(repository), path)
    path.write_text(change(path.read_text()))
    with pytest.raises(CatalogError, match=fragment):
        load_catalog(path)


def test_a_file_that_cannot_be_written_or_read_is_an_error(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="cannot be written"):
        write_catalog(made(repository), tmp_path / "no" / "catalog.json")
    with pytest.raises(CatalogError, match="cannot be read"):
        load_catalog(tmp_path / "none.json")
    snapshot = made(repository)
    with pytest.raises(CatalogError, match="digest"):
        write_catalog(snapshot.model_copy(update={"publisher": "example.com"}), tmp_path / "catalog.json")


def test_models_are_strict_and_frozen(repository: Path) -> None:
    snapshot = made(repository)
    with pytest.raises(ValidationError, match="frozen"):
        snapshot.publisher = "example.com"
    data = snapshot.entries[0].data.model_dump()
    for wrong, fragment in (
        ({"artifacts": []}, "do not fit"),
        ({"license": "other", "license_url": None}, "needs license_url"),
        ({"interfaces": []}, "exactly one"),
        ({"framework_requirement": "numpy"}, "openenv"),
        ({"source": {**data["source"], "id": "you/envs"}}, "not the repository"),
        ({"colour": "red"}, "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=fragment):
            EnvironmentCard.model_validate({**data, **wrong})


# -- searching ------------------------------------------------------------------------------------------------------


def test_entries_with_more_of_the_words_come_first(repository: Path) -> None:
    snapshot = made(repository)
    matches = search_catalog(snapshot, "the MAZE, a sum?")
    assert [(match.entry.display_name, match.score) for match in matches] == [("maze", 75), ("tools", 50)]
    assert [match.entry.display_name for match in search_catalog(snapshot, "GRÖSSER")] == ["chess"]
    assert not search_catalog(snapshot, "poker")
    assert len(search_catalog(snapshot, "")) == 3
    assert len(search_catalog(snapshot, "", limit=1)) == 1


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"tags": "grid"}, ["maze"]),
        ({"license": "MIT"}, ["maze"]),
        ({"name": "chess"}, ["chess"]),
        ({"artifact_availability": "external"}, ["tools"]),
        ({"tags": "grid", "license": "other"}, []),
    ],
)
def test_filters_are_exact(repository: Path, filters: dict[str, str], names: list[str]) -> None:
    matches = search_catalog(made(repository), "", filters=filters)
    assert [match.entry.display_name for match in matches] == names


def test_a_wrong_search_says_what_to_do(repository: Path) -> None:
    snapshot = made(repository)
    with pytest.raises(CatalogError, match="did you mean license"):
        search_catalog(snapshot, "", filters={"licence": "MIT"})
    with pytest.raises(CatalogError, match="1 to 1000"):
        search_catalog(snapshot, "", limit=0)
    with pytest.raises(CatalogError, match="8192"):
        search_catalog(snapshot, "x" * 8193)
    with pytest.raises(CatalogError, match=r"maze is the name of urn:air:example\.org:openenv:"):
        resolve_entry(snapshot, "maze")


def test_changes_between_two_commits(repository: Path) -> None:
    before = made(repository)
    (repository / "envs" / "tools" / "openenv.yaml").unlink()
    commit(repository, {"envs/pond/openenv.yaml": "name: pond\ndescription: Throw stones\n"})
    after = made(repository)
    changes = compare_catalogs(before, after)
    assert [entry.display_name for entry in changes.added] == ["pond"]
    assert [entry.display_name for entry in changes.withdrawn] == ["tools"]
    assert [pair.current.display_name for pair in changes.superseded] == ["chess", "maze"]
    assert not changes.corrected
    with pytest.raises(CatalogError, match="different"):
        compare_catalogs(before, build_catalog(repository, repository_uri=URI, publisher="example.com"))


def test_a_correction_is_another_entry_of_the_same_commit(repository: Path) -> None:
    before = made(repository)
    entries = [before.entries[0].model_copy(update={"tags": ["new"]}), *before.entries[1:]]
    changed = before.model_copy(update={"entries": entries})
    after = changed.model_copy(update={"digest": catalog_digest(changed)})
    changes = compare_catalogs(before, after)
    assert [pair.current.tags for pair in changes.corrected] == [["new"]]
    assert not changes.superseded


# -- parts ----------------------------------------------------------------------------------------------------------


def test_paths_addresses_and_json_are_strict() -> None:
    assert relative_path("a/...b/.c") == "a/...b/.c"
    for path in ("", "/a", "a/../b", "./a", "a//b", "a\\b", "a\nb", ".."):
        with pytest.raises(ValueError, match="normalized"):
            relative_path(path)
    assert github_repository("https://github.com/a-b/c.d.git") == "a-b/c.d"
    for uri in ("http://github.com/a/b.git", "https://github.com/a/...git", "https://github.com/a/b.git?x=1"):
        with pytest.raises(ValueError, match="repository"):
            github_repository(uri)
    assert metadata_url("https://example.org/x") == "https://example.org/x"
    with pytest.raises(ValueError, match="credentials"):
        metadata_url("https://user:pw@example.org/x")
    with pytest.raises(CatalogError, match="Infinity"):
        parse_json("[Infinity]")
    with pytest.raises(MetadataError, match="unique texts"):
        yaml_mapping("1: a", "x.yaml")


def test_licenses_and_requirements() -> None:
    assert license_declaration(None) is None
    expressions = [("mit", "MIT"), ({"file": "LICENSE"}, "unknown"), ("Own terms", "other"), ("unknown", "unknown")]
    for value, expression in expressions:
        declared = license_declaration(value)
        assert declared is not None
        assert declared.expression == expression
    with pytest.raises(MetadataError, match="either"):
        license_declaration({"file": "a", "text": "b"})
    assert framework_requirement({"dependencies": ["openenv-core", "OpenEnv>=0.3"]}) == "OpenEnv>=0.3"
    for wrong in (["openenv", "openenv[x]"], ["not a requirement !"], "openenv", [3]):
        with pytest.raises(MetadataError):
            framework_requirement({"dependencies": wrong})


def test_a_source_reads_files_of_its_commit(repository: Path) -> None:
    source = GitMetadataSource(repository, URI, "HEAD", "envs")
    assert source.read("LICENSE") == "terms"
    assert source.read("nowhere") is None
    with pytest.raises(MetadataError, match="nowhere") as caught:
        source.read("nowhere", required=True)
    assert caught.value.code == "missing_metadata"
    assert source.url("a b.md").endswith("/a%20b.md")


@pytest.mark.parametrize("module", NAMES)
def test_the_published_names_are_where_they_were(module: str) -> None:
    names = vars(importlib.import_module(module))
    assert not set(NAMES[module].split()) - names.keys()


# -- the command line -----------------------------------------------------------------------------------------------


def call(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments[:1]), list(arguments), env={"COLUMNS": "200"})


def write(repository: Path, path: Path) -> Result:
    source = ["--repository", str(repository), "--repository-uri", URI, "--publisher", "example.org"]
    return call("catalog", "build", *source, "--output", str(path))


def test_a_catalogue_is_built_searched_and_inspected(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    result = write(repository, path)
    assert result.exit_code == 0, result.output
    assert "3 records, snapshot sha256:" in result.stderr
    assert "complete=true" in result.stderr
    identifier = made(repository).entries[1].identifier
    shown = call("discover", "way out", "--catalog", str(path))
    assert shown.exit_code == 0
    assert shown.stdout.startswith("maze: Find the way out of a maze\n  source: https://github.com/me/envs.git\n")
    assert f"  identifier: {identifier}\n" in shown.stdout
    document = json.loads(call("discover", "--catalog", str(path), "--filter", "tags=grid", "--json").stdout)
    assert (document["metadataOnly"], document["snapshot"]) == (True, made(repository).digest)
    assert [(one["displayName"], one["score"]) for one in document["results"]] == [("maze", 0)]
    entry = json.loads(call("catalog", "inspect", identifier, "--catalog", str(path)).stdout)
    assert entry["identifier"] == identifier
    assert "None of 3" in call("discover", "poker", "--catalog", str(path)).stdout


def test_the_reference_environments_are_those_of_the_repository() -> None:
    packages = sorted((ROOT / "envs").glob("*_env/pyproject.toml"))
    described = {path.parent.name: path.read_text("utf-8") for path in packages}
    assert sorted(REFERENCE) == sorted(described)
    for name, text in described.items():
        assert f'description = "{REFERENCE[name]}"' in text


def test_reference_environments_are_offered_unless_they_are_installed() -> None:
    assert [name for _, name in reference_environments("", [])] == list(REFERENCE)
    assert reference_environments("chess", [])[0][1] == "chess_env"
    assert "chess_env" not in [name for _, name in reference_environments("", ["chess_env"])]


def test_without_a_catalogue_the_installed_environments_are_searched() -> None:
    shown = call("discover", "a gridworld")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("gridworld_env: ")
    assert "  serve: openenv serve " in shown.stdout
    found = json.loads(call("discover", "gridworld", "--limit", "1", "--json").stdout)["results"]
    assert [(one["name"], one["score"]) for one in found] == [("gridworld_env", 100)]
    assert "None of 10 installed and reference environments matches" in call("discover", "xyzzy").stdout
    refused = call("discover", "--filter", "tags=grid")
    assert (refused.exit_code, "needs --catalog" in refused.stderr) == (2, True)


def test_an_incomplete_catalogue_is_written_with_exit_code_1(repository: Path, tmp_path: Path) -> None:
    commit(repository, {"envs/maze/openenv.yaml": "name: \x1b[31mred"})
    path = tmp_path / "catalog.json"
    result = write(repository, path)
    assert result.exit_code == 1
    assert "error: envs/maze: " in result.stderr
    assert "\x1b[31m" not in result.stderr
    assert json.loads(path.read_text())["complete"] is False
    assert call("discover", "--catalog", str(path)).exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("discover", "--catalog", "none.json"),
        ("discover", "--catalog", "CATALOG", "--filter", "tags"),
        ("discover", "--catalog", "CATALOG", "--filter", "tags=a", "--filter", "tags=b"),
        ("discover", "--catalog", "CATALOG", "--filter", "size=3"),
        ("catalog", "inspect", "maze", "--catalog", "CATALOG"),
    ],
)
def test_a_wrong_question_has_exit_code_1(repository: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "catalog.json"
    write(repository, path)
    result = call(*(str(path) if word == "CATALOG" else word for word in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")


@pytest.mark.published
@pytest.mark.slow
def test_the_published_package_builds_the_same_file_and_reads_ours(
    repository: Path, tmp_path: Path, published: Interpreter
) -> None:
    ours = tmp_path / "ours.json"
    assert write(repository, ours).exit_code == 0
    source = ["--repository", str(repository), "--repository-uri", URI, "--publisher", "example.org"]
    theirs = tmp_path / "theirs.json"
    for arguments in (
        ["catalog", "build", *source, "--output", str(theirs)],
        ["discover", "maze", "--catalog", str(ours)],
    ):
        environment = published.environment(tmp_path)
        command = [str(published.python), "-m", "openenv.cli", *arguments]
        subprocess.run(command, check=True, capture_output=True, env=environment)
    assert theirs.read_text() == ours.read_text()
