"""Environments for the tests of local vectors; worker processes import them from here."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from openenv.adapters.gymnasium import gymnasium_environment
from openenv.env.environment import Environment
from openenv.types import Action, Observation, State
from slow_steps import take


class Order(Action):
    """What the environment is to do."""

    do: str = ""


class Seen(Observation):
    """Values of several kinds."""

    text: str = ""
    data: bytes = b""
    numbers: dict[str, list[int]] = {}  # noqa: RUF012 - pydantic copies it
    pid: int = 0


class Scribe(Environment[Order, Seen, State]):
    """Does as it is told; its observations are not arrays."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.count = 0
        return Seen(text=f"seed {seed}", data=b"\x00\xff", numbers={"a": [1, 2]}, pid=os.getpid())

    def step(self, action: Order, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        if action.do == "fail":
            raise RuntimeError("as told")
        if action.do == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action.do == "hang":
            signal.pause()
        if action.do == "nap":
            take(0.5)
        self.count += 1
        reward = float("nan") if action.do == "nan" else 1.0
        return Seen(text=f"{action.do} {self.count}", reward=reward, done=action.do == "end", pid=os.getpid())


class Private(Scribe):
    """Does not declare that its instances share nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = False


class Broken(Scribe):
    """Cannot be built."""

    def __init__(self) -> None:
        raise OSError("no disk")


class Coroutines(Environment[Order, Seen, State]):
    """Steps on an event loop."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        return Seen(text="began")

    async def step_async(self, action: Order, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        if action.do == "fail":
            raise RuntimeError("as told")
        return Seen(text=action.do, reward=0.5)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        raise AssertionError("the coroutine is meant")

    def step(self, action: Order, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        raise AssertionError("the coroutine is meant")


FINE, FAIL, DIE, HANG, NAN, END, INFORM = range(7)
"""Actions of `Faulty`."""


class Faulty(gymnasium.Env[Any, Any]):
    """Fails, dies or hangs on request. Its observation is the number of steps."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.action_space = spaces.Discrete(7)
        self.observation_space = spaces.Box(-1, 1000, (3,), np.float32)
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"]}
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        if options and options.get("fail"):
            raise RuntimeError("no beginning")
        return self._seen(), {"options": options} if options else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == FAIL:
            raise RuntimeError("as told")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            signal.pause()
        self.steps += 1
        reward = float("nan") if action == NAN else 1.0
        info = {"steps": self.steps} if action == INFORM else {}
        return self._seen(), reward, bool(action == END), False, info

    def _seen(self) -> Any:
        return np.full(3, self.steps, np.float32)


class Nested(gymnasium.Env[Any, Any]):
    """Has actions and observations of several parts; shows its last action."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.action_space = spaces.Dict(
            {"go": spaces.Discrete(3, start=-1), "how": spaces.Box(-1, 1, (2,), np.float32)}
        )
        self.observation_space = spaces.Dict(
            {
                "pair": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.Box(-1, 1, (2,), np.float32))),
                "bits": spaces.MultiBinary(4),
            }
        )
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._seen(np.int64(0), np.zeros(2, np.float32)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return self._seen(action["go"], action["how"]), float(action["go"]), self.at == 5, self.at == 9, {"at": self.at}

    def _seen(self, go: Any, how: Any) -> Any:
        bits = np.array([int(bit) for bit in f"{self.at % 16:04b}"], np.int8)
        return {"pair": (go, how), "bits": bits}


def faulty(render_mode: str | None = None) -> Faulty:
    """Make a `Faulty`."""
    return Faulty(render_mode)


def nested(render_mode: str | None = None) -> Nested:
    """Make a `Nested`."""
    return Nested(render_mode)


FaultyEnvironment = gymnasium_environment(faulty)
NestedEnvironment = gymnasium_environment(nested)
