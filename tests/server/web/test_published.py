"""The page's routes of the contract, side by side with the published package: the same requests, the same answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

from program_interpreters import Interpreter
from waiting import wait_until_healthy

PROGRAM = """
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    word: str
    times: int = 1

class Echo(Observation):
    text: str = ""

class Total(State):
    total: int = 0

class Room(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = Total(episode_id=None, step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = Total(episode_id=episode_id or "first", step_count=0)
        return Echo(text=f"{seed} {sorted(kwargs)}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.word == "stop":
            raise RuntimeError("no")
        self._state.step_count += 1
        self._state.total += action.times
        return Echo(text=action.word, reward=0.5, done=self._state.total > 3, metadata={"k": 1})

    @property
    def state(self):
        if self._state.total > 3:
            raise RuntimeError("the game is over")
        return self._state

app = create_app(Room, Say, Echo, env_name="room_env")
"""


@contextlib.contextmanager
def served(interpreter: Any, folder: Path, port: int) -> Iterator[str]:
    """Serve the room with the page, in a process of its own."""
    (folder / "room_app.py").write_text(PROGRAM)
    environment = interpreter.environment(folder, {"ENABLE_WEB_INTERFACE": "true"})
    command = [interpreter.python, "-m", "uvicorn", "room_app:app", "--port", str(port), "--log-level", "critical"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, folder / "server.log")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def play(url: str) -> list[Any]:
    """Ask for the same things, and return all replies and frames, without the times."""
    transcript: list[Any] = []

    def read_frame(socket: Any) -> None:
        state = json.loads(socket.recv(timeout=60))
        for entry in state["episode_state"]["action_logs"]:
            assert entry.pop("timestamp")
        transcript.append(state)

    def ask(method: str, path: str, body: Any = None) -> None:
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
            answer = client.request(method, path, json=body)
        transcript.append((method, path, answer.status_code, answer.json() if answer.status_code < 500 else None))

    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
        for path in ("/", "/web"):
            redirect = client.get(path)
            transcript.append((redirect.status_code, str(redirect.url.join(redirect.headers["location"]).path)))
        paths = client.get("/openapi.json").json()["paths"]
        transcript.append(sorted((path, sorted(methods)) for path, methods in paths.items() if path.startswith("/web")))
    with connect(f"ws{url.removeprefix('http')}/ws/ui", proxy=None) as socket:
        read_frame(socket)
        ask("GET", "/web/metadata")
        ask("GET", "/web/state")
        for path, body in (
            ("/web/step", {"action": {"word": "early"}}),
            ("/web/reset", None),
            ("/web/reset", {"seed": 3, "episode_id": "second", "other": 1}),
            ("/web/step", {"action": {"word": "hello", "times": 2}}),
            ("/web/step", {"action": {"word": "again"}}),
        ):
            ask("POST", path, body)
            read_frame(socket)
        ask("POST", "/web/step", {"action": {"word": "stop"}})
        ask("GET", "/web/state")
    return transcript


@pytest.mark.slow
@pytest.mark.published
def test_the_same_requests_get_the_same_answers_and_frames(
    ours: Interpreter, published: Interpreter, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    transcripts = []
    for interpreter in (ours, published):
        folder = tmp_path / interpreter.name
        folder.mkdir()
        with served(interpreter, folder, free_port()) as url:
            transcripts.append(play(url))
    assert transcripts[0] == transcripts[1]
