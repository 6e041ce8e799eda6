"""Fixtures for provider tests: a real engine that the tests own, with a network that publishes ports, and images.

No image can be pulled, so they are made of a static busybox, or of folders of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv.sandboxes.container_cli import ContainerCli

ROOT = Path(__file__).resolve().parents[2]
# As process 1 it has no default for SIGTERM, so it sets a handler.
SERVER = """
echo ok > /www/health
echo "serving $GREETING"
httpd -p $PORT -h /www
trap "exit 0" TERM
while :; do sleep 1 & wait; done
"""


@pytest.fixture(scope="session")
def docker_host(docker_engines: Any) -> Iterator[str]:
    """The address of a Docker engine that these tests own, whose default network publishes ports."""
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine(bridge=stack.enter_context(bridge())))
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        yield host


@contextlib.contextmanager
def bridge() -> Iterator[str]:
    """A bridge on this machine with addresses of its own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a bridge for containers needs root and iproute2: apt-get install -y iproute2")
    name = f"oe{random.SystemRandom().getrandbits(40):x}"
    number = random.SystemRandom()
    address = f"10.{number.randrange(100, 250)}.{number.randrange(256)}.1/24"
    commands = (["add", "name", name, "type", "bridge"], ["set", name, "up"])
    try:
        for command in commands:
            done = subprocess.run(["ip", "link", *command], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no bridge can be made here: {done.stderr.strip()}")
        subprocess.run(["ip", "address", "add", address, "dev", name], check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


@pytest.fixture
def use_engine(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the engine the one that `docker` talks to."""
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    return docker_host


@pytest.fixture(scope="session")
def engine(docker_host: str) -> ContainerCli:
    """The engine, to look at it past the providers."""
    program = shutil.which("docker")
    assert program is not None
    return ContainerCli("docker", program, docker_host)


@pytest.fixture(scope="session")
def tiny_archive(busybox_archive: Callable[..., Path]) -> Path:
    """The files of an image with nothing but busybox."""
    return busybox_archive("tmp", "proc", "sys", "dev", "etc", "www")


@pytest.fixture(scope="session")
def import_tiny(tiny_archive: Path) -> list[str]:
    """How an engine makes the image whose server answers `/health` on port 8000, or on PORT."""
    changes = [f"CMD {json.dumps(['/bin/sh', '-c', SERVER])}", "ENV PORT=8000", "ENV PATH=/bin"]
    options = [word for change in changes for word in ("--change", change)]
    return ["import", *options, str(tiny_archive), "tiny-env:1"]


@pytest.fixture(scope="session")
def image(engine: ContainerCli, import_tiny: list[str]) -> str:
    """An image with busybox whose server answers `/health`."""
    engine.output(*import_tiny)
    return "tiny-env:1"


LOADED = """
import os, sys
from openenv.cli.serve import serve
from openenv.server import run
import gridworld_env.server.app, httptools, typer.rich_utils, uvicorn, uvloop, websockets
print(*{name.partition(".")[0] for name in sys.modules}, sep=" ")
print(*{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}, sep=" ")
"""


@pytest.fixture(scope="session")
def environment_image(engine: ContainerCli, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image that serves a gridworld and needs nothing else: Python, the libraries and the packages that it loads."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "envs")])
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    packages, libraries = (line.split() for line in done.stdout.splitlines())
    standard, installed = Path(os.__file__).parent, Path(pytest.__file__).parents[1]
    program = Path(sys.executable).resolve()
    archive = tmp_path_factory.mktemp("environment") / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(program, "app/bin/python")
        tar.add(standard, f"app/lib/{standard.name}", filter=_needed)
        for name in packages:
            for entry in (installed / name, installed / f"{name}.py", ROOT / "src" / name, ROOT / "envs" / name):
                if entry.exists():
                    tar.add(entry, f"app/packages/{entry.name}", filter=_needed)
        for entry in installed.glob("*.dist-info"):
            tar.add(entry, f"app/packages/{entry.name}", filter=_needed)
        for extension in [*installed.glob("*.so"), *installed.glob("*.libs")]:
            tar.add(extension, f"app/packages/{extension.name}")
        ldd = ["ldd", str(program), *libraries]  # which names they have for each other
        linked = subprocess.run(ldd, capture_output=True, text=True, check=False).stdout.split()
        for library in {word for word in linked if word.startswith("/") and not word.endswith(":")}:
            if installed not in Path(library).parents and Path(library).is_file():
                tar.add(Path(library).resolve(), library)
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
    command = ["/app/bin/python", "-m", "openenv", "serve", "gridworld_env.server.app:app"]
    variables = {"PYTHONHOME": "/app", "PYTHONPATH": "/app/packages", "LD_LIBRARY_PATH": _folders(libraries)}
    changes = [f"CMD {json.dumps([*command, '--host', '0.0.0.0', '--no-token'])}"]
    changes += [f"ENV {name}={value}" for name, value in variables.items()]
    engine.output("import", *(word for one in changes for word in ("--change", one)), str(archive), "gridworld_env")
    return "gridworld_env"


def _folders(libraries: list[str]) -> str:
    return ":".join(
        sorted({str(Path(library).parent) for library in libraries if library.startswith(("/lib", "/usr"))})
    )


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    unneeded = {"__pycache__", "test", "tests", "site-packages", "idlelib", "tkinter", "ensurepip", "lib2to3"}
    return None if unneeded & set(entry.name.split("/")) else entry


@pytest.fixture
def left_behind(engine: ContainerCli) -> Iterator[Callable[[], list[str]]]:
    """List the containers of the engine that were not there when the test began; none may be left at its end."""

    def all_of_them() -> set[str]:
        return set(engine.output("ps", "--all", "--quiet", "--no-trunc").split())

    before = all_of_them()
    yield lambda: sorted(all_of_them() - before)
    assert sorted(all_of_them() - before) == []
