"""What the client tests share: an environment served on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from openenv.env.environment import Environment
from openenv.server.app import create_app
from openenv.types import Action, Observation, State


class Say(Action):
    message: str = ""


class Heard(Observation):
    text: str = ""


class Parrot(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    gate = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        if kwargs.get("fail"):
            raise RuntimeError("reset failed")
        self.count = 0
        return Heard(text=f"seed {seed}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        if action.message == "wait":
            self.gate.wait(5)
        self.count += 1
        return Heard(text=action.message)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


@pytest.fixture
def gate() -> threading.Event:
    """Opens the steps that wait."""
    Parrot.gate.clear()
    return Parrot.gate


@pytest.fixture
def parrot_app() -> Callable[..., Any]:
    """Build the application of the environment."""

    def build(sessions: int = 4, **kwargs: Any) -> Any:
        return create_app(Parrot, Say, Heard, max_concurrent_envs=sessions, **kwargs)

    return build


@pytest.fixture
def parrot(serve: Callable[..., Any], parrot_app: Callable[..., Any]) -> Any:
    """A server of the environment, with four slots."""
    return serve(parrot_app())
