"""Environments for the tests of the process runner: workers import this file, which therefore needs no pytest."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from openenv.env.environment import Environment
from openenv.env.rubrics.rubric import Rubric
from openenv.types import Action, EnvironmentMetadata, Observation, State
from slow_steps import take, take_async

DEATHS = ("kill", "exit", "segfault")


def die(how: str) -> None:
    """End this process in one of the ways in which environments do."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(7)
    elif how == "segfault":
        ctypes.string_at(0)


def fail(how: str, text: Any) -> None:
    """Raise in one of the ways in which environments do."""

    class Local(RuntimeError):
        pass

    if how == "raise unpicklable":
        raise Unpicklable("this", "that")
    if how == "raise local":
        raise Local("only known here")
    if how == "raise exit":
        raise SystemExit(3)
    raise LookupError(text)


class Do(Action):
    what: str = "look"
    value: Any = None


class Saw(Observation):
    pid: int = 0
    thread: int = 0
    count: int = 0
    value: Any = None


class Inside(State):
    history: list[str] = Field(default_factory=list)


class Unpicklable(ValueError):
    """Cannot be pickled, nor rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


class Always(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return 0.75


class Perilous(Environment[Do, Saw, Inside]):
    """Does what the action says, and dies of some of it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(rubric=Always())
        self.history: list[str] = []
        self.threads = {threading.get_ident()}
        self.dies_in_close = ""
        self.hangs_in_close = False

    def _saw(self, value: Any = None) -> Saw:
        self.threads.add(threading.get_ident())
        return Saw(pid=os.getpid(), thread=threading.get_ident(), count=len(self.history), value=value)

    def reset(self, seed: int | None = None, episode_id: str | None = None, die_by: str = "", level: int = 0) -> Saw:
        die(die_by)
        self.history = []
        return self._saw({"seed": seed, "episode_id": episode_id, "level": level})

    def step(self, action: Do, timeout_s: float | None = None, extra: str = "") -> Saw:
        self.history.append(action.what)
        if action.what in DEATHS:
            die(action.what)
        if action.what.startswith("raise"):
            fail(action.what, action.value)
        if action.what == "keywords":
            value: Any = {"timeout_s": timeout_s, "extra": extra}
        else:
            value = self._act(action.what, action.value)
        observation = self._saw(value)
        observation.reward = self._apply_rubric(action, observation)
        return observation

    def _act(self, what: str, value: Any) -> Any:
        match what:
            case "sleep":
                take(value)
            case "die in close":
                self.dies_in_close = value
            case "hang in close":
                self.hangs_in_close = True
            case "threads":
                return len(self.threads)
            case "array":
                return np.arange(6, dtype=np.float32).reshape(2, 3)
            case "bytes":
                return b"\xff\x00" * 3
            case "print":
                sys.stdout.write(value)
                sys.stdout.flush()
            case "log":
                logging.getLogger("somebody").warning("%s", value)
            case "wait for file":
                deadline = time.monotonic() + 60
                while not Path(value).exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
        return value

    @property
    def state(self) -> Inside:
        return Inside(step_count=len(self.history), history=self.history)

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="Perilous", description=f"process {os.getpid()}", version="1.0.0")

    def close(self) -> None:
        die(self.dies_in_close)
        if self.hangs_in_close:
            threading.Event().wait()

    # -- tasks ----------------------------------------------------------------------------------------------------

    def list_splits(self) -> list[str]:
        return ["train"]

    def list_tasks(self, split: str) -> Any:
        if split != "train":
            raise KeyError(split)
        return ({"number": number} for number in range(3))

    async def num_tasks(self, split: str) -> int:
        await asyncio.sleep(0)
        return 3


class NotShared(Perilous):
    SUPPORTS_CONCURRENT_SESSIONS = False


class OneThread(Perilous):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class Awaiting(Perilous):
    """The same with coroutines."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Saw:
        await asyncio.sleep(0)
        return super().reset(seed, episode_id)

    async def step_async(self, action: Do, timeout_s: float | None = None, **kwargs: Any) -> Saw:
        if action.what == "sleep":
            await take_async(action.value)
        return super().step(action)

    def reset(self, *args: Any, **kwargs: Any) -> Saw:
        raise AssertionError("the asynchronous one is meant")

    def step(self, *args: Any, **kwargs: Any) -> Saw:
        raise AssertionError("the asynchronous one is meant")


class NeverBuilt(Perilous):
    """Kills its process in the constructor, while a file is there."""

    def __init__(self, marker: str = "") -> None:
        if Path(marker).exists():
            die("kill")
        super().__init__()


def make(cls: type[Perilous] = Perilous):  # type: ignore[no-untyped-def] # says nothing of what it makes
    return cls()
