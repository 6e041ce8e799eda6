"""Environments whose episodes are copied: what an episode depends on shows in every observation.

Workers import this file, so it needs no pytest.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import tempfile
import threading
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from openenv.env.environment import Environment
from openenv.types import Action, Observation, State
from slow_steps import take
from waiting import wait_until

GATE_TIMEOUT_S = 30.0


class Go(Action):
    """Walk; wait for the gate before, or do something else on the way."""

    by: int = 1
    wait: bool = False
    what: str = ""


class Seen(Observation):
    """Where one is, what was drawn, and which process it was."""

    at: int = 0
    path: list[int] = Field(default_factory=list)
    luck: float = 0.0
    pid: int = 0
    thread: int = 0


class Walker(Environment[Go, Seen, State]):
    """Walks by the step that it gets and by what it draws from a generator of its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    gate = threading.Event()
    entered = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)
        self.at = 0
        self.path: list[int] = []
        self.episode = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.random = random.Random(seed)
        self.at = 0
        self.path = []
        self.episode = State(episode_id=episode_id)
        return self.seen()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        if action.wait:
            type(self).entered.set()
            assert type(self).gate.wait(GATE_TIMEOUT_S)
        if action.what:
            getattr(self, action.what)()
        self.at += action.by
        self.path.append(self.at)
        self.episode.step_count += 1
        return self.seen()

    def seen(self) -> Seen:
        """Draw, and look around."""
        here = {"pid": os.getpid(), "thread": threading.get_ident()}
        return Seen(at=self.at, path=list(self.path), luck=self.draw(), reward=float(self.at), **here)

    def draw(self) -> float:
        """Draw a number."""
        return self.random.random()

    @property
    def state(self) -> State:
        return self.episode

    # -- steps that only a process can take --

    def pause(self) -> None:
        """Take a while."""
        take(0.3)

    def die(self) -> None:
        """End the process."""
        os._exit(3)


class Locked(Walker):
    """Has a lock, which `deepcopy` cannot copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Bookkeeper(Locked):
    """Has a lock, and says itself what an episode is."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).built += 1

    def snapshot(self) -> Any:
        return {"at": self.at, "path": self.path, "random": self.random, "episode": self.episode}

    def restore(self, snapshot: Any) -> None:
        self.__dict__.update(snapshot)


class Librarian(Bookkeeper):
    """Keeps its state elsewhere, as it says."""

    HAS_EXTERNAL_STATE = True


class Careless(Walker):
    """Keeps its state elsewhere, as it says, and cannot say what it is."""

    HAS_EXTERNAL_STATE = True


class Forgetful(Bookkeeper):
    """Cannot be restored."""

    def restore(self, snapshot: Any) -> None:
        raise KeyError("what was it?")


class Single(Walker):
    """Does not say that there may be several."""

    SUPPORTS_CONCURRENT_SESSIONS = False


class Native(Walker):
    """Draws from everything that has a state in a process: Python's generator, NumPy's, memory of C, an open file."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ctypes.create_string_buffer(8)
        self.file = open(__file__, "rb", buffering=0)  # noqa: SIM115 - for the life of the environment
        self.local = threading.local()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        random.seed(seed)
        np.random.seed(seed)
        self.local.draws = 0  # in a thread of its own
        self.file.seek(0)
        ctypes.memset(self.memory, 0, 8)
        return super().reset(seed, episode_id, **kwargs)

    def draw(self) -> float:
        self.memory[0] = (self.memory.raw[0] + 1) % 256
        self.local.draws += 1
        return random.random() + np.random.random() + self.memory.raw[0] + self.file.read(1)[0] + self.local.draws

    def close(self) -> None:
        self.file.close()

    # -- what a copy of the process would share, or lose; `drop` ends it --

    def keep(self, kept: Any, drop: Any) -> None:
        """Keep something until it is dropped."""
        self.kept, self.drop = kept, drop

    def connect(self) -> None:
        """Have a connection."""
        one, other = socket.socketpair()
        self.keep(one, lambda: (one.close(), other.close()))

    def start_thread(self) -> None:
        """Have a thread."""
        end = threading.Event()
        thread = threading.Thread(target=end.wait, name="my-thread", daemon=True)
        thread.start()
        self.keep(thread, lambda: (end.set(), thread.join()))

    def start_process(self) -> None:
        """Have a child."""
        child = subprocess.Popen(["sleep", "60"])
        # `Popen` returns when exec closes its pipe, a moment before the kernel gives the process its new name.
        name = Path(f"/proc/{child.pid}/comm")
        wait_until(lambda: name.read_text() == "sleep\n")
        self.keep(child, lambda: (child.kill(), child.wait()))

    def share_memory(self) -> None:
        """Have shared memory."""
        memory = mmap(-1, 4096)
        self.keep(memory, memory.close)

    def write_file(self) -> None:
        """Have a file open for writing."""
        file = tempfile.TemporaryFile()  # noqa: SIM115
        self.keep(file, file.close)

    def make_folder(self) -> None:
        """Have a folder."""
        folder = tempfile.TemporaryDirectory()
        self.keep(folder, folder.cleanup)

    def log(self) -> None:
        """Have a log, which copies may share."""
        file = open(Path(tempfile.gettempdir(), f"forked-{os.getpid()}.log"), "a")  # noqa: SIM115
        os.unlink(file.name)
        self.keep(file, file.close)


def go(env: Any, *steps: int) -> list[tuple[int, float]]:
    """Take steps with a client; return where each led, and what was drawn."""
    return [(seen["at"], seen["luck"]) for seen in (env.step({"by": step}).observation for step in steps)]
