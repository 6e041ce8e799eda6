"""`openenv-client`: the clients alone, few packages, beside `openenv` in either order."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from guess_environment import Guess, Hint, Word
from openenv import create_app
from openenv.testing import serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "packages" / "openenv-client"
MOST_PACKAGES = 10
STEP = """
import sys
from openenv import Action, EnvClient, Observation, State
from openenv.types import StepResult


class Word(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class WordClient(EnvClient[Word, Hint, State]):
    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        observation = Hint(**payload["observation"])
        return StepResult(observation, payload.get("reward"), payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


with WordClient(sys.argv[1]).sync() as env:
    env.reset(seed=1)
    result = env.step(Word(text="no"))
    print(result.observation.hint, result.reward)
"""
WHERE = "import openenv, openenv.client.env_client; print(openenv.__file__)"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both distributions, built from this tree."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, CLIENT):
        build_wheel(source, folder)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


def build_wheel(source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*command, str(folder), str(source)], check=True, timeout=120)


class Installation:
    """A fresh virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._python = str(folder / "bin" / "python")

    def pip(self, *arguments: str) -> str:
        command = [self._python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout

    def run(self, code: str, *arguments: str) -> str:
        command = [self._python, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def test_a_fresh_environment_gets_few_packages_and_takes_a_typed_step(wheels: dict[str, Path], tmp_path: Path) -> None:
    installation = Installation(tmp_path / "fresh")
    before = set(installation.pip("list", "--format=freeze").split())
    installation.pip("install", str(wheels["openenv_client"]))
    packages = set(installation.pip("list", "--format=freeze").split()) - before
    assert len({line for line in packages if not line.startswith("openenv-client")}) <= MOST_PACKAGES
    with serve(create_app(Guess, Word, Hint)) as server:
        assert installation.run(STEP, server.url) == "no is wrong. -0.25"
    missing = "import openenv\ntry:\n    openenv.Environment\nexcept ImportError as exc:\n    print(exc)"
    command = f"pip install openenv=={metadata.version('openenv')}"
    assert installation.run(missing) == f"Environment is not part of openenv-client; run: {command}"


@pytest.mark.parametrize("first", ["openenv", "openenv_client"])
def test_either_package_survives_the_removal_of_the_other(wheels: dict[str, Path], tmp_path: Path, first: str) -> None:
    second = "openenv_client" if first == "openenv" else "openenv"
    installation = Installation(tmp_path / "both")
    installation.pip("install", str(wheels["openenv_client"]))  # with its dependencies, which both need
    installation.pip("uninstall", "--yes", "openenv-client")
    for name in (first, second):
        installation.pip("install", "--no-deps", str(wheels[name]))
    assert "openenv_client" not in installation.run(WHERE), "the whole package takes precedence"
    installation.pip("uninstall", "--yes", second.replace("_", "-"))
    assert ("openenv_client" in installation.run(WHERE)) == (first == "openenv_client")


def test_a_source_distribution_has_the_modules_and_builds_the_same_wheel(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=CLIENT, check=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    build_wheel(archive, tmp_path)
    (rebuilt,) = tmp_path.glob("*.whl")
    names = [set(zipfile.ZipFile(wheel).namelist()) for wheel in (wheels["openenv_client"], rebuilt)]
    assert names[0] == names[1]
    assert "openenv_client/openenv/client/env_client.py" in names[1]
