"""One rollout of a Harbor task behind a capture session: `run_rollout`, which raises nothing.

    agent's sandbox ── the rollout's own capture ── the session of a capture server (`registry`) ── model

The first records what the rollout did, for its store; the second has the tokens of the result.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr

from openenv.errors import RolloutError, message_of
from openenv.rollout.agents.base import Agent
from openenv.rollout.agents.base import agent as agent_by_name
from openenv.rollout.capture.sessions_api.capture_sessions import (
    CaptureSession,
    SessionRegistry,
    UpstreamAddress,
    rollout_type_for,
)
from openenv.rollout.capture.sessions_api.documents import export_session
from openenv.rollout.capture.sessions_api.engine_client import InferenceClient
from openenv.rollout.run.engine import named_backend, run_rollout_async
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.store import RolloutStore
from openenv.rollout.tasks.task import Budget, Model, Task
from openenv.rollout.tasks.task_folders import load_harbor_task
from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.docker import DockerSandboxes

from . import seams
from .models import HarborRolloutResult as HarborRolloutResult
from .models import HarborTurn as HarborTurn
from .models import conversations_from_document, turns_from_document
from .tasks import harbor_package_name

_AGENT_MAY_SET = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_COUNTED = ("ok", "policy_failed", "truncated")
"""Outcomes whose reward is about the agent."""
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]+")


async def run_rollout(
    *,
    task_dir: Path | str,
    harness: str | Agent,
    sandbox: str | Sandboxes,
    registry: SessionRegistry,
    intercept_url: str,
    model: str,
    trials_dir: Path | str,
    dataset: str = "",
    reward_key: str = "",
    require_reward: bool = True,
    keep_sandbox: bool = False,
    agent_timeout_sec: float | None = None,
    agent_step_limit: int | None = None,
    force_build: bool = False,
    session_prefix: str = "oe",
    capture_level: str = "tokens",
    upstream: UpstreamAddress | None = None,
    inference: InferenceClient | None = None,
    sampling: Mapping[str, Any] | None = None,
    purpose: str = "auto",
    eval_sampling: Mapping[str, Any] | None = None,
    harness_profile: str | None = None,
    on_session_created: Callable[[str], None] | None = None,
) -> HarborRolloutResult:
    """Run an agent on a task, verify its work in a fresh sandbox, and return what came of it.

    A failure is a result with `ok=False`; only a cancellation is raised, once everything is freed.

    Args:
        task_dir: The task's folder.
        harness: An agent's name, or `module:Class` of one of your own.
        sandbox: `docker`, `kubernetes`, or a backend of your own.
        registry: The sessions of a running capture server; the rollout gets one of its own.
        intercept_url: Where that server is.
        model: The model's id.
        trials_dir: Where the rollout is stored, as `openenv rollouts --store` reads it.
        dataset: The dataset's name, for the result.
        reward_key: Which of several rewards counts; or several names with commas, of which the first counts that is
            there.
        require_reward: Whether a rollout whose rewards name none that counts has failed.
        keep_sandbox: Refused: sandboxes are closed. The store keeps the work tree.
        agent_timeout_sec: The agent's time, in place of the task's.
        agent_step_limit: The most calls of the model.
        force_build: Build the image again, without the engine's cache.
        session_prefix: How the trial's name begins.
        capture_level: What the endpoint names: `tokens`, `logprobs` or `text`.
        upstream: The endpoint of this rollout, in place of the server's.
        inference: The client of the endpoint, for the parameters that it does not take.
        sampling: How training samples: `{"temperature": 1.0}`.
        purpose: `train`, `eval` or `auto`.
        eval_sampling: How an evaluation samples.
        harness_profile: Refused: no agent here has profiles.
        on_session_created: Gets the session's id before the agent starts.
    """
    folder, began = Path(str(task_dir)), time.monotonic()
    name = harness if isinstance(harness, str) else harness.name
    result = HarborRolloutResult(
        task_id=str(folder),
        task_name=folder.name,
        dataset=dataset,
        harness=name,
        sandbox=sandbox if isinstance(sandbox, str) else sandbox.name,
        trial_name=_FORBIDDEN.sub("-", f"{session_prefix}-{folder.name[:28]}-{secrets.token_hex(4)}"),
        capture_level=capture_level,
        rollout_type="eval",
    )
    session: CaptureSession | None = None
    try:
        result.rollout_type = rollout_type_for(purpose, capture_level)
        if keep_sandbox:
            raise ValueError("sandboxes of rollouts are always closed: read the stored work tree instead")
        if not isinstance(harness, Agent):
            seams.get(harness, profile=harness_profile)
        task = await asyncio.to_thread(_task, folder, reward_key, agent_timeout_sec)
        backend = named_backend(sandbox)
        if force_build:
            await asyncio.to_thread(_build_again, backend, task)
        session = registry.create(
            upstream=upstream,
            capture_level=capture_level,
            purpose=purpose,
            eval_sampling=eval_sampling,
            max_model_calls=agent_step_limit or 0,
            sampling=sampling,
            harness=name,
            sandbox=result.sandbox,
            task=folder.name,
        )
        result.session_id = session.session_id
        if on_session_created is not None:
            on_session_created(session.session_id)
        endpoint = Model(
            base_url=f"{intercept_url.rstrip('/')}/v1",
            name=model or "model",
            api_key=SecretStr(session.session_id),
            max_tokens_cap=None,
            agent_may_set=() if sampling is not None else _AGENT_MAY_SET,
        )
        with RolloutStore(Path(str(trials_dir))) as store:
            outcome = await run_rollout_async(
                task,
                agent=_agent(harness),
                sandbox=backend,
                model=endpoint,
                budget=Budget(max_calls=agent_step_limit or None),
                store=store,
                rollout_id=result.trial_name,
                metadata={"dataset": dataset, "session_id": session.session_id},
            )
        _note_outcome(result, outcome, require_reward=require_reward)
        _note_capture(result, export_session(session, include_messages=True, capture_level=capture_level))
    except Exception as exc:  # a trainer must get a result, whatever failed
        result.ok, result.error, result.exception_type = False, message_of(exc)[:600], type(exc).__name__
    finally:
        if session is not None:
            registry.delete(session.session_id)
    if inference is not None:
        result.param_fixes = [str(fix) for fix in inference.param_fixes]
    result.wall_s = round(time.monotonic() - began, 2)
    return result


def _task(folder: Path, reward_key: str, agent_timeout_sec: float | None) -> Task:
    task = load_harbor_task(folder)
    changes: dict[str, Any] = {}
    if agent_timeout_sec:
        if not (math.isfinite(agent_timeout_sec) and agent_timeout_sec > 0):
            raise ValueError(f"agent_timeout_sec must be greater than 0, not {agent_timeout_sec}")
        changes["agent_timeout_s"] = agent_timeout_sec
    if reward_key:
        changes["reward_key"] = reward_key
    return task.model_copy(update=changes)


def _agent(harness: str | Agent) -> Agent:
    """Return an agent by Harbor's name for it, or from another module."""
    if isinstance(harness, Agent):
        return harness
    if ":" not in harness:
        return agent_by_name("noop" if harness == "nop" else harness)
    module, _, attribute = harness.partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, Agent):
        raise RolloutError(f"{harness} is no agent: a subclass of openenv.rollout.Agent")
    return made


def _build_again(backend: Sandboxes, task: Task) -> None:
    if not isinstance(backend, DockerSandboxes):
        raise RolloutError(f"force_build: the backend {backend.name} builds no images; docker does")
    if task.image is not None and task.build is not None:
        backend.rebuild(task.image, Path(task.build), timeout=task.build_timeout_s)


def _note_outcome(result: HarborRolloutResult, outcome: Outcome, *, require_reward: bool) -> None:
    result.reward = outcome.reward
    result.rewards = cast("dict[str, float]", outcome.metadata.get("rewards") or {})
    if outcome.reward is not None and not result.rewards:
        result.rewards = {"reward": outcome.reward}
    names = [name for name, value in result.rewards.items() if value == outcome.reward]
    result.reward_key = "reward" if "reward" in names else next(iter(names), "")
    result.phase_timings = dict(outcome.phase_s)
    result.agent_log_tail = outcome.agent_log_tail
    reason = None if outcome.status == "ok" else f"{outcome.status}: {outcome.reason}"
    if outcome.status in _COUNTED:
        result.findings += [] if reason is None else [f"[WARN] {reason}"]
    elif outcome.status == "grader_failed" and not require_reward:
        result.findings.append(f"[WARN] no headline reward: {outcome.reason}")
    else:
        result.ok, result.error, result.exception_type = False, str(reason)[:600], outcome.status


def _note_capture(result: HarborRolloutResult, document: Mapping[str, Any]) -> None:
    stats = document["stats"]
    result.n_turns, result.n_roots = stats["n_turns"], stats["n_roots"]
    result.multi_turn = result.n_turns > result.n_roots
    result.budget_stop_count = document["budget_stop_count"]
    result.findings += _findings(document)
    if result.harness in ("oracle", "nop", "noop"):  # which call no model
        result.findings = [finding for finding in result.findings if "no_turns" not in finding]
    result.conversations = conversations_from_document(document)
    result.turns = turns_from_document(document)
    if result.rollout_type == "train":
        result.n_trainable_tokens = sum(sum(turn.loss_mask or []) for turn in result.turns if not turn.discarded)


def _findings(document: Mapping[str, Any]) -> list[str]:
    findings = [str(finding) for finding in document["validation"]]
    for row in document["sequences"]:
        findings += [f"[sequence {row['root_id']}] {finding}" for finding in row["validation"]]
    return [finding for finding in findings if "[INFO]" not in finding]


def build_trial_config(
    *,
    task_dir: Path | str,
    harness: str,
    sandbox: str,
    intercept_url: str,
    session_id: str,
    model: str,
    trial_name: str,
    trials_dir: Path | str,
    keep_sandbox: bool = False,
    agent_timeout_sec: float | None = None,
    agent_step_limit: int | None = None,
    force_build: bool = False,
    training: bool = False,
    harness_profile: str | None = None,
) -> Any:
    """Return a `TrialConfig` of the package `harbor`, for those who run its own trials behind a capture session.

    Raises:
        ImportError: the package `harbor` is not installed.
        ValueError: there is no such agent.
    """

    def kind(name: str) -> Any:
        return harbor_package_name("harbor.models.trial.config", name)

    trial_config = kind("TrialConfig")
    seam = seams.get(harness, profile=harness_profile)
    model_name, arguments, agent_env, _ = seam.resolve(
        base_url=intercept_url, session=session_id, model=model, step_limit=agent_step_limit, training=training
    )
    return trial_config(
        task=kind("TaskConfig")(path=Path(str(task_dir))),
        agent=kind("AgentConfig")(
            name=None if seam.import_path else harness,
            import_path=seam.import_path,
            model_name=model_name,
            kwargs=arguments,
            env=agent_env,
            override_timeout_sec=agent_timeout_sec,
        ),
        environment=kind("EnvironmentConfig")(type=sandbox, delete=not keep_sandbox, force_build=force_build),
        verifier=kind("VerifierConfig")(),
        trial_name=trial_name,
        trials_dir=Path(str(trials_dir)),
    )
