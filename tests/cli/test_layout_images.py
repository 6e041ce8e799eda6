"""`openenv build` with a real engine: the image has this package inside, and serves the folder, in every layout."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from folder_layouts import LAYOUTS, LOAD, Layout, not_played
from openenv.cli.build import staged
from openenv.cli.init import Names, write_package
from openenv.server.folders import find_app
from python_image import PROGRAMS, VARIABLES, add_python
from waiting import wait_until

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]
PLAY = """
import json, urllib.request as r
def ask(path, body):
    data = json.dumps(body).encode()
    return json.load(r.urlopen(r.Request("http://127.0.0.1:8000" + path, data, {"Content-Type": "application/json"})))
print(ask("/reset", {})["observation"]["place"], ask("/step", {"action": {"where": "up"}})["observation"]["place"])
"""
# Each stands for a way in which folders differ for the engine: where it copies them, and what the copies contain.
BUILT = (
    "top",
    "space and digit, relative",
    "names the package, installed from here",
    "src, package, dash",
    "no manifest",
    "other keys",
    "repository with envs",
    "by the names of two above",
    "data by a relative path",
)
INSTALLED_ELSEWHERE = {"names an installed package"}  # which an image has only if its Dockerfile installs it
PUBLISHED = """\
ARG BASE_IMAGE=ghcr.io/huggingface/openenv-base:latest
FROM ${BASE_IMAGE} AS builder
COPY . /app/env
WORKDIR /app/env
RUN uv sync && pip install "openenv-core[core]>=0.2.1"
FROM ${BASE_IMAGE}
COPY --from=builder /app/env /app/env
ENV PYTHONPATH="/app/env"
CMD ["sh", "-c", "cd /app/env && python -m uvicorn server.app:app --host 0.0.0.0 --port 8000"]
"""


@pytest.fixture(scope="module")
def engine(docker_engines: Any, busybox_archive: Callable[..., Path]) -> Iterator[str]:
    """The address of an engine whose `python:3.12-slim` is made of this machine's Python."""
    archive = busybox_archive("tmp", "root", **PROGRAMS)
    add_python(archive)
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        settings = [word for name, value in VARIABLES.items() for word in ("-c", f"ENV {name}={value}")]
        docker(host, "import", *settings, str(archive), "python:3.12-slim")
        archive.unlink()
        yield host


def docker(host: str, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", "--host", host, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout + done.stderr


def played(host: str, image: str, program: str = PLAY) -> str:
    """What an episode shows in a container of an image, once that serves."""
    name = docker(host, "run", "-d", "--network", "none", image).strip()
    try:

        def answer() -> str | None:
            done = docker(host, "exec", name, "python", "-c", program, check=False)
            if done.startswith("start "):
                return done.strip()
            assert json.loads(docker(host, "inspect", name))[0]["State"]["Running"], docker(host, "logs", name)
            return None

        return wait_until(answer, 120, lambda: docker(host, "logs", name), every_s=0.3) or ""
    finally:
        docker(host, "rm", "-f", name)


@pytest.mark.parametrize("name", BUILT)
def test_a_layout_is_built_and_its_image_serves_it(
    name: str, engine: str, tmp_path: Path, openenv_command: Run
) -> None:
    target = LAYOUTS[name].write(tmp_path)
    done = openenv_command("build", str(target), "-t", "layout", timeout_s=300, DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert played(engine, "layout") == "start up"


def test_every_layout_is_loaded_where_its_image_has_it(engine: str, tmp_path: Path, openenv_command: Run) -> None:
    """An image for each would differ only in this: which files `openenv build` sends, and to which folder."""
    target = Layout().write(tmp_path / "built")
    done = openenv_command("build", str(target), "-t", "loads", timeout_s=300, DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        folder = find_app(layout.write(tmp_path / "written" / str(number))).folder
        with staged(folder) as package:
            shutil.copytree(package.context, tmp_path / "sent" / str(number), symlinks=True)
            [place] = re.findall(r"(?m)^COPY \. (\S+)$", package.dockerfile.read_text())
        rows.append([name, "/installed", place, f"/sent/{number}"])
    names = LAYOUTS.keys() - INSTALLED_ELSEWHERE
    options = ["--network", "none", "-w", "/", "-v", f"{tmp_path / 'sent'}:/sent:ro"]
    loaded = subprocess.run(
        ["docker", "--host", engine, "run", "--rm", "-i", *options, "loads", "python", "-c", LOAD],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert not_played(loaded.stdout, names) == {}, loaded.stderr
    assert not_played(loaded.stdout, INSTALLED_ELSEWHERE).keys() == INSTALLED_ELSEWHERE, "its package is not sent"


def test_the_dockerfile_of_the_published_template_is_built_with_this_package(
    engine: str, tmp_path: Path, openenv_command: Run
) -> None:
    target = Layout(files={"server/Dockerfile": PUBLISHED}).write(tmp_path)
    done = openenv_command("build", str(target), timeout_s=300, DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Built openenv-maze." in done.stdout
    assert played(engine, "openenv-maze") == "start up"
    inside = docker(engine, "run", "--rm", "--network", "none", "openenv-maze", "cat", "/installed.log")
    version = metadata.version("openenv")
    assert f"pip install --no-cache-dir openenv=={version} uv" in inside, "our base image"
    again = openenv_command("build", str(target), timeout_s=300, DOCKER_HOST=engine)
    assert "once for this version" not in again.stderr, "the base image is there already"


NEW_PACKAGE = """
import json, urllib.request as r
from importlib.metadata import version
def ask(path, body):
    data = json.dumps(body).encode()
    return json.load(r.urlopen(r.Request("http://127.0.0.1:8000" + path, data, {"Content-Type": "application/json"})))
ask("/reset", {})
print("start", ask("/step", {"action": {"message": "hello"}})["observation"]["echoed_message"], version("openenv"))
"""


@pytest.mark.parametrize("requirement", ["openenv>=0.11.0", "openenv", "openenv-core[core]>=0.2.1", "openenv==0.10.0"])
def test_a_new_package_is_built_and_serves_with_this_version(
    requirement: str, engine: str, tmp_path: Path, openenv_command: Run
) -> None:
    """The index of the image has another `openenv`, as every index had before the first release."""
    package = tmp_path / "maze_env"
    write_package(Names.of("maze_env"), package)
    for name in ("pyproject.toml", "server/requirements.txt"):
        text = (package / name).read_text()
        (package / name).write_text(text.replace("openenv>=0.11.0", requirement))
    done = openenv_command("build", "maze_env", timeout_s=300, DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert played(engine, "openenv-maze", NEW_PACKAGE) == f"start hello {metadata.version('openenv')}"


def test_another_base_image_can_be_named(engine: str, tmp_path: Path, openenv_command: Run) -> None:
    target = Layout(files={"Dockerfile": "FROM openenv-base\nRUN echo made > /made\n"}).write(tmp_path)
    options = ["-t", "other", "--base-image", "python:3.12-slim"]
    done = openenv_command("build", str(target), *options, timeout_s=300, DOCKER_HOST=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert docker(engine, "run", "--rm", "--network", "none", "other", "cat", "/made") == "made\n"
    missing = openenv_command("build", str(target), "--base-image", "no-such:1", timeout_s=300, DOCKER_HOST=engine)
    assert missing.returncode == 1
    assert "no-such" in missing.stdout + missing.stderr
