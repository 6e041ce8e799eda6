"""What `openenv init` makes runs on this package and on the published one: server and client, in every pairing."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from openenv.cli.scaffold import Names, write_package

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


@contextlib.contextmanager
def served(interpreter: Any, folder: Path, port: int) -> Iterator[str]:
    """Run the package's own `main` under an interpreter."""
    url = f"http://127.0.0.1:{port}"
    with (folder / f"{interpreter.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [interpreter.python, "-m", "maze_env.server.app", "--port", str(port)],
            env=interpreter.environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            assert process.poll() is None, (folder / f"{interpreter.name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.published
def test_either_client_steps_either_server(
    folder: Path, ours: Any, published: Any, free_port: Callable[[], int]
) -> None:
    for server in (ours, published):
        with served(server, folder, free_port()) as url:
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
