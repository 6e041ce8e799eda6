"""What `openenv init` makes runs on this package and on the published one: server and client, in every pairing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.cli.init import Names, write_package

PLAY = """
import sys
from maze_env import MazeAction, MazeEnv

with MazeEnv(base_url=sys.argv[1]).sync() as env:
    env.reset(seed=1, episode_id="mine")
    result = env.step(MazeAction(message="hello"))
    state = env.state()
    print(result.observation.echoed_message, result.reward, result.done, state.episode_id, state.step_count)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package fresh from the template."""
    folder = tmp_path_factory.mktemp("project")
    write_package(Names.of("maze_env"), folder / "maze_env")
    return folder


@pytest.mark.slow
@pytest.mark.published
def test_either_client_steps_either_server(
    folder: Path, ours: Any, published: Any, free_port: Callable[[], int], serve_package: Callable[..., Any]
) -> None:
    for server in (ours, published):
        with serve_package(server, folder, free_port()) as url:
            for client in (ours, published):
                done = subprocess.run(
                    [client.python, "-c", PLAY, url],
                    env=client.environment(folder),
                    capture_output=True,
                    text=True,
                    timeout=240,
                    check=False,
                )
                assert done.stdout == "hello 0.5 False mine 1\n", (server.name, client.name, done.stderr)
