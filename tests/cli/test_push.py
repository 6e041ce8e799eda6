"""`openenv push` and `openenv fork` against a double of the Hub, with the real `huggingface_hub`."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hub_double import ORGANIZATION, TOKEN, USER, HubDouble, Repository
from openenv.cli.__main__ import build
from openenv.cli.init import Names, write_package
from registry_double import RegistryDouble

pytest.importorskip("huggingface_hub")
Run = Callable[..., subprocess.CompletedProcess[str]]
SECRET = "s3cr3t-value"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubDouble]:
    """A Hub, where the library of this process looks for it; large files go through Git LFS, not through Xet."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with HubDouble() as double:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", double.url)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", double.url)  # of `huggingface_hub.whoami`
        yield double


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    return tmp_path / "maze_env"


def push(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(build(["push"]), ["push", str(folder), *arguments], env={"COLUMNS": "200"})


def fork(*arguments: str) -> Result:
    return CliRunner().invoke(build(["fork"]), ["fork", *arguments], env={"COLUMNS": "200"})


# -- push -----------------------------------------------------------------------------------------------------------


def test_a_package_becomes_a_docker_space_of_the_user(maze: Path, hub: HubDouble) -> None:
    (maze / ".env").write_text("KEY=1")
    (maze / "board.bin").write_bytes(b"\0\1" * 40)
    result = push(maze)
    assert result.exit_code == 0, result.output
    space = hub.repositories[f"{USER}/maze_env"]
    assert (space.kind, space.sdk, space.private, space.hardware) == ("space", "docker", False, "cpu-basic")
    assert b"ENV ENABLE_WEB_INTERFACE=true" in space.files["Dockerfile"]
    assert b"base_path: /web" in space.files["README.md"]
    assert space.files["board.bin"] == b"\0\1" * 40
    assert ".env" not in space.files
    assert f"{hub.url}/spaces/{USER}/maze_env" in result.stdout


def test_a_dry_run_prints_the_plan_and_asks_nobody(maze: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens there, so any request would fail.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = push(maze, "--dry-run", "--private", "-e", "SIZE=9", "--secret", f"KEY={SECRET}", "-n", "2")
    assert result.exit_code == 0, result.output
    assert "Space YOUR-NAMESPACE/maze_env-1, YOUR-NAMESPACE/maze_env-2, private" in result.stdout
    assert "variables  SIZE\nsecrets    KEY\n" in result.stdout
    assert "\n  server/app.py  " in result.stdout
    assert SECRET not in result.output
    image = push(maze, "--dry-run", "--registry", "registry.example.org/team/")
    assert image.stdout.startswith("target     image registry.example.org/team/maze_env\n")


@pytest.mark.parametrize(("repo_id", "target"), [("other", f"{USER}/other"), ("team/maze", f"{ORGANIZATION}/maze")])
def test_a_bare_name_gets_the_users_namespace(maze: Path, hub: HubDouble, repo_id: str, target: str) -> None:
    assert push(maze, "-r", repo_id).exit_code == 0
    assert list(hub.repositories) == [target]


@pytest.mark.parametrize("repo_id", ["a/b/c", "a/", "/b", "a b", "ü/b"])
def test_what_is_no_repository_is_refused_before_any_request(maze: Path, hub: HubDouble, repo_id: str) -> None:
    result = push(maze, "--repo-id", repo_id)
    assert result.exit_code == 2
    assert "Invalid repo-id format" in result.output
    assert not hub.requests


def test_variables_of_the_manifest_come_after_those_of_the_command_and_secrets_stay_secret(
    maze: Path, hub: HubDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (maze / "openenv.yaml").open("a") as manifest:
        manifest.write("\nvariables:\n  SIZE: 5\n  COLOUR: red\n")
    monkeypatch.setenv("OTHER_KEY", "from-the-shell")
    result = push(maze, "-e", "SIZE=9", "-e", "RULE=a=b", "--secret", f"API_KEY={SECRET}", "--secret", "OTHER_KEY")
    assert result.exit_code == 0, result.output
    space = hub.repositories[f"{USER}/maze_env"]
    assert space.variables == {"SIZE": "9", "COLOUR": "red", "RULE": "a=b"}
    assert space.secrets == {"API_KEY": SECRET, "OTHER_KEY": "from-the-shell"}
    assert "API_KEY" in result.output
    assert SECRET not in result.output
    assert "from-the-shell" not in result.output
    # The build that the files start has every setting.
    assert hub.requests.index(f"POST /api/spaces/{USER}/maze_env/secrets") < hub.requests.index(
        f"POST /api/spaces/{USER}/maze_env/commit/main"
    )


def test_a_mistyped_secret_is_not_repeated(maze: Path, hub: HubDouble) -> None:
    result = push(maze, "--secret", SECRET)
    assert result.exit_code == 2
    assert "--secret" in result.output
    assert SECRET not in result.output


def test_several_instances_are_numbered(maze: Path, hub: HubDouble) -> None:
    result = push(maze, "--count", "3", "--private", "-H", "t4-medium")
    assert result.exit_code == 0, result.output
    assert list(hub.repositories) == [f"{USER}/maze_env-{number}" for number in (1, 2, 3)]
    assert {(space.private, space.hardware) for space in hub.repositories.values()} == {(True, "t4-medium")}
    assert "[1/3]" in result.output
    assert "[3/3]" in result.output
    assert "All 3 instances deployed" in result.output


def test_an_instance_that_fails_says_which_ones_are_there(maze: Path, hub: HubDouble) -> None:
    hub.failures = {"POST .*maze_env-2/commit/main": (403, "no")}
    result = push(maze, "--count", "3")
    assert result.exit_code == 1
    assert "1 of 3 instances deployed" in result.output
    assert f"Failed to upload to {USER}/maze_env-2" in result.output


def test_a_space_that_exists_is_updated_and_made_private_before_the_upload(maze: Path, hub: HubDouble) -> None:
    space = hub.add(Repository(f"{USER}/maze_env"))
    space.files |= {"old.py": b"old", "data/old.csv": b"1", "README.md": b"old"}
    result = push(maze, "--private", "--hardware", "cpu-upgrade", "--delete", "*.py")
    assert result.exit_code == 0, result.output
    assert (space.private, space.hardware) == (True, "cpu-upgrade")
    assert "old.py" not in space.files
    assert "data/old.csv" in space.files
    assert "client.py" in space.files  # it is uploaded again, so it is not deleted
    assert len(space.commits) == 1
    space_url = f"/api/spaces/{USER}/maze_env"
    assert hub.requests.index(f"PUT {space_url}/settings") < hub.requests.index(f"POST {space_url}/preupload/main")
    assert list(hub.repositories) == [f"{USER}/maze_env"]


def test_a_pull_request_changes_no_settings(maze: Path, hub: HubDouble) -> None:
    space = hub.add(Repository("openenv/maze"))
    result = push(maze, "-r", "openenv/maze", "--create-pr")
    assert result.exit_code == 0, result.output
    assert f"{hub.url}/spaces/openenv/maze/discussions/1" in result.stdout
    assert "Dockerfile" in space.pull_requests[0]
    assert "Dockerfile" not in space.files
    result = push(maze, "-r", "openenv/maze", "--create-pr", "--secret", f"A={SECRET}")
    assert result.exit_code == 2
    assert "--create-pr" in result.output


def test_a_file_of_patterns_leaves_out_more(maze: Path, hub: HubDouble) -> None:
    (maze / "ignored.txt").write_text("# mine\ntests/\n*.typed\n")
    assert push(maze, "--exclude", "ignored.txt").exit_code == 0
    files = hub.repositories[f"{USER}/maze_env"].files
    assert "py.typed" not in files
    assert not [name for name in files if name.startswith("tests/")]
    result = push(maze, "--exclude", "nowhere.txt")
    assert result.exit_code == 2
    assert "nowhere.txt" in result.output


def test_a_space_without_page(maze: Path, hub: HubDouble) -> None:
    (maze / "README.md").write_text("# Maze\n")
    assert push(maze, "--no-interface", "--base-image", "python:3.13").exit_code == 0
    files = hub.repositories[f"{USER}/maze_env"].files
    assert b"ENABLE_WEB_INTERFACE" not in files["Dockerfile"]
    assert b"ARG BASE_IMAGE=python:3.13\n" in files["Dockerfile"]
    assert b"base_path" not in files["README.md"]
    assert push(maze, "--no-interface", "--interface").exit_code == 1


@pytest.mark.parametrize(
    ("failure", "arguments", "fragments"),
    [
        ({"GET .*whoami-v2": (401, "Invalid credentials")}, (), ["Authentication failed", "hf auth login"]),
        ({"GET .*whoami-v2": (429, "slow down")}, (), ["too many requests"]),
        ({"POST .*create": (403, "no rights")}, (), ["Failed to create the Space", "write access", "no rights"]),
        ({"POST .*create": (402, "PRO needed")}, (), ["payment", "PRO needed"]),
        ({"POST .*create": (503, "down")}, (), ["the Hub itself failed", "status 503"]),
        ({"POST .*/commit/main": (409, "main has changed")}, (), ["Failed to upload", "conflict"]),
        ({"POST .*/variables": (400, "bad name")}, ("-e", "A=1"), ["Failed to set variable A", "bad name"]),
        (
            {"POST .*/secrets": (500, f"cannot store {SECRET}")},
            ("--secret", f"K={SECRET}"),
            ["Failed to set secret K", "***"],
        ),
        ({"POST .*/hardware": (404, "no such flavor")}, ("-H", "t5"), ["Failed to request the hardware t5"]),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(
    maze: Path, hub: HubDouble, failure: dict[str, tuple[int, str]], arguments: tuple[str, ...], fragments: list[str]
) -> None:
    if "-H" in arguments:
        hub.add(Repository(f"{USER}/maze_env"))
    hub.failures = failure
    result = push(maze, *arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert SECRET not in result.output
    for fragment in fragments:
        assert fragment in result.output
    assert "Traceback" not in result.output


def test_another_namespace_is_refused(maze: Path, hub: HubDouble) -> None:
    result = push(maze, "-r", "somebody/maze")
    assert result.exit_code == 1
    assert "Failed to create the Space somebody/maze" in result.output


def test_a_hub_that_is_not_there_is_one_clear_line(maze: Path, hub: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = push(maze)
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 cannot be reached" in result.output


def test_without_a_token_the_command_says_how_to_get_one(
    maze: Path, hub: HubDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    result = push(maze)
    assert result.exit_code == 1
    assert "hf auth login" in result.output


def test_what_is_no_package_is_not_pushed(maze: Path, hub: HubDouble, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert push(tmp_path / "empty").exit_code == 1
    result = push(Path("team/maze"))
    assert result.exit_code == 2
    assert "openenv push --repo-id team/maze" in result.output
    (maze / "client.py").unlink()
    assert "client.py" in push(maze).output
    assert not hub.requests


@pytest.mark.parametrize("option", [("--count", "2"), ("--secret", "A=b"), ("--private",), ("-r", "a/b")])
def test_an_image_has_no_settings_of_a_space(maze: Path, option: tuple[str, ...]) -> None:
    result = push(maze, "--registry", "registry.example.org/team", *option)
    assert result.exit_code == 2
    assert "--registry" in result.output


def test_the_extra_is_named_where_it_is_missing(maze: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    result = push(maze)
    assert result.exit_code == 1
    assert "pip install 'huggingface-hub>=" in result.output


def test_the_command_itself_pushes_where_hf_endpoint_says(maze: Path, hub: HubDouble, openenv_command: Run) -> None:
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(maze.parent / "hf")}
    variables["HF_HUB_DISABLE_XET"] = "1"
    done = openenv_command("push", "maze_env", "--secret", f"K={SECRET}", **variables)
    assert done.returncode == 0, done.stderr
    assert hub.repositories[f"{USER}/maze_env"].secrets == {"K": SECRET}
    assert SECRET not in done.stdout + done.stderr
    hub.failures = {"GET .*whoami-v2": (401, "Invalid credentials")}
    done = openenv_command("push", "maze_env", **variables)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("sign", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_push_that_is_ended_leaves_no_copy(
    maze: Path, hub: HubDouble, tmp_path: Path, command: Callable[..., Any], sign: signal.Signals, code: int
) -> None:
    (tmp_path / "tmp").mkdir()
    hub.holds = "POST .*/preupload/main"
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    running = command("push", "maze_env", TMPDIR=str(tmp_path / "tmp"), **variables)
    running.wait_for(lambda: any("preupload" in request for request in hub.requests))
    assert list((tmp_path / "tmp").glob("openenv-push-*"))
    assert running.stop(sign) == code
    assert not list((tmp_path / "tmp").iterdir())
    assert "Traceback" not in running.output


# -- an image -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(docker_engines: Any, busybox_archive: Callable[..., Path]) -> Iterator[str]:
    """The address of a Docker engine of this test, with an image `tiny` of busybox."""
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        archive = str(busybox_archive("tmp"))
        subprocess.run(["docker", "--host", host, "import", archive, "tiny"], check=True, capture_output=True)
        yield host


@pytest.mark.slow
def test_an_image_is_built_and_pushed_to_a_registry(maze: Path, engine: str, openenv_command: Run) -> None:
    (maze / "server" / "Dockerfile").write_text('FROM missing\nCOPY . /app\nCMD ["server"]\n')
    with RegistryDouble() as registry:
        arguments = ["push", "maze_env", "--registry", f"{registry.host}/team/", "--base-image", "tiny"]
        done = openenv_command(*arguments, DOCKER_HOST=engine)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Image: {registry.host}/team/maze_env" in done.stdout
        config = registry.config("team/maze_env:latest")
        assert config["Cmd"] == ["server"]
        assert not [one for one in config["Env"] if "WEB" in one]  # an image has no page by default
        done = openenv_command(*arguments, "--interface", DOCKER_HOST=engine)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ENABLE_WEB_INTERFACE=true" in registry.config("team/maze_env:latest")["Env"]
        registry.blobs.clear()
        registry.refuses_uploads = True
        (maze / "new.py").write_text("")
        done = openenv_command(*arguments, DOCKER_HOST=engine)
        assert done.returncode == 1
        assert "docker ended with exit code 1" in done.stderr
        assert "Image:" not in done.stdout


# -- fork -----------------------------------------------------------------------------------------------------------


def test_a_space_is_copied_into_the_users_namespace(hub: HubDouble) -> None:
    hub.add(Repository("openenv/echo_env", private=True, variables={"A": "1", "B": "2"}))
    result = fork("openenv/echo_env", "-e", "A=9", "--secret", f"KEY={SECRET}")
    assert result.exit_code == 0, result.output
    copy = hub.repositories[f"{USER}/echo_env"]
    assert (copy.variables, copy.secrets) == ({"A": "9", "B": "2"}, {"KEY": SECRET})
    assert copy.private  # as its source
    assert copy.hardware == "cpu-basic"
    assert f"{hub.url}/spaces/{USER}/echo_env" in result.stdout
    assert SECRET not in result.output


def test_a_copy_may_have_another_name_hardware_and_privacy(hub: HubDouble) -> None:
    hub.add(Repository("openenv/echo_env"))
    result = fork("https://huggingface.co/spaces/openenv/echo_env", "-r", "team/mine", "--private", "-H", "t4-small")
    assert result.exit_code == 0, result.output
    copy = hub.repositories["team/mine"]
    assert (copy.private, copy.hardware) == (True, "t4-small")


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (("echo_env",), 2, "OWNER/NAME"),
        (("a/b/c",), 2, "Space"),
        (("openenv/echo_env", "-r", "x/y/z"), 2, "Invalid repo-id format"),
        (("openenv/echo_env", "-e", "novalue"), 2, "NAME=VALUE"),
        (("openenv/missing",), 1, "no such Space"),
        (("openenv/echo_env", "-r", "somebody/x"), 1, "write access"),
        (("openenv/echo_env", "-r", "openenv-taken"), 1, "exists already"),
    ],
)
def test_a_copy_that_cannot_be_made_says_why(
    hub: HubDouble, arguments: tuple[str, ...], code: int, fragment: str
) -> None:
    hub.add(Repository("openenv/echo_env"))
    hub.add(Repository(f"{USER}/openenv-taken"))
    result = fork(*arguments)
    assert result.exit_code == code
    assert fragment in result.output
