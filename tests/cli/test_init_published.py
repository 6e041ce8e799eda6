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
