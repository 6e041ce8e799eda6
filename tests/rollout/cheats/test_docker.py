"""Cheating does not pay in containers either: the same cheats, on a Docker engine that the test starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenv.sandboxes import DockerSandboxes
from openenv.testing import all_cheats, run_cheats

ENGINE = Path(__file__).resolve().parents[3] / "benchmarks" / "docker_engine.py"


@pytest.fixture
def docker() -> Iterator[DockerSandboxes]:
    """The Docker backend, with the host's own system as its image."""
    spec = importlib.util.spec_from_file_location("docker_engine_for_cheats", ENGINE)
    assert spec is not None
    assert spec.loader is not None
    engines = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engines)
    if shutil.which("dockerd") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(engines.INSTALL.split(), check=False)
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(engines.docker_engine())
        except engines.EngineUnavailable as error:
            pytest.skip(str(error))
        yield DockerSandboxes("host", engine="docker", host=host)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_cheat_pays_on_docker(docker: DockerSandboxes) -> None:
    report = run_cheats(docker, cheats=all_cheats(), concurrency=4, quick=True)
    assert [(result.kind, result.name) for result in report.succeeded] == []
    assert len(report.results) >= 200
