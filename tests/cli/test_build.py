"""`openenv build` with a real engine: what it is sent, with which options, and what is left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from folder_layouts import LAYOUTS
from openenv.cli.build import StagingError, staged
from openenv.cli.init import Names, write_package
from openenv.providers.own_wheel import FOLDER, INSTRUCTIONS

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
TAKE = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nARG BUILD_MODE\nARG ENV_NAME\nARG WORD\n"
TAKE += "LABEL mode=${BUILD_MODE} name=${ENV_NAME} word=${WORD}\nCOPY . /app/env\nRUN echo made > /made\n"
# Stands for pip in an image without Python: notes its calls, and where it would look for packages.
PIP = """#!/bin/sh
ls $PIP_FIND_LINKS > /found
echo "$@" >> /pip.log
"""
VERSION = metadata.version("openenv")
WHEELS = [f"openenv-{VERSION}-py3-none-any.whl", f"openenv_core-{VERSION}-py3-none-any.whl"]


@pytest.fixture(scope="module")
def engine(docker_engines: Any, busybox_archive: Callable[..., Path]) -> Iterator[str]:
    """The address of a Docker engine of these tests, with an image `tiny` of busybox and a pip that notes calls."""
    archive = busybox_archive("tmp", pip=PIP)
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        subprocess.run(["docker", "--host", host, "import", str(archive), "tiny"], check=True, capture_output=True)
        yield host


@pytest.fixture
def docker(engine: str) -> Callable[..., str]:
    """Ask the engine for something."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(["docker", "--host", engine, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    return ask


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    """A package fresh from the template, in the folder in which commands run."""
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    return tmp_path / "maze_env"


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """A folder for what commands put aside."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


# -- with an engine -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_package_is_built_by_its_own_dockerfile(
    maze: Path, engine: str, docker: Callable[..., str], openenv_command: Run, temporary: Path
) -> None:
    (maze / ".venv").mkdir()
    (maze / ".venv" / "big").write_text("x")
    arguments = ["build", "maze_env", "--build-arg", "BASE_IMAGE=tiny", "--no-cache"]
    done = openenv_command(*arguments, DOCKER_HOST=engine, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Built openenv-maze." in done.stdout
    assert "docker run -p 8000:8000 openenv-maze" in done.stdout
    config = json.loads(docker("inspect", "openenv-maze"))[0]["Config"]
    assert config["Cmd"] == ["server", "--host", "0.0.0.0", "--port", "8000"]
    assert "8000/tcp" in config["ExposedPorts"]
    inside = docker("run", "--rm", "--network", "none", "openenv-maze", "find", "/app/env")
    assert "/app/env/server/maze_env_environment.py" in inside
    assert "/app/env/tests" not in inside
    assert ".venv" not in inside
    pip_log = docker("run", "--rm", "--network", "none", "openenv-maze", "cat", "/pip.log")
    assert pip_log == "install --no-cache-dir -r server/requirements.txt\ninstall --no-cache-dir --no-deps .\n"
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_name_file_context_and_arguments_can_be_given(
    maze: Path, engine: str, docker: Callable[..., str], openenv_command: Run, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "only.txt").write_text("only")
    (tmp_path / "Take").write_text(TAKE)
    options = ["-t", "mine:7", "-f", "Take", "-c", "other"]
    arguments = ["--build-arg", "BASE_IMAGE=tiny", "--build-arg", "WORD=a=b"]
    done = openenv_command("build", "maze_env", *options, *arguments, DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads(docker("inspect", "mine:7"))[0]["Config"]
    assert config["Labels"] == {"mode": "standalone", "name": "maze", "word": "a=b"}
    assert docker("run", "--rm", "--network", "none", "mine:7", "ls", "/app/env") == "only.txt\n"
    assert docker("run", "--rm", "--network", "none", "mine:7", "cat", "/made") == "made\n"


@pytest.mark.slow
def test_a_package_of_this_repository_gets_its_openenv(
    engine: str, docker: Callable[..., str], openenv_command: Run
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the tests do not run in a checkout")
    folder = ROOT / "envs" / "echo_env"
    done = openenv_command("build", str(folder), "-t", "echo:0", "--build-arg", "BASE_IMAGE=tiny", DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    inside = docker("run", "--rm", "--network", "none", "echo:0", "cat", "/app/env/pyproject.toml")
    assert f'"openenv=={VERSION}"' in inside
    assert docker("run", "--rm", "--network", "none", "echo:0", "cat", "/found").split() == WHEELS
    assert f"openenv=={VERSION}" not in (folder / "pyproject.toml").read_text()


@pytest.mark.slow
def test_a_build_that_fails_is_reported_with_the_engines_words(
    maze: Path, engine: str, openenv_command: Run, temporary: Path
) -> None:
    (maze / "server" / "Dockerfile").write_text("FROM tiny\nRUN exit 7\n")
    done = openenv_command("build", "maze_env", DOCKER_HOST=engine, TMPDIR=str(temporary))
    assert done.returncode == 1
    assert "exit 7" in done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("Error: docker ended with exit code")
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_build_that_is_interrupted_leaves_nothing(
    sign: signal.Signals, code: int, maze: Path, engine: str, command: Callable[..., Any], temporary: Path
) -> None:
    (maze / "server" / "Dockerfile").write_text("FROM tiny\nRUN echo busy; sh -c 'while true; do :; done'\n")
    running = command("build", "maze_env", DOCKER_HOST=engine, TMPDIR=str(temporary))
    running.says("busy")
    assert list(temporary.iterdir()) != []
    assert running.stop(sign) == code, running.output
    assert list(temporary.iterdir()) == []


# -- without one ----------------------------------------------------------------------------------------------------


def test_without_an_engine_it_says_which_to_install(maze: Path, openenv_command: Run, tmp_path: Path) -> None:
    done = openenv_command("build", "maze_env", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: images are built by docker or podman, and neither is installed")


def test_an_engine_that_does_not_answer_is_named(maze: Path, openenv_command: Run, tmp_path: Path) -> None:
    program = shutil.which("docker")
    if program is None:
        pytest.skip("docker is not installed")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").symlink_to(program)
    no_socket = f"unix://{tmp_path}/no.sock"
    done = openenv_command("build", "maze_env", PATH=str(tmp_path / "bin"), DOCKER_HOST=no_socket)
    assert done.returncode == 1
    assert "The docker engine does not answer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "nowhere is not an environment package"),
        (["maze_env", "--build-arg", "WORD"], 2, "'WORD' is not NAME=VALUE"),
    ],
)
def test_a_mistake_is_reported_in_a_line(
    arguments: list[str], code: int, message: str, maze: Path, openenv_command: Run
) -> None:
    done = openenv_command("build", *arguments)
    assert done.returncode == code
    assert message in done.stderr


# -- the copy -------------------------------------------------------------------------------------------------------


def test_the_copy_has_what_an_image_needs_and_is_gone_afterwards(maze: Path) -> None:
    for name in (".git/config", "__pycache__/x.pyc", "server/y.pyc", "maze.egg-info/PKG-INFO", "data/big.bin"):
        (maze / name).parent.mkdir(exist_ok=True)
        (maze / name).write_text("x")
    os.mkfifo(maze / "data" / "pipe")
    (maze / "data" / "link").symlink_to("big.bin")
    with staged(maze) as given:
        assert given.mode == "standalone"
        assert given.dockerfile == given.context / "server" / "Dockerfile"
        left = {str(path.relative_to(given.context)) for path in given.context.rglob("*")}
        assert {"data/big.bin", "data/link", ".dockerignore", "server/app.py"} <= left
        assert not {".git", "__pycache__", "server/y.pyc", "maze.egg-info", "data/pipe"} & left
        assert (given.context / "data" / "link").is_symlink()
    assert not given.context.exists()


def test_a_dockerfile_beside_the_manifest_is_taken_second(maze: Path) -> None:
    (maze / "Dockerfile").write_text("FROM one\n")
    with staged(maze) as given:
        assert given.dockerfile.parent.name == "server"
    (maze / "server" / "Dockerfile").unlink()
    with staged(maze) as given:
        assert given.dockerfile.read_text() == f"FROM one\n{INSTRUCTIONS}\n"


PUBLISHED = """\
ARG BASE_IMAGE=ghcr.io/huggingface/openenv-base:latest
FROM ${BASE_IMAGE} AS builder
WORKDIR /app/env
COPY . /app/env
RUN uv sync && pip install \\
    "openenv-core[core]>=0.2.1" \\
    numpy openenv-maze
FROM ${BASE_IMAGE}
COPY --from=builder /app/env /app/env
CMD ["sh", "-c", "cd /app/env && uvicorn server.app:app --host 0.0.0.0 --port 8000"]
"""


def test_the_published_base_image_is_replaced_and_this_package_required(maze: Path) -> None:
    (maze / "server" / "Dockerfile").write_text(PUBLISHED)
    (maze / "uv.lock").write_text("")
    project = (maze / "pyproject.toml").read_text()
    (maze / "pyproject.toml").write_text(project.replace('"openenv>=', '"openenv-core[core]>='))
    with staged(maze) as given:
        assert given.needs_base
        given.set_base("mine:1")
        text = given.dockerfile.read_text()
        assert "ARG BASE_IMAGE=mine:1\n" in text
        assert text.count(f"\n{INSTRUCTIONS}\n") == 2
        assert f'    "openenv[core]=={VERSION}" \\\n    numpy openenv-maze\n' in text
        assert f'"openenv[core]=={VERSION}"' in (given.context / "pyproject.toml").read_text()
        assert not (given.context / "uv.lock").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("FROM ghcr.io/huggingface/openenv-base:latest", "FROM mine"),
        ("FROM openenv-base", "FROM mine"),
        ("from ghcr.io/meta-pytorch/openenv-base:0.2 as build", "from mine as build"),
        ("FROM --platform=linux/amd64 localhost:5000/openenv-base@sha256:0a1b", "FROM --platform=linux/amd64 mine"),
        ('ARG BASE="openenv-base:latest"', 'ARG BASE="mine"'),
        ("FROM python:3.12-slim", None),
        ("FROM my-openenv-base", None),
        ("FROM openenv-base-like:1", None),
        ("COPY openenv-base /x", None),
    ],
)
def test_the_base_image_is_known_by_its_name(line: str, expected: str | None, maze: Path) -> None:
    (maze / "server" / "Dockerfile").write_text(f"{line}\n")
    with staged(maze) as given:
        assert given.needs_base is (expected is not None)
        given.set_base("mine")
        assert given.dockerfile.read_text().splitlines()[0] == (expected or line)


def test_a_folder_without_a_dockerfile_gets_one_that_serves_it(maze: Path) -> None:
    (maze / "server" / "Dockerfile").unlink()
    (maze / "requirements.txt").write_text("rich>=13\nopenenv-core[core]>=0.2\n")
    with staged(maze) as given:
        assert given.needs_base
        text = given.dockerfile.read_text()
        assert 'CMD ["python", "-m", "openenv", "serve", "/app/env"' in text
        requirements = (given.context / "openenv-requirements.txt").read_text().splitlines()
        assert requirements == ["rich>=13", "uvicorn>=0.34"]
        assert not (given.context / FOLDER).exists(), "the base image has it"


def test_the_folders_above_are_in_the_image_if_the_code_names_them(tmp_path: Path) -> None:
    folder = LAYOUTS["by the names of two above"].write(tmp_path)
    with staged(folder) as given:
        assert "COPY . /app/src/envs/maze_env\n" in given.dockerfile.read_text()
    with staged(LAYOUTS["top"].write(tmp_path / "other")) as given:
        assert "COPY . /app/env\n" in given.dockerfile.read_text()


def test_missing_files_are_named_and_nothing_is_copied(maze: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob(f"openenv-build-*/{maze.name}"))
    with pytest.raises(StagingError, match="Dockerfile not found: nothing"), staged(maze, dockerfile=Path("nothing")):
        pass
    with pytest.raises(StagingError, match="folder not found"), staged(maze, context=maze / "nowhere"):
        pass
    assert set(Path(tempfile.gettempdir()).glob(f"openenv-build-*/{maze.name}")) <= before


def test_the_copy_requires_exactly_the_running_version_and_has_its_wheel(maze: Path) -> None:
    (maze / "uv.lock").write_text("")
    (maze / ".dockerignore").write_text("*.whl\n")
    with staged(maze) as given:
        assert 'dependencies = ["openenv==' + VERSION in (given.context / "pyproject.toml").read_text()
        assert 'name = "openenv-maze_env"' in (given.context / "pyproject.toml").read_text()
        assert (given.context / "server" / "requirements.txt").read_text() == f"openenv=={VERSION}\nuvicorn>=0.34\n"
        assert f"FROM ${{BASE_IMAGE}}\n{INSTRUCTIONS}\n" in given.dockerfile.read_text()
        assert sorted(path.name for path in (given.context / FOLDER).iterdir()) == WHEELS
        assert (given.context / ".dockerignore").read_text() == f"*.whl\n!{FOLDER}\n"
        assert not (given.context / "uv.lock").exists()


def test_a_package_in_envs_of_a_checkout_is_in_the_repository(maze: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".git").mkdir(parents=True)
    (checkout / "src" / "openenv").mkdir(parents=True)
    (checkout / "pyproject.toml").write_text("[project]\n")
    for place, mode in (("envs/maze_env", "in-repo"), ("elsewhere", "standalone")):
        shutil.copytree(maze, checkout / place)
        with staged(checkout / place) as given:
            assert given.mode == mode
