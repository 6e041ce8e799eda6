"""The two Python interpreters that are compared: where they come from, what is installed in them, what they inherit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PUBLISHED_VENV = ROOT / ".bench" / "published"
PUBLISHED_REQUIREMENTS = ["openenv==0.10.0", "uvloop", "httptools"]

# PYTHONDONTWRITEBYTECODE would make a source tree compile itself at each start, unlike an installed package
NOT_INHERITED = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "VIRTUAL_ENV"}
PACKAGES = ["openenv", "uvicorn", "pydantic", "websockets", "uvloop", "httptools"]
PROBE = """
import json, sys
from importlib import metadata
import openenv
from openenv.core.env_server.http_server import create_app
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
print(json.dumps({"file": openenv.__file__ or "", "versions": found}))
"""


class InterpreterError(RuntimeError):
    """An interpreter does not have what it needs."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python with an `openenv` in it and the environment its processes run in."""

    python: str
    environment: Mapping[str, str]
    versions: Mapping[str, str | None]


def child_environment(inherited: Mapping[str, str], *, source: Path | None = None) -> dict[str, str]:
    """Return the environment of a child: clean of Python settings, with a source tree on its path if given."""
    environment = {name: value for name, value in inherited.items() if name not in NOT_INHERITED}
    if source:
        environment["PYTHONPATH"] = str(source)
    return environment


def create_published_venv(inherited: Mapping[str, str]) -> str:
    """Install the published package into a virtual environment of its own, once, and return its Python."""
    python = PUBLISHED_VENV / "bin" / "python"
    marker = PUBLISHED_VENV / "complete"
    if not marker.exists():
        print(f"installing {' '.join(PUBLISHED_REQUIREMENTS)} into {PUBLISHED_VENV.relative_to(ROOT)}", file=sys.stderr)
        environment = child_environment(inherited)
        PUBLISHED_VENV.parent.mkdir(exist_ok=True)
        (PUBLISHED_VENV.parent / ".gitignore").write_text("*\n", encoding="ascii")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PUBLISHED_VENV)], check=True, env=environment)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PUBLISHED_REQUIREMENTS], check=True, env=environment, stdout=sys.stderr)
        marker.touch()
    return str(python)


def _probe(python: str, environment: Mapping[str, str]) -> dict[str, dict[str, str | None] | str]:
    command = [python, "-c", f"PACKAGES = {PACKAGES!r}\n{PROBE}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InterpreterError(str(error)) from error
    if done.returncode:
        raise InterpreterError((done.stderr.strip().splitlines() or ["import failed"])[-1])
    found: dict[str, dict[str, str | None] | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def find_interpreter(python: str, inherited: Mapping[str, str], *, source: Path | None = None) -> Interpreter:
    """Check that an interpreter can import `openenv` and return it with its versions.

    Args:
        source: the source tree that must provide `openenv`; None for an installed package.

    Raises:
        InterpreterError: it cannot, or its `openenv` is not the one from the source tree.
    """
    environment = child_environment(inherited, source=source)
    found = _probe(python, environment)
    file, versions = found["file"], found["versions"]
    assert isinstance(file, str)
    assert isinstance(versions, dict)
    if source and not Path(file).is_relative_to(source):
        raise InterpreterError(f"its openenv is not the one in {source.name}/")
    if source:
        versions["openenv"] = "source tree"
    return Interpreter(python=python, environment=environment, versions=versions)
