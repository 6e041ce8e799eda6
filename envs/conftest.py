"""Fixtures for the tests of environments: served from their folders, or installed as packages and tried as a whole."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from openenv import GenericEnvClient

ENVS = Path(__file__).parent
sys.path.insert(0, str(ENVS))  # environments are packages of this folder, installed or not

EPISODES, SESSIONS = 100, 8
Choose = Callable[[dict[str, Any], random.Random], dict[str, Any]]
"""Chooses an action for an observation."""

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@contextlib.contextmanager
def served(target: Path | str, *, cwd: Path = ENVS.parent, **variables: str) -> Iterator[str]:
    """Run `openenv serve` on a free port; give the address that it announces."""
    command = [sys.executable, "-m", "openenv", "serve", str(target), "--port", "0"]
    environ = {**os.environ, **variables}
    process = subprocess.Popen(command, cwd=cwd, env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        output = ""
        for line in process.stderr:
            output += line
            if found := _ADDRESS.search(line):
                yield found.group()
                break
        else:
            pytest.fail(f"the server did not start:\n{output}")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(20)


@pytest.fixture
def serve_folder() -> Iterator[Callable[[str], str]]:
    """Serve an environment by the name of its folder; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(served(ENVS / name))


@pytest.fixture
def try_package(tmp_path: Path) -> Callable[..., list[float]]:
    """Install an environment, serve what was installed, look at its page, play random episodes, and validate it.

    Returns the returns of the episodes.
    """

    def run(name: str, choose: Choose, *, most_steps: int = 20, **reset: Any) -> list[float]:
        site, home = tmp_path / "site", tmp_path / "home"
        home.mkdir()
        # Dependencies are those of this interpreter; the package itself is built and installed as pip does it.
        install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
        subprocess.run([sys.executable, "-m", *install, str(ENVS / name)], check=True, timeout=240)
        assert (site / name / "openenv.yaml").is_file()
        with served(f"{name}.server.app:app", cwd=home, PYTHONPATH=str(site)) as url:
            look_at_page(url)
            returns = play_randomly(url, choose, most_steps, reset)
        validate = [sys.executable, "-m", "openenv", "validate", str(ENVS / name)]
        report = subprocess.run(validate, cwd=home, capture_output=True, text=True, timeout=600)
        assert report.returncode == 0, report.stdout + report.stderr
        assert "Verdict: pass" in report.stdout + report.stderr
        return returns

    return run


def look_at_page(url: str) -> None:
    """Fetch the page, and begin an episode on it."""
    with urllib.request.urlopen(f"{url}/web/", timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/html")
    request = urllib.request.Request(f"{url}/web/reset", b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert "observation" in json.load(response)


def play_randomly(url: str, choose: Choose, most_steps: int, reset: dict[str, Any]) -> list[float]:
    """Play episodes over several sessions at once; each ends by itself or after `most_steps`."""

    def session(number: int) -> list[float]:
        totals = []
        with GenericEnvClient(base_url=url, message_timeout_s=240).sync() as env:
            for episode in range(number, EPISODES, SESSIONS):
                chance = random.Random(episode)
                result, total, steps = env.reset(seed=episode, **reset), 0.0, 0
                while not result.done and steps < most_steps:
                    result = env.step(choose(result.observation, chance))
                    steps += 1
                    total += result.reward or 0.0
                    assert math.isfinite(total)
                assert env.state()["step_count"] == steps > 0
                totals.append(total)
        return totals

    with ThreadPoolExecutor(SESSIONS) as threads:
        return [total for totals in threads.map(session, range(SESSIONS)) for total in totals]
