"""Fixtures for the capture proxy's tests: a model endpoint, a proxy, an agent that calls it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

import fake_engine as fake
from openenv.rollout.capture import Capture, CaptureOptions, CaptureServer, export
from openenv.rollout.tasks.task import Budget, Model
from waiting import wait_until


@pytest.fixture(name="fake")
def _fake() -> ModuleType:
    """The module of the model endpoint for tests."""
    return fake


@pytest.fixture
def engine() -> Iterator[Any]:
    """A model endpoint; set `respond` to have it answer in another way."""
    with fake.FakeEngine() as running:
        yield running


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CaptureServer]:
    """A proxy; a parameter has more of its options."""
    more = getattr(request, "param", {})
    options = CaptureOptions(admin_key="the-admin-key", backoff_s=0.01, holds_calls=True, **more)
    with CaptureServer(tmp_path / "records", options) as running:
        yield running


class Agent:
    """What an agent's program does: calls with its key."""

    def __init__(self, server: CaptureServer, capture: Capture) -> None:
        self.capture = capture
        # `verify=False`: reading the system's certificates takes longer than most tests, and none is needed.
        self.client = httpx2.Client(base_url=f"{server.url}/v1", timeout=20, trust_env=False, verify=False)
        self.headers = {"authorization": f"Bearer {capture.key}"}

    def post(self, path: str, body: Any) -> httpx2.Response:
        """Call, and return the whole answer."""
        return self.client.post(path, json=body, headers=self.headers)

    def chat(self, text: str = "hi", **body: Any) -> httpx2.Response:
        """Ask for a chat completion."""
        messages = body.pop("messages", None) or [{"role": "user", "content": text}]
        return self.post("/chat/completions", {"model": "any", "messages": messages, **body})

    def stream(self, path: str, body: Any) -> list[Any]:
        """Call, and return the data of every event."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return events(response.text)

    def chat_stream(self, text: str = "hi", **body: Any) -> list[Any]:
        """Ask for a chat completion as a stream, and return its chunks."""
        messages = body.pop("messages", None) or [{"role": "user", "content": text}]
        return self.stream("/chat/completions", {"model": "any", "messages": messages, "stream": True, **body})


def events(text: str) -> list[Any]:
    """The data of the events in a stream's text; the mark at its end is left out."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture
def agent_of(server: CaptureServer) -> Iterator[Callable[[Capture], Agent]]:
    """Return an agent with the key of a rollout that the test opened."""
    with contextlib.ExitStack() as stack:

        def made(capture: Capture) -> Agent:
            agent = Agent(server, capture)
            stack.callback(agent.client.close)
            return agent

        yield made


@pytest.fixture
def open_agent(server: CaptureServer, engine: Any) -> Iterator[Callable[..., Agent]]:
    """Open a rollout at the proxy, and return an agent with its key.

    At the end of every test, the calls that a `Capture` holds in memory must equal the ones on the disk.
    """
    with contextlib.ExitStack() as stack:

        def opened(rollout_id: str | None = None, *, budget: Budget | None = None, **model: Any) -> Agent:
            fields = {"base_url": engine.url, "name": "real-model", "api_key": "sk-real-secret", **model}
            agent = Agent(server, server.open(rollout_id, Model(**fields), budget=budget))
            stack.callback(agent.client.close)
            stack.callback(_check_held_calls, agent.capture)
            return agent

        yield opened


def _check_held_calls(capture: Capture) -> None:
    capture.revoke()
    held, stored = capture.trace(), capture.recording()
    assert export.turns(held) == export.turns(stored)
    assert export.sequences(held) == export.sequences(stored)
    assert (held.stops, held.notes, held.model) == (stored.stops, stored.notes, stored.model)
    for one, other in zip(held.calls, stored.calls, strict=True):
        assert (one.request, one.sent, one.completion) == (other.request, other.sent, other.completion)
        assert one.ended == other.ended


@pytest.fixture
def agent(open_agent: Callable[..., Agent]) -> Agent:
    """An agent with a rollout of its own."""
    return open_agent()


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., None]:
    """Wait until a condition holds, or fail."""
    return wait_until
