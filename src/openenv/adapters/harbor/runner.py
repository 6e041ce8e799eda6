"""Run several tasks of a dataset without a server, for `openenv harbor rollout`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from openenv import settings
from openenv.rollout.agents.base import Agent
from openenv.rollout.capture.sessions_api.forwarding import make_forwarder
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as _SessionCaptureServer

from . import seams
from .capabilities import check_setup, load_env_file
from .models import HarborRolloutResult
from .options import HarborBatch, HarborRun, takes_fields
from .rollout import run_task
from .tasks import resolve_task_dirs

# The published name; class names are unique inside.
CaptureServer = _SessionCaptureServer


def default_trials_dir() -> Path:
    """Return the folder of stored rollouts: `OPENENV_HARBOR_TRIALS_DIR`, or the store of all rollouts."""
    return settings.harbor_trials() or settings.rollout_store()


async def run_tasks(batch: HarborBatch) -> list[HarborRolloutResult]:
    """Run tasks of a dataset one after another, and return their results in that order.

    Raises:
        IndexError: The dataset has fewer tasks.
        RuntimeError: The endpoint does not answer.
        ValueError: The dataset is unknown.
    """
    load_env_file(batch.env_file)
    # oracle and nop run without an endpoint, so none is required for them.
    needs_model = isinstance(batch.harness, Agent) or seams.get(batch.harness).dialect != "none"
    ready = check_setup(batch, datasets=[batch.dataset], sandboxes=(), require_llm=needs_model)
    model, level = str(ready.llm.get("model") or batch.model or ""), str(ready.llm.get("capture_level") or "text")
    folders = resolve_task_dirs(batch.dataset)
    # All indices are checked before the first task runs: a run of hours must not fail at its last task.
    missing = [index for index in batch.task_indices if not 0 <= index < len(folders)]
    if missing:
        indices = ", ".join(map(str, missing))
        raise IndexError(f"{batch.dataset} has {len(folders)} tasks, and none of index {indices}")
    # One server for all tasks; each rollout opens a session on it.
    capture = CaptureServer(
        llm_url=batch.llm_url or "",
        model=model,
        port=batch.port,
        api_key=batch.api_key or settings.llm_api_key(),
        auth_header=batch.auth_header,
        provider=batch.provider,
        capture_level=level,
        admin_key=batch.admin_key or settings.capture_admin_key() or secrets.token_urlsafe(24),
    )
    results: list[HarborRolloutResult] = []
    with ExitStack() as stack:
        capture.start()
        stack.callback(capture.stop)
        # Only sandboxes on other machines need a public address.
        if batch.expose != "direct":
            forwarder = make_forwarder(batch.expose)
            batch.report(f"capture at {forwarder.start(capture.port)}")
            stack.callback(forwarder.stop)
        for index in batch.task_indices:
            run = HarborRun(
                task_dir=folders[index],
                harness=batch.harness,
                sandbox=batch.sandbox,
                registry=capture.registry,
                intercept_url=capture.url,
                model=model,
                trials_dir=batch.trials_dir or default_trials_dir(),
                dataset=batch.dataset,
                reward_key=batch.reward_key,
                keep_sandbox=batch.keep_sandbox,
                force_build=batch.force_build,
                capture_level=level,
                inference=capture.inference,
            )
            batch.report(f"{run.harness_name}, task {index}: {folders[index].name}")
            result = await run_task(run)
            results.append(result)
            batch.report(f"  {summary(result)}")
    batch.report(summary_of_all(results))
    return results


run_batch = takes_fields(HarborBatch, run_tasks, name="run_batch")


def summary(result: HarborRolloutResult) -> str:
    """Describe a rollout in one line."""
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    tokens = f"{result.n_trainable_tokens} tokens to train on" if result.trainable else f"eval ({result.capture_level})"
    state = "ok" if result.ok else f"failed, {result.exception_type}: {result.error}"
    return f"{state}; {reward}; {result.n_turns} turns, {tokens}; {result.wall_s:.0f} s"


def summary_of_all(results: Sequence[HarborRolloutResult]) -> str:
    """Describe several rollouts in one line."""
    if not results:
        return "no rollouts ran"
    # A missing reward is not a 0: it is left out of the share.
    graded = [result for result in results if result.reward is not None]
    solved = sum(result.solved for result in graded)
    return (
        f"{len(results)} rollouts, {sum(result.ok for result in results)} ok; {solved} of {len(graded)} graded solved"
    )
