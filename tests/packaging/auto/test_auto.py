"""Environments by name: what is installed, near names, servers that are started, Spaces from a double of the Hub."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments import Idle
from openenv import AutoAction, AutoEnv
from openenv.client.env_client import EnvClient, GenericAction, GenericEnvClient
from openenv.env.manifest import ManifestError, parse_manifest, read_manifest
from openenv.packaging.auto.hub import InstallationFailed, repo_of
from openenv.packaging.auto.installed import EnvironmentDiscovery, cache_file, get_discovery, short_name
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.testing import serve

CLIENT = """
from openenv import Action, Observation, State, StepResult, EnvClient

class PondAction(Action):
    stone: int = 1

class PondObservation(Observation):
    rings: int = 0

class PondEnv(EnvClient[PondAction, PondObservation, State]):
    def _step_payload(self, action):
        return action.model_dump()
    def _parse_result(self, payload):
        return StepResult(PondObservation(**payload["observation"]), payload.get("reward"), payload.get("done", False))
    def _parse_state(self, payload):
        return State(**payload)
"""
APP = """
from openenv import Environment, State, create_app
from pond_env.client import PondAction, PondObservation

class Pond(Environment[PondAction, PondObservation, State]):
    state = State()
    def reset(self, **kwargs):
        return PondObservation()
    def step(self, action, **kwargs):
        return PondObservation(rings=2 * action.stone, reward=1.0)

app = create_app(Pond, PondAction, PondObservation)
"""
MANIFEST = "spec_version: 1\nname: pond_env\ntype: space\nruntime: fastapi\napp: server.app:app\nport: 8000\n"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "openenv-pond_env"
version = "0.3.0"
description = "Throw stones"
dependencies = ["openenv[core]", "a-package-that-does-not-exist-anywhere"]
[tool.hatch.build.targets.wheel]
packages = ["pond_env"]
"""


def write_package(folder: Path, manifest: str = MANIFEST) -> None:
    package = folder / "pond_env"
    (package / "server").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(CLIENT)
    (package / "openenv.yaml").write_text(manifest)
    (package / "server" / "__init__.py").write_text("")
    (package / "server" / "app.py").write_text(APP)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("OPENENV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    get_discovery().clear_cache()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "pond_env"]:
        del sys.modules[name]
    get_discovery().clear_cache()


@pytest.fixture
def pond(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installed package, as pip leaves it."""
    folder = tmp_path / "site"
    write_package(folder)
    info = folder / "openenv_pond_env-0.3.0.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: openenv-pond_env\nVersion: 0.3.0\nSummary: Throw stones\n"
    (info / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize("name", ["pond", "pond-env", "pond_env", "Pond"])
def test_an_installed_environment_has_several_names(pond: Path, name: str) -> None:
    info = AutoEnv.get_env_info(name)
    assert info == {
        "env_key": "pond",
        "name": "pond_env",
        "package": "openenv-pond_env",
        "version": "0.3.0",
        "description": "Throw stones",
        "env_class": "PondEnv",
        "action_class": "PondAction",
        "observation_class": "PondObservation",
        "module": "pond_env.client",
        "default_image": "pond-env:latest",
        "spec_version": 1,
    }
    assert AutoEnv.get_env_class(name).__name__ == "PondEnv"
    assert AutoAction.from_env(name).__name__ == "PondAction"
    assert AutoAction.get_action_info(name)["action_class"] == "PondAction"


def test_nothing_is_imported_to_find_environments(pond: Path) -> None:
    AutoEnv.get_env_info("pond")
    assert "pond_env" not in sys.modules


def test_this_package_is_no_environment(pond: Path) -> None:
    assert "core" not in get_discovery().discover()
    assert {"pond", "echo"} <= get_discovery().discover().keys()


def test_an_unknown_name_suggests_near_ones(pond: Path) -> None:
    for ask in (AutoEnv.from_env, AutoEnv.get_env_class, AutoAction.from_env):
        with pytest.raises(ValueError, match="Did you mean: pond"):
            ask("pong")


def test_an_older_manifest_names_the_classes(pond: Path) -> None:
    (pond / "pond_env" / "openenv.yaml").write_text("name: pond\nversion: 9\naction: Throw\nobservation: Rings\n")
    assert AutoEnv.get_env_info("pond")["action_class"] == "Throw"
    with pytest.raises(ImportError, match="no class Throw"):
        AutoAction.from_env("pond")


def test_a_broken_manifest_is_as_none(pond: Path) -> None:
    (pond / "pond_env" / "openenv.yaml").write_text("name: [")
    assert AutoEnv.get_env_info("pond")["spec_version"] is None
    with pytest.raises(ValueError, match=r"no openenv\.yaml"):
        AutoEnv.from_env("pond")


def test_a_missing_dependency_is_named(pond: Path) -> None:
    client = pond / "pond_env" / "client.py"
    client.write_text(f"import not_there_at_all\n{client.read_text()}")
    with pytest.raises(ImportError, match="needs not_there_at_all"):
        AutoEnv.get_env_class("pond")


def test_lists_are_printed(pond: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoEnv.list_environments()
    AutoAction.list_actions()
    shown = capsys.readouterr().out
    assert "Throw stones (0.3.0)" in shown
    assert "PondAction (openenv-pond_env)" in shown


def test_what_was_found_is_kept_in_a_file_of_the_users_own(pond: Path, tmp_path: Path) -> None:
    AutoEnv.get_env_info("pond")
    kept = tmp_path / "cache" / "discovery_cache.json"
    assert kept == cache_file()
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_text(kept.read_text().replace("Throw stones", "Throw pebbles"))
    other = EnvironmentDiscovery()  # as another process has it
    assert other.discover()["pond"].description == "Throw pebbles"
    assert other.discover()["pond"].folder == pond / "pond_env"
    assert other.discover(use_cache=False)["pond"].description == "Throw stones"


def test_the_file_is_out_of_date_once_something_changes(pond: Path) -> None:
    AutoEnv.get_env_info("pond")
    (pond / "pond_env" / "openenv.yaml").write_text(f"{MANIFEST}version: 7.0.0\n")
    assert EnvironmentDiscovery().discover()["pond"].version == "7.0.0"
    (pond / "openenv_pond_env-0.3.0.dist-info").rename(pond / "openenv_pool_env-0.3.0.dist-info")
    metadata = pond / "openenv_pool_env-0.3.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("pond", "pool"))
    assert "pool" in EnvironmentDiscovery().discover()


@pytest.mark.parametrize("damage", ["writable", "link", "broken", "older"])
def test_a_file_that_cannot_be_trusted_is_not_read(pond: Path, tmp_path: Path, damage: str) -> None:
    AutoEnv.get_env_info("pond")
    kept = tmp_path / "cache" / "discovery_cache.json"
    text = kept.read_text().replace("Throw stones", "Throw pebbles")
    if damage == "link":
        (tmp_path / "elsewhere").write_text(text)
        kept.unlink()
        kept.symlink_to(tmp_path / "elsewhere")
    else:
        kept.write_text({"broken": text[:-20], "older": "{}"}.get(damage, text))
        kept.chmod(0o666 if damage == "writable" else 0o600)
    assert EnvironmentDiscovery().discover()["pond"].description == "Throw stones"


def test_classes_are_found_with_other_capitals_and_tools_have_actions_of_their_own(pond: Path) -> None:
    client = "from openenv.client.mcp_client import MCPToolClient\nclass PonDEnv(MCPToolClient): pass\n"
    (pond / "pond_env" / "client.py").write_text(client)
    assert AutoEnv.get_env_class("pond").__name__ == "PonDEnv"
    assert AutoAction.from_env("pond") is CallToolAction
    assert get_discovery().require("pond").get_observation_class() is CallToolObservation


def test_the_published_names_are_where_they_were() -> None:
    for module, names in (
        ("auto_env", "AutoEnv get_discovery hf_space_subdomain run_async_safely"),
        ("auto_action", "AutoAction AutoEnv get_discovery"),
        ("_discovery", "EnvironmentDiscovery EnvironmentInfo get_discovery reset_discovery"),
    ):
        assert not set(names.split()) - vars(importlib.import_module(f"openenv.auto.{module}")).keys()


def test_there_are_no_instances() -> None:
    for factory in (AutoEnv, AutoAction):
        with pytest.raises(TypeError, match="from_env"):
            factory()


def test_a_server_that_runs_is_used(pond: Path) -> None:
    with serve(Idle) as served:
        client = AutoEnv.from_env("pond", base_url=served.url)
        generic = AutoEnv.from_env("anything", base_url=served.url, skip_install=True)
        assert type(client).__name__ == "PondEnv"
        assert type(generic) is GenericEnvClient
        generic.sync().reset()


def test_a_server_that_does_not_run_is_a_connection_error(pond: Path) -> None:
    with pytest.raises(ConnectionError, match=r"Server not available at http://127\.0\.0\.1:9"):
        AutoEnv.from_env("pond", base_url="http://127.0.0.1:9")


def test_the_package_is_served_in_a_process_of_its_own(pond: Path) -> None:
    client = AutoEnv.from_env("pond", wait_timeout=60)
    action = AutoAction.from_env("pond")
    with client.sync() as env:
        env.reset()
        assert env.step(action(stone=3)).observation.rings == 6
        url = client.base_url
    with pytest.raises(ConnectionError):
        AutoEnv.from_env("pond", base_url=url)


def test_without_models_a_name_needs_a_place() -> None:
    with pytest.raises(ValueError, match="base_url or docker_image"):
        AutoEnv.from_env("pond", skip_install=True)
    assert AutoAction.from_env("owner/pond", skip_install=True) is GenericAction


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("pond", None),
        ("owner/pond", "owner/pond"),
        ("spaces/owner/pond", "owner/pond"),
        ("https://huggingface.co/spaces/owner/pond", "owner/pond"),
        ("https://hf.co/spaces/owner/pond/tree/main", "owner/pond"),
    ],
)
def test_names_of_the_hub(name: str, repo: str | None) -> None:
    assert repo_of(name) == repo


@pytest.mark.parametrize(
    "name", ["https://example.org/owner/pond", "owner/pond;rm", "a/b/c", "../pond", "owner/..", "a--b/c"]
)
def test_what_is_no_name_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Space"):
        repo_of(name)


def test_short_names() -> None:
    assert {short_name(name) for name in ("echo", "echo-env", "echo_env", " Echo ")} == {"echo"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A Space in a local repository, where git looks for it."""
    space = tmp_path / "hub" / "spaces" / "owner" / "pond_env"
    write_package(space)
    (space / "pyproject.toml").write_text(PROJECT)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a pond"]):
        subprocess.run(["git", *words], cwd=space, check=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{tmp_path / 'hub'}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://huggingface.co/")
    return "owner/pond_env"


def test_a_space_is_not_installed_without_consent(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InstallationFailed, match="trust_remote_code=True"):
        AutoEnv.from_env(hub)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(InstallationFailed, match="did not agree"):
        AutoAction.from_env(hub)
    assert not (tmp_path / "cache" / "environments").exists()


@pytest.mark.slow
def test_a_space_is_installed_into_a_folder_of_its_own(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = AutoAction.from_env(hub, trust_remote_code=True)
    folder = tmp_path / "cache" / "environments" / "owner--pond_env"
    assert Path(sys.modules[action.__module__].__file__ or "").is_relative_to(folder)
    assert sys.path[-1] == str(folder)
    assert not (folder / "openenv").exists()  # its requirement of openenv did not bring another one
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with AutoEnv.from_env(hub, wait_timeout=60).sync() as env:  # found there, no second question
        env.reset()
        assert env.step(action(stone=2)).observation.rings == 4


@pytest.mark.slow
def test_a_copy_of_a_space_may_have_another_name_than_its_package(hub: str, tmp_path: Path) -> None:
    (tmp_path / "hub" / "spaces" / "owner" / "pond_env").rename(tmp_path / "hub" / "spaces" / "owner" / "my-copy")
    for _ in range(2):  # installed, then found
        assert AutoAction.from_env("owner/my-copy", trust_remote_code=True).__name__ == "PondAction"


@pytest.mark.slow
def test_an_installation_that_fails_leaves_nothing(hub: str, tmp_path: Path) -> None:
    with pytest.raises(InstallationFailed, match="Installation failed"):
        AutoEnv.from_env("owner/not_there", trust_remote_code=True)
    assert not any((tmp_path / "cache" / "environments").iterdir())


def mark_origin(info: Path, url: str) -> None:
    """Record the URL of an installation, as pip does (PEP 610)."""
    vcs = {"vcs": "git", "commit_id": "0" * 40}
    (info / "direct_url.json").write_text(json.dumps({"url": url, "vcs_info": vcs}))


def put_into_own_folder(cache: Path, repo: str) -> Path:
    """Put a package where the installation of a Space puts it."""
    folder = cache / "environments" / repo.replace("/", "--")
    write_package(folder)
    info = folder / "openenv_pond_env-0.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openenv-pond_env\nVersion: 0.3.0\n")
    return folder


@pytest.mark.parametrize("origin", [None, "https://huggingface.co/spaces/alice/pond_env", "https://example.org/pond"])
def test_a_package_is_not_taken_for_that_of_another_owner(pond: Path, origin: str | None) -> None:
    if origin is not None:
        mark_origin(pond / "openenv_pond_env-0.3.0.dist-info", origin)
    with pytest.raises(InstallationFailed, match="bob/pond_env is not installed"):
        AutoEnv.from_env("bob/pond_env")
    assert "pond_env" not in sys.modules


def test_a_package_of_a_space_is_found_by_its_recorded_origin(pond: Path) -> None:
    mark_origin(pond / "openenv_pond_env-0.3.0.dist-info", "https://huggingface.co/spaces/Alice/my-pond.git")
    assert AutoAction.from_env("alice/my-pond").__name__ == "PondAction"
    with pytest.raises(InstallationFailed, match="openenv/pond_env is not installed"):
        AutoAction.from_env("openenv/pond_env")


def test_packages_of_an_index_belong_to_the_projects_own_spaces(pond: Path) -> None:
    assert AutoAction.from_env("openenv/pond_env").__name__ == "PondAction"


def test_two_owners_with_one_name_get_an_error_instead_of_each_others_code(tmp_path: Path) -> None:
    for repo in ("alice/pond_env", "bob/pond_env"):
        put_into_own_folder(tmp_path / "cache", repo)
    action = AutoAction.from_env("alice/pond_env")
    assert "alice--pond_env" in str(sys.modules[action.__module__].__file__)
    with pytest.raises(InstallationFailed, match="which is another package"):
        AutoAction.from_env("bob/pond_env")
    assert AutoAction.from_env("alice/pond_env") is action


def test_an_installed_package_does_not_hide_that_of_a_space(pond: Path, tmp_path: Path) -> None:
    put_into_own_folder(tmp_path / "cache", "alice/pond_env")
    with pytest.raises(InstallationFailed, match=r"which is another package.*base_url"):
        AutoEnv.from_env("alice/pond_env")


def test_a_manifest_with_aliases_is_not_read(pond: Path, caplog: pytest.LogCaptureFixture) -> None:
    (pond / "pond_env" / "openenv.yaml").write_text(f"{MANIFEST}a: &a [1]\nb: [*a, *a]\n")
    assert AutoEnv.get_env_info("pond")["spec_version"] is None
    assert "anchor or alias in line 7" in caplog.text
    with pytest.raises(ManifestError, match="anchor or alias in line 7"):
        read_manifest(pond / "pond_env" / "openenv.yaml")


@pytest.mark.parametrize("text", ["a: " + "[" * 20_000, "\n".join(f"{' ' * level}a:" for level in range(2000))])
def test_a_manifest_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="nested more than 64 deep"):
        parse_manifest(text, "x")


def test_a_typed_client_is_an_env_client(pond: Path) -> None:
    assert issubclass(AutoEnv.get_env_class("pond"), EnvClient)
