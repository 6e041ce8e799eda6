"""Environments that tests share: each does one thing that a test can see or wait for.

`Idle` and `Tools` are the bases of environments that only one test needs: it writes what differs. `fresh` gives a
test module a class of its own, whose gates and records no other module touches.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, TypeVar

from fastmcp import FastMCP

from openenv.env.environment import Environment
from openenv.env.mcp_environment import MCPEnvironment
from openenv.types import Action, Observation, State
from slow_steps import take

GATE_TIMEOUT_S = 30.0
EnvT = TypeVar("EnvT", bound=type[Any])


def fresh(env_cls: EnvT, **attributes: Any) -> EnvT:
    """Return a subclass of the same name with gates and records of its own, and these attributes."""
    kinds = {threading.Event, list, int}
    own = {name: type(value)() for name, value in vars(env_cls).items() if type(value) in kinds}
    subclass: Any = type(env_cls.__name__, (env_cls,), {"__doc__": env_cls.__doc__, **own, **attributes})
    return subclass  # type: ignore[no-any-return]


class Idle(Environment[Action, Observation, State]):
    """Does nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return Observation()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return Observation()

    @property
    def state(self) -> Any:
        return State()


class Add(Action):
    """Add a number, after a pause or once the gate is open; or fail."""

    amount: int = 1
    pause_s: float = 0.0
    wait: bool = False
    fail: bool = False


class Sum(Observation):
    """What was added up so far."""

    total: int = 0


class Counter(Environment[Add, Sum, State]):
    """Adds up from its seed on, so that a step that ran twice or not at all shows."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    gate = threading.Event()
    entered = threading.Event()
    closed = 0
    lock: ClassVar[Any] = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.episode = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.total = seed or 0
        self.episode = State(episode_id=episode_id)
        return Sum(total=self.total)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if action.wait:
            self.entered.set()
            assert self.gate.wait(GATE_TIMEOUT_S)
        take(action.pause_s)
        if action.fail:
            raise ValueError("asked to fail")
        self.total += action.amount
        self.episode.step_count += 1
        return Sum(total=self.total, reward=float(action.amount), metadata=extras(timeout_s, kwargs))

    @property
    def state(self) -> State:
        return self.episode

    def close(self) -> None:
        with self.lock:
            type(self).closed += 1


class Tally(Counter):
    """Adds up from 0 on, whatever its seed; the web page draws one."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return super().reset(None, episode_id)


def extras(timeout_s: float | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a step got beside its action, if it got anything."""
    return {"timeout_s": timeout_s, **kwargs} if timeout_s is not None or kwargs else {}


class Push(Action):
    """Push so often, after a pause; perhaps fail afterwards."""

    force: int = 1
    pause_s: float = 0.0
    fail: bool = False


class Pushed(Observation):
    """How often the button was pushed."""

    count: int = 0


class Button(Environment[Push, Pushed, State]):
    """Counts pushes, those that fail too."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Pushed:
        self.count = 0
        return Pushed()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Pushed:
        take(action.pause_s)
        self.count += action.force
        if action.fail:
            raise ValueError("broken")
        return Pushed(count=self.count)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


class Say(Action):
    """A word."""

    message: str = ""


class Heard(Observation):
    """The same word, and how many there were."""

    text: str = ""
    count: int = 0


class Parrot(Environment[Say, Heard, State]):
    """Repeats words; `wait` waits for the gate, `boom` fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    gate = threading.Event()
    entered = threading.Event()
    closed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        if kwargs.get("fail"):
            raise RuntimeError("reset failed")
        self.count = 0
        return Heard(text=f"seed {seed}")

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if action.message == "wait":
            self.entered.set()
            assert self.gate.wait(GATE_TIMEOUT_S)
        if action.message == "boom":
            raise RuntimeError("it broke")
        self.count += 1
        return Heard(text=action.message, count=self.count)

    @property
    def state(self) -> Any:
        return State(step_count=self.count)

    def close(self) -> None:
        self.closed.append(self.count)


class Move(Action):
    """Go to a place by its name."""

    to: str = ""


class Place(Idle):
    """Takes moves; there is no `nowhere`, and `far away` is reached once the gate is open."""

    gate = threading.Event()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        if action.to == "nowhere":
            raise RuntimeError("there is no such place")
        if action.to == "far away":
            assert self.gate.wait(GATE_TIMEOUT_S)
        return Observation(reward=1.0)


class Walk(Action):
    """Go so far."""

    by: int = 1


class Spot(Observation):
    """Where one is."""

    at: int = 0


class Track(Environment[Walk, Spot, State]):
    """A track to 3, walked from the seed on; each step is worth where it ends."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.episode = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Spot:
        self.at = seed or 0
        self.episode = State(episode_id=episode_id)
        return Spot(at=self.at)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Spot:
        self.at += action.by
        self.episode.step_count += 1
        return Spot(at=self.at, reward=float(self.at), done=self.at >= 3)

    @property
    def state(self) -> State:
        return self.episode


class Tools(MCPEnvironment):
    """Has the methods that `TOOLS` names as tools, and nothing else to do."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    TOOLS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, server: FastMCP | None = None, transform: Any = None) -> None:
        server = server or FastMCP(type(self).__name__.lower())
        for name in self.TOOLS:
            server.tool(getattr(self, name))
        super().__init__(server, transform)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return Observation()

    @property
    def state(self) -> Any:
        return State()


class Shelf(Tools):
    """Keeps what is put on it; one tool fails."""

    TOOLS = ("put", "drop")

    def __init__(self) -> None:
        super().__init__()
        self.items: list[str] = []

    def put(self, item: str) -> int:
        """Put something onto the shelf."""
        self.items.append(item)
        return len(self.items)

    def drop(self) -> None:
        raise ValueError("the shelf is too high")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.items.clear()
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("this environment has only tools")

    @property
    def state(self) -> Any:
        return State(step_count=len(self.items))


class Greeter(Tools):
    """Has one tool."""

    TOOLS = ("greet",)

    def greet(self) -> str:
        """Say hello."""
        return "hello"
