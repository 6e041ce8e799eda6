"""The snippets about providers run, against a real engine and a real uv, and print what their page says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openenv.errors import ProviderUnavailable
from openenv.providers.uv import find_uv

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "docs_src"
PRINTED = {
    "use_provider.py": "1.0\nINFO:     Finished server\n",
    "use_provider_errors.py": (
        "ModuleNotFoundError: No module named 'no_such_module'\nServerNotReady SERVER_NOT_READY\n"
    ),
    "use_provider_own.py": "6\n",
}


def run(file: str, cwd: Path = SOURCES, **environ: str) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "envs")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environ}
    done = subprocess.run(
        [sys.executable, str(SOURCES / file)],
        capture_output=True, text=True, cwd=cwd, env=environment, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow_but_for("use_provider.py")
@pytest.mark.parametrize("file", sorted(PRINTED))
def test_a_snippet_with_a_process_prints_what_it_should(file: str) -> None:
    assert run(file) == PRINTED[file]


@pytest.mark.slow
def test_the_snippet_with_a_container_prints_what_it_should(
    docker_host: str, environment_image: str, left_behind: Callable[[], list[str]]
) -> None:
    assert run("use_provider_docker.py", DOCKER_HOST=docker_host) == "False\n1\n"
    assert left_behind() == []


@pytest.mark.slow
def test_the_snippet_with_uv_prints_what_it_should(tmp_path: Path) -> None:
    beside = Path(sys.executable).parent
    try:
        find_uv()
    except ProviderUnavailable as error:
        pytest.skip(str(error))
    if not (beside / "uvicorn").exists():
        pytest.skip("the command uvicorn is not installed beside the running Python")
    project = tmp_path / "my_project"
    shutil.copytree(ROOT / "envs" / "echo_env" / "server", project / "server")
    (project / "server" / "app.py").write_text("from echo_env.server.app import app\n")
    (project / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "1"\n[tool.uv]\npackage = false\n')
    environ = {"UV_OFFLINE": "1", "UV_PYTHON": sys.executable, "UV_CACHE_DIR": str(tmp_path / "cache")}
    path = f"{beside}{os.pathsep}{os.environ['PATH']}"
    assert run("use_provider_uv.py", tmp_path, PATH=path, **environ) == "False\n"
