"""`openenv init`: the package that it makes can be served, stepped, tested, installed and checked as it is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import openenv
from openenv.cli.__main__ import build
from openenv.cli.init import Names, ScaffoldError, corrected, write_package

Run = Callable[..., subprocess.CompletedProcess[str]]
FILES = {
    ".dockerignore",
    ".gitignore",
    "README.md",
    "__init__.py",
    "client.py",
    "models.py",
    "openenv.yaml",
    "py.typed",
    "pyproject.toml",
    "server/Dockerfile",
    "server/__init__.py",
    "server/app.py",
    "server/maze_env_environment.py",
    "server/requirements.txt",
    "tests/test_env.py",
}
HERE = str(Path(openenv.__file__).parents[1])


def init(*arguments: str, **variables: str) -> Any:
    return CliRunner().invoke(build(["init"]), ["init", *arguments], env={"COLUMNS": "200", **variables})


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    """A package fresh from the template."""
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    return tmp_path / "maze_env"


def run_python(*arguments: str, folder: Path, **variables: str) -> str:
    path = os.pathsep.join([HERE, *filter(None, [variables.pop("PYTHONPATH", "")])])
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- the files ------------------------------------------------------------------------------------------------------


def test_all_files_are_made_with_the_names_of_the_package_in_place(tmp_path: Path) -> None:
    done = init("maze_env", "-o", str(tmp_path / "deep" / "er"), PATH="")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "deep" / "er" / "maze_env"
    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert made == FILES
    for name in FILES:
        content = (folder / name).read_bytes()
        assert b"\r" not in content
        assert not re.search(rb"__(ENV|HF)_[A-Z_]+__", content), name
        assert content.endswith(b"\n") or not content
    assert "class MazeEnvironment(" in (folder / "server/maze_env_environment.py").read_text()
    assert "class MazeEnv(" in (folder / "client.py").read_text()
    front = (folder / "README.md").read_text().split("---")[1]
    assert {"sdk: docker", "app_port: 8000", "base_path: /web", "  - openenv"} <= set(front.splitlines())


@pytest.mark.parametrize(
    ("name", "prefix", "title", "image"),
    [
        ("maze_env", "Maze", "Maze", "openenv-maze"),
        ("word_game", "WordGame", "Word Game", "openenv-word_game"),
        ("MyEnv", "MyEnv", "MyEnv", "openenv-myenv"),
        ("x", "X", "X", "openenv-x"),
        ("_env", "Env", "Env", "openenv-env"),
        ("_my_env", "My", "My", "openenv-my"),
    ],
)
def test_names_follow_from_that_of_the_package(name: str, prefix: str, title: str, image: str) -> None:
    names = Names.of(name)
    assert (names.prefix, names.title, names.placeholders()["__ENV_IMAGE_NAME__"]) == (prefix, title, image)


@pytest.mark.parametrize(
    "name", ["9x", "my-env", "a b", "", "é_env", "__", "class", "json", "openenv", "server", "a.b"]
)
def test_a_name_that_cannot_be_a_package_is_refused_and_nothing_is_made(name: str, tmp_path: Path) -> None:
    done = init("-o", str(tmp_path), "--", name)
    assert done.exit_code == 2
    assert "name" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "maze_env").mkdir()
    (tmp_path / "maze_env" / "mine.txt").write_text("mine")
    done = init("maze_env", "-o", str(tmp_path))
    assert done.exit_code == 2
    assert "not empty" in done.stderr
    assert [path.name for path in (tmp_path / "maze_env").iterdir()] == ["mine.txt"]


def test_a_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "maze_env").write_text("mine")
    done = init("maze_env", "-o", str(tmp_path))
    assert done.exit_code == 2
    assert (tmp_path / "maze_env").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "maze_env").mkdir()
    assert init("maze_env", "-o", str(tmp_path), PATH="").exit_code == 0
    assert (tmp_path / "maze_env" / "server" / "app.py").is_file()


@pytest.mark.parametrize("is_there", [False, True])
def test_what_was_written_is_removed_when_the_rest_cannot_be(is_there: bool, tmp_path: Path) -> None:
    names = Names.of("x" * 245)  # a folder may be called so, but not the file in it that has a longer name
    folder = tmp_path / "new" / names.package
    if is_there:
        folder.mkdir(parents=True)
    with pytest.raises(ScaffoldError, match="cannot be written"):
        write_package(names, folder)
    assert (list(folder.iterdir()) if is_there else list(tmp_path.iterdir())) == []


def test_a_place_below_a_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = init("maze_env", "-o", str(tmp_path / "file"))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


# -- uv -------------------------------------------------------------------------------------------------------------


def uv(folder: Path, script: str) -> str:
    """Put a program called uv into a folder; return a PATH with it."""
    folder.mkdir(parents=True)
    (folder / "uv").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "uv").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_lock_is_made_where_uv_is_installed(tmp_path: Path) -> None:
    path = uv(tmp_path / "bin", 'echo "$@" > uv.lock')
    done = init("maze_env", "-o", str(tmp_path), PATH=path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert (tmp_path / "maze_env" / "uv.lock").read_text() == "lock\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo no network >&2; exit 2", "no network"), ("exit 3", "3"), (None, "uv is not installed")],
)
def test_a_lock_that_cannot_be_made_is_a_warning(script: str | None, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path) if script is None else uv(tmp_path / "bin", script)
    done = init("maze_env", "-o", str(tmp_path), PATH=path)
    assert done.exit_code == 0
    assert reason in done.stderr
    assert "openenv serve" in done.stdout


# -- what can be done with it ---------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/docs/test_new_project.py runs the same commands from the guide
def test_the_commands_that_are_printed_work(openenv_command: Run, command: Callable[..., Any], tmp_path: Path) -> None:
    done = openenv_command("init", "maze_env")
    assert done.returncode == 0, done.stderr
    commands = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    serve, client, tests, validate, build, run = commands
    assert serve == "openenv serve maze_env"
    server = command(*shlex.split(serve)[1:], "--port", "0")
    address = server.wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)", server.output))
    words = shlex.split(client.replace("localhost:8000", f"127.0.0.1:{address.group(1)}"))
    assert words[0] == "python"
    assert "echoed_message='hello'" in run_python(*words[1:], folder=tmp_path)
    assert "5 passed" in run_python(*shlex.split(tests)[1:], "-p", "no:cacheprovider", folder=tmp_path)
    assert (build, run) == ("openenv build maze_env", "docker run -p 8000:8000 openenv-maze:latest")
    assert validate == "openenv validate maze_env"
    checked = openenv_command(*shlex.split(validate)[1:])
    assert checked.returncode == 0, checked.stdout
    assert "0 failed" in checked.stdout


def test_its_tests_pass_in_its_folder_and_the_readme_shows_what_happens(maze: Path) -> None:
    assert "5 passed" in run_python("-m", "pytest", "-p", "no:cacheprovider", folder=maze)
    block = re.search(r"```python\n(.*?)```", (maze / "README.md").read_text(), re.DOTALL)
    assert block is not None
    script = (
        "import re, subprocess, sys\n"
        "server = subprocess.Popen([sys.executable, '-m', 'openenv', 'serve', 'maze_env', '--port', '0',"
        " '--log-level', 'warning'], stderr=subprocess.PIPE, text=True)\n"
        "address = re.search(r'http://([\\d.:]+)', server.stderr.readline()).group(1)\n"
        f"try:\n    exec({block.group(1)!r}.replace('localhost:8000', address))\n"
        "finally:\n    server.terminate(); server.wait()\n"
    )
    assert run_python("-c", script, folder=maze.parent) == "hello 0.5\n"


@pytest.mark.slow
def test_it_can_be_installed_and_has_a_command_of_its_own(maze: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run_python(*pip, "--no-index", "--target", str(target), str(maze), folder=tmp_path)
    installed = {str(path.relative_to(target)) for path in (target / "maze_env").rglob("*") if path.suffix != ".pyc"}
    assert {"maze_env/client.py", "maze_env/openenv.yaml", "maze_env/server/maze_env_environment.py"} <= installed
    assert "maze_env/tests" not in installed
    assert (target / "bin" / "server").is_file()
    message = run_python("-m", "maze_env.server.app", "--help", folder=tmp_path / "site", PYTHONPATH=str(target))
    assert "--port" in message


def test_its_code_is_formatted_and_sorted(maze: Path) -> None:
    run_python("-m", "ruff", "check", "--no-cache", "--select", "E,F,I,UP,B", ".", folder=maze)
    run_python("-m", "ruff", "format", "--no-cache", "--check", ".", folder=maze)


@pytest.mark.slow
def test_its_code_is_typed(maze: Path) -> None:
    options = ["--strict", "--follow-imports", "silent", "--explicit-package-bases", "--ignore-missing-imports"]
    cache = ["--cache-dir", str(maze.parent / "cache")]
    run_python("-m", "mypy", *options, *cache, "-p", "maze_env", folder=maze.parent, MYPYPATH=f".:{HERE}")


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("maze-env", "maze_env"),
        ("My Maze", "my_maze"),
        ("MazeRun!", "maze_run"),
        ("2048", None),
        ("class", "class_env"),
    ],
)
def test_a_name_that_python_does_not_take_is_corrected(name: str, better: str | None, tmp_path: Path) -> None:
    assert corrected(name) == better
    done = init(name, "-o", str(tmp_path))
    assert done.exit_code == 2
    assert (f"Try: openenv init {better}" in done.output) is (better is not None)
    assert list(tmp_path.iterdir()) == []


def test_in_a_terminal_the_corrected_name_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.cli.init._is_terminal", lambda: True)
    done = CliRunner().invoke(build(["init"]), ["init", "maze-env", "-o", str(tmp_path)], input="\n", env={"PATH": ""})
    assert (done.exit_code, "Make maze_env instead?" in done.output) == (0, True)
    assert (tmp_path / "maze_env" / "openenv.yaml").is_file()
