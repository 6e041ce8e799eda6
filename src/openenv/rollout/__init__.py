"""Rollouts: a task, an agent in a sandbox, every model call captured, a reward that the agent cannot reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.providers.ray_cluster": "RayCluster",
        "openenv.rollout.agents.base": "Agent AgentRun Installation Launch agent",
        "openenv.rollout.capture": "Capture CaptureServer",
        "openenv.rollout.tasks.checks": "Case Check case_check pytest_check python_check",
        "openenv.rollout.run.batch": "BatchOptions run_many run_many_async",
        "openenv.rollout.run.engine": "Engine EngineOptions run_rollout run_rollout_async",
        "openenv.rollout.run.reverify": "reverify",
        "openenv.rollout.run.stored_rollout": "StoredRollout resume_rollouts",
        "openenv.rollout.verify.lint": "TrustReading read_task",
        "openenv.rollout.capture.training_trace": "RolloutTurn",
        "openenv.rollout.store.outcome": "Outcome",
        "openenv.rollout.progress": "Cancellation Progress",
        "openenv.rollout.run.ray_engine": "RayEngine",
        "openenv.rollout.store.rollout_index": "RolloutFilter RolloutRow RolloutStats",
        "openenv.rollout.store.comparison": "compare_rollouts compare_stores",
        "openenv.rollout.store.store": "RolloutStore",
        "openenv.rollout.tasks.task": "BranchPoint Budget CommandResult Model Sampling Task Trust load_task",
        "openenv.rollout.tasks.task_folders": "load_tasks",
        "openenv.rollout.tasks.task_sets": "TaskSet task_set task_set_names",
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.providers.ray_cluster import RayCluster as RayCluster
    from openenv.rollout.agents.base import Agent as Agent
    from openenv.rollout.agents.base import AgentRun as AgentRun
    from openenv.rollout.agents.base import Installation as Installation
    from openenv.rollout.agents.base import Launch as Launch
    from openenv.rollout.agents.base import agent as agent
    from openenv.rollout.capture import Capture as Capture
    from openenv.rollout.capture import CaptureServer as CaptureServer
    from openenv.rollout.capture.training_trace import RolloutTurn as RolloutTurn
    from openenv.rollout.progress import Cancellation as Cancellation
    from openenv.rollout.progress import Progress as Progress
    from openenv.rollout.run.batch import BatchOptions as BatchOptions
    from openenv.rollout.run.batch import run_many as run_many
    from openenv.rollout.run.batch import run_many_async as run_many_async
    from openenv.rollout.run.engine import Engine as Engine
    from openenv.rollout.run.engine import EngineOptions as EngineOptions
    from openenv.rollout.run.engine import run_rollout as run_rollout
    from openenv.rollout.run.engine import run_rollout_async as run_rollout_async
    from openenv.rollout.run.ray_engine import RayEngine as RayEngine
    from openenv.rollout.run.reverify import reverify as reverify
    from openenv.rollout.run.stored_rollout import StoredRollout as StoredRollout
    from openenv.rollout.run.stored_rollout import resume_rollouts as resume_rollouts
    from openenv.rollout.store.comparison import compare_rollouts as compare_rollouts
    from openenv.rollout.store.comparison import compare_stores as compare_stores
    from openenv.rollout.store.outcome import Outcome as Outcome
    from openenv.rollout.store.rollout_index import RolloutFilter as RolloutFilter
    from openenv.rollout.store.rollout_index import RolloutRow as RolloutRow
    from openenv.rollout.store.rollout_index import RolloutStats as RolloutStats
    from openenv.rollout.store.store import RolloutStore as RolloutStore
    from openenv.rollout.tasks.checks import Case as Case
    from openenv.rollout.tasks.checks import Check as Check
    from openenv.rollout.tasks.checks import case_check as case_check
    from openenv.rollout.tasks.checks import pytest_check as pytest_check
    from openenv.rollout.tasks.checks import python_check as python_check
    from openenv.rollout.tasks.task import BranchPoint as BranchPoint
    from openenv.rollout.tasks.task import Budget as Budget
    from openenv.rollout.tasks.task import CommandResult as CommandResult
    from openenv.rollout.tasks.task import Model as Model
    from openenv.rollout.tasks.task import Sampling as Sampling
    from openenv.rollout.tasks.task import Task as Task
    from openenv.rollout.tasks.task import Trust as Trust
    from openenv.rollout.tasks.task import load_task as load_task
    from openenv.rollout.tasks.task_folders import load_tasks as load_tasks
    from openenv.rollout.tasks.task_sets import TaskSet as TaskSet
    from openenv.rollout.tasks.task_sets import task_set as task_set
    from openenv.rollout.tasks.task_sets import task_set_names as task_set_names
    from openenv.rollout.verify.lint import TrustReading as TrustReading
    from openenv.rollout.verify.lint import read_task as read_task

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
