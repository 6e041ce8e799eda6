"""`GitServerClient` against a double of Gitea whose repositories Git itself serves."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gitea_double import PASSWORD, USER, GiteaDouble, git, gitea
from openenv.core.tools import GitServerClient, RepoInfo
from openenv.env.tools.git_server import GitServerError

SNIPPET = Path(__file__).parents[3] / "docs_src" / "use_git_server.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GiteaDouble]:
    with gitea(tmp_path / "gitea") as double:
        yield double


@pytest.fixture
def client(server: GiteaDouble, tmp_path: Path) -> GitServerClient:
    client = GitServerClient(server.url, USER, PASSWORD, str(tmp_path / "workspace"))
    assert client.wait_for_ready(timeout=10)
    return client


def test_it_waits_until_a_server_answers(server: GiteaDouble, tmp_path: Path) -> None:
    client = GitServerClient(f"{server.url}/", USER, PASSWORD, str(tmp_path / "workspace"))
    assert not client.is_ready
    assert client.wait_for_ready(timeout=10)
    assert client.is_ready
    assert (client.domain, client.gitea_url) == ("127.0.0.1", server.url)
    assert client.workspace_dir.is_dir()


def test_a_server_that_is_not_there_is_not_ready(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = GitServerClient(f"http://127.0.0.1:{taken.getsockname()[1]}", USER, PASSWORD, str(tmp_path))
        assert not client.wait_for_ready(timeout=0.3)
    with pytest.raises(RuntimeError, match="Gitea server is not ready"):
        client.list_repositories()


def test_all_pages_of_repositories_are_listed(server: GiteaDouble, client: GitServerClient) -> None:
    for name in ("one", "two", "three", "four", "empty"):
        server.add_repository(name, {"a.txt": name})
    listed = client.list_repositories()
    assert [one["name"] for one in listed] == ["empty", "four", "one", "three", "two"]
    assert listed[1] == {
        "name": "four",
        "full_name": f"{USER}/four",
        "clone_url": f"{server.url}/{USER}/four.git",
        "description": "about four",
    }
    assert listed[0]["description"] == ""


def test_a_wrong_password_is_an_error_and_no_empty_list(server: GiteaDouble, tmp_path: Path) -> None:
    server.add_repository("one", {"a.txt": "a"})
    client = GitServerClient(server.url, USER, "wrong-password", str(tmp_path / "workspace"))
    client.wait_for_ready(timeout=10)
    with pytest.raises(GitServerError, match="401"):
        client.list_repositories()
    with pytest.raises(GitServerError, match="Clone failed") as failure:
        client.clone_to_workspace("one")
    assert "wrong-password" not in str(failure.value)


def test_a_repository_is_described_with_its_commit(server: GiteaDouble, client: GitServerClient) -> None:
    commit = server.add_repository("one", {"a.txt": "a"})
    expected = RepoInfo("one", f"{server.url}/{USER}/one", commit, f"{server.url}/{USER}/one.git")
    assert client.repo_info("one") == expected
    with pytest.raises(GitServerError, match="404"):
        client.repo_info("none")


def test_clones_are_at_the_commit_that_is_asked_for(server: GiteaDouble, client: GitServerClient) -> None:
    first = server.add_repository("one", {"a.txt": "first"})
    second = server.commit("one", {"a.txt": "second"})
    path = Path(client.clone_to_workspace("one"))
    assert path == client.workspace_dir / "one"
    assert client.get_current_commit("one") == second
    assert client.workspace_exists("one")
    old = Path(client.clone_to_workspace("one", target_dir="old", commit=first))
    assert (old / "a.txt").read_text() == "first"
    assert not client.workspace_exists("other")


def test_main_is_the_default_branch_of_repositories_without_one(server: GiteaDouble, client: GitServerClient) -> None:
    commit = server.add_repository("one", {"a.txt": "a"}, branch="trunk")
    client.clone_to_workspace("one")
    assert client.get_current_commit("one") == commit


def test_a_clone_that_fails_leaves_what_was_there(server: GiteaDouble, client: GitServerClient) -> None:
    server.add_repository("one", {"a.txt": "a"})
    path = Path(client.clone_to_workspace("one"))
    with pytest.raises(GitServerError, match="no commit or branch 'nowhere'"):
        client.clone_to_workspace("one", commit="nowhere")
    with pytest.raises(GitServerError, match="Clone failed"):
        client.clone_to_workspace("missing", target_dir="one")
    assert (path / "a.txt").read_text() == "a"
    assert [entry.name for entry in client.workspace_dir.iterdir()] == ["one"]


def test_a_reset_removes_commits_changes_and_files(server: GiteaDouble, client: GitServerClient) -> None:
    commit = server.add_repository("one", {"a.txt": "a", ".gitignore": "*.log\n"})
    path = Path(client.clone_to_workspace("one"))
    (path / "a.txt").write_text("changed")
    code, _, errors = client.execute_git_command('commit --all -m "by the agent"', "one")
    assert code == 0, errors
    assert client.get_current_commit("one") != commit
    (path / "a.txt").write_text("again")
    (path / "new.txt").write_text("new")
    (path / "ignored.log").write_text("log")
    (path / "nested").mkdir()
    git(path / "nested", "init", "--quiet")
    (path / ".git" / "index.lock").write_text("")
    assert client.reset_workspace("one")
    assert client.get_current_commit("one") == commit
    assert sorted(entry.name for entry in path.iterdir()) == [".git", ".gitignore", "a.txt"]
    assert (path / "a.txt").read_text() == "a"


def test_a_reset_to_a_branch_takes_what_the_server_has_now(server: GiteaDouble, client: GitServerClient) -> None:
    first = server.add_repository("one", {"a.txt": "first"})
    client.clone_to_workspace("one")
    second = server.commit("one", {"a.txt": "second"})
    client.reset_workspace("one", "main")
    assert client.get_current_commit("one") == second
    before = len(server.requests)
    client.reset_workspace("one", first)
    assert client.get_current_commit("one") == first
    assert len(server.requests) == before  # a commit that is here needs no server


def test_a_hook_of_an_episode_does_not_run_in_a_reset(server: GiteaDouble, client: GitServerClient) -> None:
    server.add_repository("one", {"a.txt": "a"})
    path = Path(client.clone_to_workspace("one"))
    hook = path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {client.workspace_dir}/ran\n")
    hook.chmod(0o755)
    client.reset_workspace("one")
    assert not (client.workspace_dir / "ran").exists()


def test_git_commands_can_push_and_never_show_the_password(server: GiteaDouble, client: GitServerClient) -> None:
    commit = server.add_repository("one", {"a.txt": "a"})
    path = Path(client.clone_to_workspace("one"))
    (path / "b.txt").write_text("b")
    for command in ("add b.txt", "commit -m 'more files'", "push origin main"):
        code, _, errors = client.execute_git_command(command, "one")
        assert code == 0, errors
    assert server.head("one") == client.get_current_commit("one") != commit
    config = (path / ".git" / "config").read_text()
    code, output, _ = client.execute_git_command("-c alias.show-all='!env' show-all", "one")
    assert code == 0
    assert "_GIT_USER=agent" in output
    assert PASSWORD not in output + config


def test_commands_stay_in_the_workspace(server: GiteaDouble, client: GitServerClient, tmp_path: Path) -> None:
    server.add_repository("one", {"a.txt": "a"})
    assert client.execute_git_command("status", "nowhere")[0] == 1
    code, _, errors = client.execute_git_command("status", "../gitea")
    assert code == 1
    assert "is not a folder in the workspace" in errors
    assert client.execute_git_command("commit -m 'open quote")[0] == 1
    (client.workspace_dir / "link").symlink_to(tmp_path)
    for name in ("..", ".", "../gitea", "/etc", "link/gitea"):
        with pytest.raises(ValueError, match="is not a folder in the workspace"):
            client.clone_to_workspace("one", target_dir=name)
    with pytest.raises(GitServerError, match="not found in workspace"):
        client.reset_workspace("one")


def test_the_example_of_the_guide_prints_what_it_should(server: GiteaDouble, tmp_path: Path) -> None:
    server.add_repository("calculator", {"a.txt": "a"})
    command = [sys.executable, str(SNIPPET), server.url, USER, PASSWORD, str(tmp_path / "workspace")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['calculator']\n(0, '', '')\nTrue\n", done.stderr


def test_addresses_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="such as http://gitea:3000"):
        GitServerClient("gitea:3000", USER, PASSWORD, str(tmp_path))
    with pytest.raises(ValueError, match="no user name or password") as refusal:
        GitServerClient("http://me:word@gitea:3000", USER, PASSWORD, str(tmp_path))
    assert "word@" not in str(refusal.value)
