"""Many rollouts of Harbor's tasks without a server: what `openenv harbor rollout` runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from openenv import settings
from openenv.rollout.agents.base import Agent
from openenv.rollout.capture.sessions_api.forwarding import make_forwarder
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as _SessionCaptureServer
from openenv.sandboxes.base import Sandboxes

from . import seams
from .models import HarborRolloutResult
from .rollout import run_rollout
from .startup import prepare
from .tasks import resolve_task_dirs

CaptureServer = _SessionCaptureServer


def default_trials_dir() -> Path:
    """Return where rollouts are stored: `OPENENV_HARBOR_TRIALS_DIR`, or the store of all rollouts."""
    return settings.harbor_trials() or settings.rollout_store()


async def run_batch(
    *,
    llm_url: str,
    dataset: str,
    task_indices: Sequence[int],
    harness: str | Agent = "opencode",
    sandbox: str | Sandboxes = "docker",
    model: str | None = None,
    port: int = 8100,
    expose: str = "direct",
    trials_dir: Path | None = None,
    reward_key: str = "",
    keep_sandbox: bool = False,
    force_build: bool = False,
    env_file: str | None = None,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    provider: str = "openai",
    admin_key: str | None = None,
    report: Callable[[str], None] = print,
) -> list[HarborRolloutResult]:
    """Run tasks of a dataset one after another, and return their results in that order.

    Args:
        llm_url: The model's endpoint; empty for an agent that needs none.
        dataset: As `resolve_task_dirs` takes it.
        task_indices: Which tasks.
        harness: The agent.
        sandbox: The backend.
        model: The model's id; by default the only one that the endpoint serves.
        port: Where the capture server listens on this machine; 0 for a free port.
        expose: Under which address sandboxes elsewhere reach it: `direct`, `gradio` or `cloudflare`. Sandboxes of
            `docker` and `kubernetes` reach it through their engine, whatever this says.
        trials_dir: Where rollouts are stored.
        reward_key: Which of several rewards counts.
        keep_sandbox: Refused, as in `run_rollout`.
        force_build: Build images again.
        env_file: Variables to set first.
        api_key: The endpoint's key; by default `OPENENV_LLM_API_KEY`.
        auth_header: The header that has it.
        provider: `openai` or `anthropic`.
        admin_key: Opens the capture server's session routes; by default `OPENENV_CAPTURE_ADMIN_KEY`, or a random one.
        report: Gets a line for each rollout, and the summary.

    Raises:
        IndexError: the dataset has no such task.
        RuntimeError: the endpoint does not answer.
        ValueError: there is no such dataset.
    """
    needs_model = isinstance(harness, Agent) or seams.get(harness).dialect != "none"
    found = prepare(
        llm_url=llm_url,
        model=model,
        datasets=[dataset],
        sandboxes=(),
        env_file=env_file,
        require_llm=needs_model,
        quiet=True,
        api_key=api_key,
        auth_header=auth_header,
        provider=provider,
    )
    served, level = str(found.llm.get("model") or model or ""), str(found.llm.get("capture_level") or "text")
    folders = resolve_task_dirs(dataset)
    missing = [index for index in task_indices if not 0 <= index < len(folders)]
    if missing:
        raise IndexError(f"{dataset} has {len(folders)} tasks, and none of index {', '.join(map(str, missing))}")
    capture = CaptureServer(
        llm_url=llm_url,
        model=served,
        port=port,
        api_key=api_key or settings.llm_api_key(),
        auth_header=auth_header,
        provider=provider,
        capture_level=level,
        admin_key=admin_key or settings.capture_admin_key() or secrets.token_urlsafe(24),
    )
    results: list[HarborRolloutResult] = []
    with ExitStack() as stack:
        capture.start()
        stack.callback(capture.stop)
        if expose != "direct":
            forwarder = make_forwarder(expose)
            report(f"capture at {forwarder.start(capture.port)}")
            stack.callback(forwarder.stop)
        for index in task_indices:
            folder = folders[index]
            report(f"{harness if isinstance(harness, str) else harness.name}, task {index}: {folder.name}")
            result = await run_rollout(
                task_dir=folder,
                harness=harness,
                sandbox=sandbox,
                registry=capture.registry,
                intercept_url=capture.url,
                model=served,
                trials_dir=trials_dir or default_trials_dir(),
                dataset=dataset,
                reward_key=reward_key,
                keep_sandbox=keep_sandbox,
                force_build=force_build,
                capture_level=level,
                inference=capture.inference,
            )
            results.append(result)
            report(f"  {summary(result)}")
    report(summary_of_all(results))
    return results


def summary(result: HarborRolloutResult) -> str:
    """Return a rollout in a line."""
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    tokens = f"{result.n_trainable_tokens} tokens to train on" if result.trainable else f"eval ({result.capture_level})"
    state = "ok" if result.ok else f"failed, {result.exception_type}: {result.error}"
    return f"{state}; {reward}; {result.n_turns} turns, {tokens}; {result.wall_s:.0f} s"


def summary_of_all(results: Sequence[HarborRolloutResult]) -> str:
    """Return many rollouts in a line."""
    if not results:
        return "no rollouts ran"
    graded = [result for result in results if result.reward is not None]
    solved = sum(result.solved for result in graded)
    return (
        f"{len(results)} rollouts, {sum(result.ok for result in results)} ok; {solved} of {len(graded)} graded solved"
    )
