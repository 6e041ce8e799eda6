"""Projects under a real uv, without a network: their own environment, from a folder or a Git repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openenv import GenericEnvClient
from openenv.errors import ProviderError, ProviderUnavailable, ServerDied
from openenv.providers import UVProvider
from openenv.providers.health import ask_health
from openenv.providers.uv import GitProject, find_uv

ROOT = Path(__file__).resolve().parents[2]
APP = """
from echo_env.server.app import app
"""
PROJECT = """
[project]
name = "a-project"
version = "1.0"
requires-python = ">=3.10"
[tool.uv]
package = false
"""


@pytest.fixture(scope="session")
def uv() -> str:
    try:
        return find_uv()
    except ProviderUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def offline(uv: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which uv needs no network: the server and its packages are those of these tests."""
    beside = Path(sys.executable).parent
    if not (beside / "uvicorn").exists():
        pytest.skip("the command uvicorn is not installed beside the running Python")
    return {
        "UV_OFFLINE": "1",
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_CACHE_DIR": str(tmp_path_factory.mktemp("uv")),
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "envs")]),
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "server").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "server" / "__init__.py").touch()
    (folder / "server" / "app.py").write_text(APP)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary files are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def repository(project: Path) -> str:
    if shutil.which("git") is None:
        pytest.skip("git is not installed: apt-get install -y git")
    git(project, "init", "--quiet", "--initial-branch", "main")
    commit(project, "first")
    (project / "server" / "app.py").write_text("raise SystemExit('the second commit is broken')\n")
    commit(project, "second")
    git(project, "branch", "good", "HEAD~1")
    git(project, "config", "uploadpack.allowAnySHA1InWant", "true")
    return f"git+file://{project}"


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "--message", message)


def test_a_project_is_served_from_its_folder(project: Path, offline: dict[str, str], temporary: Path) -> None:
    provider = UVProvider(project_path=str(project), env_vars=offline, context_timeout_s=120, host="127.0.0.1")
    with provider:
        provider.wait_for_ready()
        with GenericEnvClient(provider.base_url) as client:
            assert client.reset().done is False
        with pytest.raises(RuntimeError, match="UVProvider is already running"):
            provider.start()
        url = provider.base_url
    assert ask_health(url, 1) is not None
    provider.stop()
    with pytest.raises(RuntimeError, match="UVProvider has not been started"):
        _ = provider.base_url
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_client_plays_what_is_in_a_repository(repository: str, offline: dict[str, str], temporary: Path) -> None:
    started = GenericEnvClient.from_env(
        "org/space", use_docker=False, project_path=f"{repository}@good", env_vars=offline, context_timeout_s=120
    )
    with started.sync() as client:
        assert client.reset().done is False
        [folder] = temporary.iterdir()
        assert (folder / "project" / "server" / "app.py").read_text() == APP
        assert git(folder / "project", "rev-list", "--count", "HEAD") == "1"
        url = client.base_url
        assert url.startswith("http://127.0.0.1:")
    assert ask_health(url, 1) is not None
    assert list(temporary.iterdir()) == []


def test_an_application_that_cannot_be_imported_is_reported_and_the_clone_is_gone(
    repository: str, offline: dict[str, str], temporary: Path
) -> None:
    provider = UVProvider(project_path=repository, env_vars=offline)
    provider.start()
    with pytest.raises(ServerDied, match=r"exited prematurely with code (.|\n)*the second commit is broken"):
        provider.wait_for_ready(250)
    assert list(temporary.iterdir()) == []


def test_the_default_is_what_existing_code_expects(project: Path, uv: str) -> None:
    provider = UVProvider(project_path=str(project))
    assert (provider.app, provider.host, provider.reload, provider.env_vars) == (
        "server.app:app",
        "0.0.0.0",
        False,
        None,
    )
    assert provider.context_timeout_s == 60.0
    assert provider.project_path == str(project)
    with pytest.raises(ValueError, match="Unsupported kwargs for UVProvider: gpus"):
        provider.start(gpus=1)


def test_a_repository_that_is_not_there_is_reported_and_leaves_nothing(
    uv: str, tmp_path: Path, temporary: Path
) -> None:
    for path, words in (
        (f"git+file://{tmp_path}/none", "Failed to clone file://"),
        (f"{tmp_path}/none", "project folder .* does not exist"),
    ):
        with pytest.raises(ProviderError, match=words), UVProvider(project_path=path):
            raise AssertionError("it was started")
    assert list(temporary.iterdir()) == []


def test_a_password_in_an_address_is_not_shown(uv: str, temporary: Path, free_port: Callable[[], int]) -> None:
    address = f"localhost:{free_port()}/org/repo"
    with pytest.raises(ProviderError, match=f"Failed to clone http://{address}") as caught:
        UVProvider(project_path=f"git+http://user:a-secret@{address}").start()
    assert "a-secret" not in str(caught.value)


def test_a_folder_of_a_repository_that_is_not_there_is_reported(uv: str, repository: str, temporary: Path) -> None:
    with pytest.raises(ProviderError, match="has no folder 'envs/none'"):
        UVProvider(project_path=f"{repository}#subdirectory=envs/none").start()
    assert list(temporary.iterdir()) == []


def test_a_clone_that_takes_too_long_is_given_up(
    uv: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out cloning"):
        UVProvider(project_path="git+https://localhost/x", context_timeout_s=0.3).start()
    assert time.monotonic() - began < 120
    assert list(temporary.iterdir()) == []


def test_a_commit_can_be_named(repository: str, project: Path, tmp_path: Path) -> None:
    first = git(project, "rev-parse", "HEAD~1")
    folder = GitProject.parse(f"{repository}@{first}#subdirectory=server").fetch(
        tmp_path / "clone", environ=dict(os.environ), timeout_s=60
    )
    assert (folder / "app.py").read_text() == APP


@pytest.mark.parametrize(
    ("text", "url", "ref", "folder"),
    [
        ("git+https://host/org/repo", "https://host/org/repo", "HEAD", ""),
        ("git+https://user:word@host/org/repo.git", "https://user:word@host/org/repo.git", "HEAD", ""),
        ("git+https://host/org/repo@v1.2", "https://host/org/repo", "v1.2", ""),
        ("git+https://host/r@feature/x#subdirectory=envs/a&egg=b", "https://host/r", "feature/x", "envs/a"),
        ("git+ssh://git@host/org/repo@main", "ssh://git@host/org/repo", "main", ""),
        ("git+git@host:org/repo", "git@host:org/repo", "HEAD", ""),
        ("git+file:///a/b", "file:///a/b", "HEAD", ""),
    ],
)
def test_what_is_written_after_git_is_understood(text: str, url: str, ref: str, folder: str) -> None:
    assert GitProject.parse(text) == GitProject(url, ref, folder)


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeError, match=r"`uv` executable not found\. .*pip install uv"):
        UVProvider(project_path=".")
    with pytest.raises(ProviderUnavailable, match="`git` executable not found"):
        GitProject("https://localhost/x").fetch(tmp_path, environ={"PATH": str(tmp_path)}, timeout_s=1)
