"""What `openenv init` makes is stepped by its own client and by clients of the published package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.cli.init import Names, write_package
from program_interpreters import Interpreter

PLAY = """
import sys
from openenv import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    env.reset(seed=1, episode_id="mine")
    result = env.step({"message": "hello"})
    state = env.state()
    print(result.observation["echoed_message"], result.reward, result.done, state["episode_id"], state["step_count"])
"""
PLAY_TYPED = """
import sys
from maze_env import MazeAction, MazeEnv

with MazeEnv(base_url=sys.argv[1]).sync() as env:
    env.reset(seed=1, episode_id="mine")
    result = env.step(MazeAction(message="hello"))
    state = env.state()
    print(result.observation.echoed_message, result.reward, result.done, state.episode_id, state.step_count)
"""


@pytest.mark.slow
@pytest.mark.published
def test_either_client_steps_a_new_package(
    tmp_path: Path,
    ours: Interpreter,
    published: Interpreter,
    free_port: Callable[[], int],
    serve_package: Callable[..., Any],
) -> None:
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    with serve_package(ours, tmp_path, free_port()) as url:
        for client, program in ((ours, PLAY_TYPED), (ours, PLAY), (published, PLAY)):
            done = subprocess.run(
                [client.python, "-c", program, url],
                env=client.environment(tmp_path),
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.stdout == "hello 0.5 False mine 1\n", (client.name, done.stderr)


PUBLIC_TEXTS = {
    "openenv.yaml": ["name: maze_env", "type: space", "runtime: fastapi", "app: server.app:app", "port: 8000"],
    "models.py": ["maze_env", "MazeAction", "MazeObservation"],
    "client.py": ["MazeEnv", "openenv-maze:latest"],
    "README.md": ["sdk: docker", "app_port: 8000", "- openenv", "openenv-maze:latest"],
    "server/app.py": ["MazeEnvironment", "MazeAction", "MazeObservation"],
    "server/maze_env_environment.py": ["MazeEnvironment", "min(length * 0.1, 1.0)"],
    "server/requirements.txt": ["uvicorn", "openenv"],
}
"""Texts that public code and tests look for in a new package."""
INIT = """
import json, sys
from typer.testing import CliRunner
from openenv.cli.__main__ import app

runs = [CliRunner().invoke(app, ["init", name, "--output-dir", "."]) for name in ("maze_env", "1_env", "", "maze_env")]
print(json.dumps([[run.exit_code, " ".join(run.output.split())] for run in runs]))
"""


@pytest.mark.slow
@pytest.mark.published
def test_the_texts_that_public_code_looks_for_are_in_both_new_packages(
    tmp_path: Path, ours: Interpreter, published: Interpreter
) -> None:
    for package in (ours, published):
        folder = tmp_path / package.name
        folder.mkdir()
        environment = {**package.environment(tmp_path), "COLUMNS": "200"}
        command = [package.python, "-c", INIT]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, (package.name, done.stderr)
        (made, printed), *refused = json.loads(done.stdout.splitlines()[-1])
        assert made == 0
        assert "docker run -p 8000:8000 openenv-maze:latest" in printed
        missing = {
            (file, text)
            for file, texts in PUBLIC_TEXTS.items()
            for text in texts
            if text not in (folder / "maze_env" / file).read_text()
        }
        assert missing == set(), package.name
        for (code, error), text in zip(refused, ("is not a valid", "cannot be empty", "already exists"), strict=True):
            assert code != 0
            assert text in error
