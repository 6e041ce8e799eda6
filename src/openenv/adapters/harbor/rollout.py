"""Run one rollout of a Harbor task behind a capture session. Failures are results, not exceptions.

    agent's sandbox ── capture server: a rollout, which is also a session of `registry` ── model

The rollout's records go to the store. The session, which reads the same records, has the tokens for the result.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr

from openenv.errors import RolloutError, message_of
from openenv.rollout.agents.base import Agent
from openenv.rollout.agents.base import agent as agent_by_name
from openenv.rollout.capture.sessions_api.capture_sessions import (
    CaptureSession,
    rollout_type_for,
)
from openenv.rollout.capture.sessions_api.documents import export_session
from openenv.rollout.run.engine import named_backend, run_rollout_async
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Budget, Model, Task
from openenv.rollout.tasks.task_folders import load_harbor_task
from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.docker import DockerSandboxes

from . import seams
from .models import HarborRolloutResult, conversations_from_document, turns_from_document
from .options import HarborRun, takes_fields

# Parameters that an agent may choose if the caller does not.
_AGENT_MAY_SET = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_COUNTED = ("ok", "policy_failed", "truncated")
"""Outcomes with a reward that measures the agent: a timeout or a full budget is the agent's failure."""
# Names of trials become folders and container names.
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]+")


async def run_task(run: HarborRun) -> HarborRolloutResult:
    """Run an agent on a task, verify its work in a fresh sandbox, and return the result.

    A failure is a result with `ok=False`. Only a cancellation is raised, after all resources are freed.
    """
    folder, began = Path(str(run.task_dir)), time.monotonic()
    # The result exists before anything can fail, so that every path can fill it.
    result = HarborRolloutResult(
        task_id=str(folder),
        task_name=folder.name,
        dataset=run.dataset,
        harness=run.harness_name,
        sandbox=run.sandbox_name,
        trial_name=_FORBIDDEN.sub("-", f"{run.session_prefix}-{folder.name[:28]}-{secrets.token_hex(4)}"),
        capture_level=run.capture_level,
        rollout_type="eval",
    )
    session: CaptureSession | None = None
    try:
        result.rollout_type = rollout_type_for(run.purpose, run.capture_level)
        # Check everything that can fail without a sandbox before the session opens.
        if run.keep_sandbox:
            raise ValueError("sandboxes of rollouts are always closed: read the stored work tree instead")
        if not isinstance(run.harness, Agent):
            seams.get(run.harness, profile=run.harness_profile)
        # Reading files and building images block the loop, which may serve other rollouts.
        task = await asyncio.to_thread(_task, folder, run.reward_key, run.agent_timeout_sec)
        backend = named_backend(run.sandbox)
        if run.force_build:
            await asyncio.to_thread(_build_again, backend, task)
        session = run.registry.create(
            upstream=run.upstream,
            capture_level=run.capture_level,
            purpose=run.purpose,
            eval_sampling=run.eval_sampling,
            max_model_calls=run.agent_step_limit or 0,
            sampling=run.sampling,
            harness=result.harness,
            sandbox=result.sandbox,
            task=folder.name,
        )
        result.session_id = session.session_id
        if run.on_session_created is not None:
            run.on_session_created(session.session_id)
        outcome = await _run_behind(session, run, task, backend, rollout_id=result.trial_name)
        _add_outcome(result, outcome, require_reward=run.require_reward)
        _add_capture(result, export_session(session, include_messages=True, capture_level=run.capture_level))
    except Exception as exc:  # a trainer needs a result even if the rollout fails
        result.ok, result.error, result.exception_type = False, message_of(exc)[:600], type(exc).__name__
    finally:
        # The session holds all messages in memory; they were exported above.
        if session is not None:
            run.registry.delete(session.session_id)
    if run.inference is not None:
        result.param_fixes = [str(fix) for fix in run.inference.param_fixes]
    # Includes building images, unlike the agent's time limit.
    result.wall_s = round(time.monotonic() - began, 2)
    return result


run_rollout = takes_fields(HarborRun, run_task, name="run_rollout")


async def _run_behind(
    session: CaptureSession, run: HarborRun, task: Task, backend: Sandboxes, *, rollout_id: str
) -> Outcome:
    """Run the rollout as the session's: its agent's calls are the session's turns.

    A listening capture server proxies each call once, because the engine opens the rollout in it. A capture server
    behind an ASGI server has no socket for sandboxes, so the engine starts its own, with the session as its endpoint.
    """
    agent, server = _agent(run.harness), run.registry.server
    # If the caller sets the sampling parameters, the agent may set none.
    agent_may_set = () if run.sampling is not None else _AGENT_MAY_SET
    capture = server if server is not None and server.is_listening and agent.dialect is not None else None
    if capture is not None:
        reserved = await capture.reserve(session, rollout_id)
        allowed = tuple(name for name in reserved.agent_may_set if name in agent_may_set)
        name = reserved.name or run.model or "model"
        model = reserved.model_copy(update={"name": name, "agent_may_set": allowed})
    else:
        model = Model(
            base_url=f"{run.intercept_url.rstrip('/')}/v1",
            name=run.model or "model",
            api_key=SecretStr(session.session_id),
            max_tokens_cap=None,
            sampling={},  # the server behind that address decides
            agent_may_set=agent_may_set,
        )
    with RolloutStore(Path(str(run.trials_dir))) as store:
        return await run_rollout_async(
            task,
            agent=agent,
            sandbox=backend,
            model=model,
            capture=capture,
            budget=Budget(max_calls=run.agent_step_limit or None),
            validate_checks=False,  # the published function runs a task once, and its callers' time limits expect that
            store=store,
            rollout_id=rollout_id,
            metadata={"dataset": run.dataset, "session_id": session.session_id},
        )


def _task(folder: Path, reward_key: str, agent_timeout_sec: float | None) -> Task:
    task = load_harbor_task(folder)
    changes: dict[str, Any] = {}
    if agent_timeout_sec:
        # NaN compares false with everything and would disable the limit.
        if not (math.isfinite(agent_timeout_sec) and agent_timeout_sec > 0):
            raise ValueError(f"agent_timeout_sec must be greater than 0, not {agent_timeout_sec}")
        changes["agent_timeout_s"] = agent_timeout_sec
    if reward_key:
        changes["reward_key"] = reward_key
    return task.model_copy(update=changes)


def _agent(harness: str | Agent) -> Agent:
    """Return an agent by its name in Harbor, or instantiate `module:Class`."""
    if isinstance(harness, Agent):
        return harness
    # Harbor says `nop`, we say `noop`.
    if ":" not in harness:
        return agent_by_name("noop" if harness == "nop" else harness)
    module, _, attribute = harness.partition(":")
    # Custom agents are classes without arguments.
    made = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, Agent):
        raise RolloutError(f"{harness} must be a subclass of openenv.rollout.Agent")
    return made


def _build_again(backend: Sandboxes, task: Task) -> None:
    if not isinstance(backend, DockerSandboxes):
        raise RolloutError(f"force_build: the backend {backend.name} builds no images; docker does")
    # Tasks with a ready image have nothing to build.
    if task.image is not None and task.build is not None:
        backend.rebuild(task.image, Path(task.build), timeout=task.build_timeout_s)


def _add_outcome(result: HarborRolloutResult, outcome: Outcome, *, require_reward: bool) -> None:
    result.reward = outcome.reward
    result.rewards = cast("dict[str, float]", outcome.metadata.get("rewards") or {})
    # A task with a single reward names none.
    if outcome.reward is not None and not result.rewards:
        result.rewards = {"reward": outcome.reward}
    # Which of several rewards became the headline.
    names = [name for name, value in result.rewards.items() if value == outcome.reward]
    result.reward_key = "reward" if "reward" in names else next(iter(names), "")
    result.phase_timings = dict(outcome.phase_s)
    result.agent_log_tail = outcome.agent_log_tail
    reason = None if outcome.status == "ok" else f"{outcome.status}: {outcome.reason}"
    # The reward stands; the reason is worth a warning.
    if outcome.status in _COUNTED:
        result.findings += [] if reason is None else [f"[WARN] {reason}"]
    # Callers may accept rollouts without a headline reward.
    elif outcome.status == "grader_failed" and not require_reward:
        result.findings.append(f"[WARN] no headline reward: {outcome.reason}")
    else:
        result.ok, result.error, result.exception_type = False, str(reason)[:600], outcome.status


def _add_capture(result: HarborRolloutResult, document: Mapping[str, Any]) -> None:
    stats = document["stats"]
    result.n_turns, result.n_roots = stats["n_turns"], stats["n_roots"]
    # More calls than conversations: at least one conversation went on.
    result.multi_turn = result.n_turns > result.n_roots
    result.budget_stop_count = document["budget_stop_count"]
    result.findings += _findings(document)
    if result.harness in ("oracle", "nop", "noop"):  # they call no model, so an empty capture is correct
        # An agent without a model captures nothing, which is right here.
        result.findings = [finding for finding in result.findings if "no_turns" not in finding]
    result.conversations = conversations_from_document(document)
    result.turns = turns_from_document(document)
    if result.rollout_type == "train":
        result.n_trainable_tokens = sum(sum(turn.loss_mask or []) for turn in result.turns if not turn.discarded)


def _findings(document: Mapping[str, Any]) -> list[str]:
    findings = [str(finding) for finding in document["validation"]]
    for row in document["sequences"]:
        findings += [f"[sequence {row['root_id']}] {finding}" for finding in row["validation"]]
    # Notes are for the log; results carry warnings and errors.
    return [finding for finding in findings if "[INFO]" not in finding]
