"""What `openenv init` makes is stepped by its own client and by clients of the published package."""

from __future__ import annotations

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
    "openenv.yaml": [
        "name: maze_env",
        "type: space",
        "runtime: fastapi",
        "app: server.app:app",
        "port: 8000",
        "validation:",
    ],
    "models.py": ["maze_env", "MazeAction", "MazeObservation"],
    "client.py": ["MazeEnv", "openenv-maze:latest"],
    "README.md": ["sdk: docker", "app_port: 8000", "- openenv", "openenv-maze:latest"],
    "server/app.py": ["MazeEnvironment", "MazeAction", "MazeObservation"],
    "server/maze_env_environment.py": ["MazeEnvironment", "min(length * 0.1, 1.0)"],
    "server/requirements.txt": ["uvicorn", "openenv"],
}
"""Texts that public code and tests look for in a new package."""


@pytest.mark.slow
@pytest.mark.published
def test_the_texts_that_public_code_looks_for_are_in_both_new_packages(
    tmp_path: Path, ours: Interpreter, published: Interpreter
) -> None:
    for made in (ours, published):
        folder = tmp_path / made.name
        folder.mkdir()

        def init(name: str, made: Interpreter = made, folder: Path = folder) -> subprocess.CompletedProcess[str]:
            command = [made.python, "-m", "openenv.cli", "init", name, "--output-dir", "."]
            environment = {**made.environment(tmp_path), "COLUMNS": "200"}
            return subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
            )

        done = init("maze_env")
        assert done.returncode == 0, done.stderr
        assert "docker run -p 8000:8000 openenv-maze:latest" in " ".join(done.stdout.split())
        package = folder / "maze_env"
        missing = [
            (made.name, file, text)
            for file, texts in PUBLIC_TEXTS.items()
            for text in texts
            if text not in (package / file).read_text()
        ]
        assert missing == []
        for name, text in (("1_env", "is not a valid"), ("", "cannot be empty"), ("maze_env", "already exists")):
            refused = init(name)
            assert refused.returncode != 0
            assert text in refused.stdout + refused.stderr
