"""The environment of the tests of workers and gateways: it counts its steps, and says where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from openenv import Action, Environment, Observation, State, create_app
from openenv.env.tools.source import ToolOutcome, ToolRequest, ToolSource
from slow_steps import take


class Count(Action):
    """Counts on, perhaps slowly."""

    by: int = 1
    sleep_s: float = 0.0
    padding: str = ""


class Counted(Observation):
    """What has been counted, and where."""

    total: int = 0
    pid: int = 0
    server: str = ""
    padding: str = ""


class Adder(ToolSource):
    """The tool `add` of one environment. Not FastMCP's, which takes seconds to load in each process."""

    def __init__(self, env: Counting) -> None:
        self._env = env

    async def describe(self) -> list[dict[str, Any]]:
        """List it."""
        schema = {"type": "object", "properties": {"by": {"type": "integer"}}}
        return [{"name": "add", "description": "Add a number.", "inputSchema": schema}]

    async def call(self, request: ToolRequest) -> ToolOutcome:
        """Add a number to what the environment has counted."""
        return ToolOutcome.of_text(str(self._env.add(int(request.arguments["by"]))))

    async def ask_server(self, work: Any) -> Any:
        """There is none."""
        raise NotImplementedError


class Counting(Environment[Count, Counted, State]):
    """Counts; `server` is the name that it gives itself."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    server = ""

    def __init__(self) -> None:
        super().__init__()
        self._total = 0
        self._steps = 0
        self.tools = Adder(self)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Counted:
        """Begin at 0."""
        self._total = self._steps = 0
        return self._counted()

    def step(self, action: Count, timeout_s: float | None = None, **kwargs: Any) -> Counted:
        """Count on."""
        take(action.sleep_s)
        self._steps += 1
        self._total += action.by
        return self._counted(reward=float(action.by), padding=action.padding)

    def _counted(self, reward: float | None = None, padding: str = "") -> Counted:
        return Counted(total=self._total, pid=os.getpid(), server=self.server, padding=padding, reward=reward)

    def add(self, by: int) -> int:
        """Add a number."""
        self._total += by
        return self._total

    @property
    def state(self) -> State:
        """Return the steps taken."""
        return State(step_count=self._steps)

    def close(self) -> None:
        """Leave a trace of an orderly end, if there was an episode: the server builds one to see that it can."""
        folder = os.environ.get("CLOSED_IN")
        if folder and self._steps:
            (Path(folder) / f"{os.getpid()}-{id(self)}").touch()


app = create_app(Counting, Count, Counted, env_name="counting", max_concurrent_envs=64)
