"""Rollouts: a task, an agent in a sandbox, every model call captured, a reward that the agent cannot reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Agent": "openenv.rollout.agents.base",
    "AgentRun": "openenv.rollout.agents.base",
    "Budget": "openenv.rollout.task",
    "Cancellation": "openenv.rollout.progress",
    "Capture": "openenv.rollout.capture",
    "CaptureServer": "openenv.rollout.capture",
    "Check": "openenv.rollout.task",
    "CommandResult": "openenv.rollout.outcome",
    "Engine": "openenv.rollout.engine",
    "Installation": "openenv.rollout.agents.base",
    "Launch": "openenv.rollout.agents.base",
    "Model": "openenv.rollout.task",
    "Outcome": "openenv.rollout.outcome",
    "Progress": "openenv.rollout.outcome",
    "RolloutStore": "openenv.rollout.store",
    "RolloutTurn": "openenv.rollout.outcome",
    "Task": "openenv.rollout.task",
    "agent": "openenv.rollout.agents.base",
    "load_task": "openenv.rollout.task",
    "reverify": "openenv.rollout.engine",
    "run_cheats": "openenv.testing.cheats",
    "run_many": "openenv.rollout.engine",
    "run_many_async": "openenv.rollout.engine",
    "run_rollout": "openenv.rollout.engine",
    "run_rollout_async": "openenv.rollout.engine",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.rollout.agents.base import Agent as Agent
    from openenv.rollout.agents.base import AgentRun as AgentRun
    from openenv.rollout.agents.base import Installation as Installation
    from openenv.rollout.agents.base import Launch as Launch
    from openenv.rollout.agents.base import agent as agent
    from openenv.rollout.capture import Capture as Capture
    from openenv.rollout.capture import CaptureServer as CaptureServer
    from openenv.rollout.engine import Engine as Engine
    from openenv.rollout.engine import reverify as reverify
    from openenv.rollout.engine import run_many as run_many
    from openenv.rollout.engine import run_many_async as run_many_async
    from openenv.rollout.engine import run_rollout as run_rollout
    from openenv.rollout.engine import run_rollout_async as run_rollout_async
    from openenv.rollout.outcome import CommandResult as CommandResult
    from openenv.rollout.outcome import Outcome as Outcome
    from openenv.rollout.outcome import Progress as Progress
    from openenv.rollout.outcome import RolloutTurn as RolloutTurn
    from openenv.rollout.progress import Cancellation as Cancellation
    from openenv.rollout.store import RolloutStore as RolloutStore
    from openenv.rollout.task import Budget as Budget
    from openenv.rollout.task import Check as Check
    from openenv.rollout.task import Model as Model
    from openenv.rollout.task import Task as Task
    from openenv.rollout.task import load_task as load_task
    from openenv.testing.cheats import run_cheats as run_cheats

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
