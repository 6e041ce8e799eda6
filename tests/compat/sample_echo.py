"""The echo environment most examples begin with, its client and its application, and the shortest ways to play it."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from websockets.sync.client import connect

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed: str = ""


class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id, step_count=0)
        return EchoObservation(echoed="ready", metadata=kwargs)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        self._state.step_count += 1
        return EchoObservation(echoed=action.message, reward=float(len(action.message)), metadata=kwargs)

    @property
    def state(self) -> State:
        return self._state


class EchoEnv(EnvClient[EchoAction, EchoObservation, State]):
    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        observation = EchoObservation(echoed=payload["observation"].get("echoed", ""))
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(episode_id=payload.get("episode_id"), step_count=payload.get("step_count", 0))

    async def say(self, *words: str) -> list[str]:
        """A helper as published clients have them."""
        return [(await self.step(EchoAction(message=word))).observation.echoed for word in words]

    async def say_twice(self, word: str) -> str:
        """A helper that uses a helper."""
        return "".join(await self.say(word, word))

    def greeting(self, name: str) -> EchoAction:
        """A helper that sends nothing."""
        return EchoAction(message=f"hello {name}")


def echo_app(**kwargs: Any) -> FastAPI:
    """The application most environments have."""
    return create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", **kwargs)


def frames(url: str, *sent: Any) -> list[Any]:
    """Exchange frames with a server."""
    with connect("ws" + url.removeprefix("http") + "/ws", proxy=None) as ws:
        replies = []
        for frame in sent:
            ws.send(json.dumps(frame))
            replies.append(json.loads(ws.recv(10)))
        return replies


def played(url: str) -> tuple[str, float]:
    """Play the shortest episode."""
    begun, stepped = frames(url, {"type": "reset"}, {"type": "step", "data": {"message": "hi"}})
    assert begun["data"]["observation"]["echoed"] == "ready"
    return stepped["data"]["observation"]["echoed"], stepped["data"]["reward"]
