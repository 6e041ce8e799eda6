"""The snippets about containers and E2B run, against a real engine and the double, and print what their page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(file: str, **environ: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environ}
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs_src" / file)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_snippet_about_containers_prints_what_it_should(docker_host: str) -> None:
    assert run("docker_sandbox.py", DOCKER_HOST=docker_host) == "45\n1\nTrue\n"


@pytest.mark.slow
def test_the_snippet_about_e2b_prints_what_it_should(e2b_double: Any) -> None:
    url = e2b_double.url
    environ = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_HTTP_VERSION": "1.1", "E2B_API_KEY": e2b_double.key}
    assert run("e2b_sandbox.py", **environ) == "3 out err\n137\n"
