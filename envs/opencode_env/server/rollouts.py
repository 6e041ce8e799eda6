"""One rollout of this environment: from the tool's arguments to its result, by way of `openenv.rollout`.

Knows how arguments become a task, a model and a sandbox. What goes wrong on the way is text in the result; only a
request that cannot be understood is an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from opencode_env.harness import MODES
from opencode_env.models import RolloutResult, RolloutTurn, TrainingSequence
from opencode_env.server.carried_agent import CarriedOpenCode
from opencode_env.server.catalog import SCRIPTED, EndpointError, resolve_for_caller, with_version
from opencode_env.server.settings import ServerSettings
from openenv.errors import AgentUnavailable, OpenEnvError, SandboxError
from openenv.rollout import Check, Model, Outcome, Progress, RolloutStore, Sampling, Task, run_rollout_async
from openenv.rollout.capture import CaptureOptions, CaptureServer, export, read
from openenv.rollout.tasks.checks import expand
from openenv.sandboxes import Sandboxes, backend
from openenv.sandboxes.host import scratch
from openenv.testing import Script, ScriptedModel
from openenv.testing.scripted.agent_scripts import binary_search

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 120.0
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The arguments of the tool, as they came."""

    instruction: str
    endpoint: str = ""
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    model: str = ""
    setup: tuple[str, ...] = ()
    verify: tuple[str | Mapping[str, Any], ...] = ()
    task_id: str = ""
    mode: str = "transparent_proxy"
    disable_thinking: bool | None = None
    max_tokens_cap: int = 4096
    top_logprobs: int = 5
    agent_timeout_s: float = 600.0
    template: str = ""
    sandbox: str = ""
    files: Mapping[str, str] | None = None
    verify_files: Mapping[str, str] | None = None
    script: Mapping[str, Any] | None = None
    sequences: bool = False
    reward_file: bool | None = None

    def check(self) -> None:
        """Refuse what cannot be a rollout.

        Raises:
            ValueError: There is no endpoint, or no instruction, or a check is none.
        """
        if not self.instruction.strip():
            raise ValueError("instruction is missing: say what the agent is to do")
        if not self.endpoint and not (self.base_url and self.api_key and self.model):
            raise ValueError("no model: name an endpoint, or give base_url, api_key and model")
        if self.script is not None and self.endpoint != SCRIPTED:
            raise ValueError(f"script is for endpoint={SCRIPTED!r} only")
        if not 0 < self.agent_timeout_s <= 24 * 3600:
            raise ValueError("agent_timeout_s must be a positive number of seconds, at most a day")
        if not 0 <= self.top_logprobs <= 20:
            raise ValueError("top_logprobs must be from 0 to 20")
        self.task()

    def task(self) -> Task:
        """Return what the engine runs."""
        return Task(
            instruction=self.instruction,
            setup=self.setup,
            verify=tuple(
                check if isinstance(check, str) else Check.model_validate(expand(check)) for check in self.verify
            ),
            files=dict(self.files or {}),
            verify_files=dict(self.verify_files or {}),
            setup_timeout_s=COMMAND_TIMEOUT_S,
            verify_timeout_s=COMMAND_TIMEOUT_S,
            agent_timeout_s=self.agent_timeout_s,
            task_id=self.task_id,
            reward_file=self.reward_file,
        )


async def roll(
    request: RolloutRequest, settings: ServerSettings, on_progress: Callable[[Progress], None] | None = None
) -> RolloutResult:
    """Run a rollout. Cancelling this ends it and frees its sandboxes before it returns.

    Raises:
        ValueError: The request is none: no instruction, no endpoint, or one that is not there.
    """
    request.check()
    began = time.monotonic()
    result = RolloutResult(task_id=request.task_id, mode=request.mode)
    try:
        if request.mode not in MODES:
            raise _Refused(f"unknown mode {request.mode!r}: choose one of {', '.join(MODES)}")
        sandboxes = _backend(request, settings)
        async with _model(request, settings) as model, _store(settings) as store, _capture(request) as capture:
            outcome = await run_rollout_async(
                request.task(),
                agent="opencode" if "mounts" in sandboxes.features else CarriedOpenCode(),
                sandbox=sandboxes,
                model=model,
                store=store,
                capture=capture,
                on_progress=on_progress,
                metadata={"environment": "opencode_env", "mode": request.mode, "endpoint": request.endpoint},
            )
            made = _result(request, outcome)
            if capture is not None:
                made.sequences = await asyncio.to_thread(_sequences, capture.root / outcome.rollout_id)
        return made
    except EndpointError:
        raise
    except _Refused as exc:
        result.error, result.status = str(exc), "env_failed"
    except SandboxError as exc:
        result.error, result.status, result.phase = _said(exc), "sandbox_failed", "sandbox"
    except (AgentUnavailable, OpenEnvError) as exc:
        result.error, result.status = _said(exc), "env_failed"
    except Exception as exc:  # the boundary of a rollout: the caller reads what happened, the server goes on
        logger.exception("a rollout failed")
        result.error, result.status = _said(exc), "env_failed"
    result.wall_s = time.monotonic() - began
    return result


class _Refused(Exception):
    """The rollout is not begun; the text says why."""


@asynccontextmanager
async def _store(settings: ServerSettings) -> AsyncIterator[RolloutStore | None]:
    """Give the store that rollouts are kept in, or None."""
    if settings.store is None:
        yield None
        return
    store = await asyncio.to_thread(RolloutStore, settings.store)
    try:
        yield store
    finally:
        await asyncio.shield(asyncio.to_thread(store.close))


@asynccontextmanager
async def _capture(request: RolloutRequest) -> AsyncIterator[CaptureServer | None]:
    """Give a capture proxy whose records can be read afterwards, where that is asked for; the engine has its own."""
    if not request.sequences:
        yield None
        return
    with scratch() as folder:
        server = CaptureServer(folder / "captures", CaptureOptions(sockets=folder))
        await asyncio.to_thread(server.start)
        try:
            yield server
        finally:
            await asyncio.shield(asyncio.to_thread(server.stop))


def _sequences(records: Path) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            role=sequence.role,
            calls=sequence.node_ids,
            prompt_len=sequence.prompt_len,
            input_ids=sequence.input_ids,
            loss_mask=sequence.loss_mask,
            logprobs=sequence.logprobs,
            is_trainable=sequence.trainable,
        )
        for sequence in export.sequences(read(records))
    ]


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _backend(request: RolloutRequest, settings: ServerSettings) -> Sandboxes:
    try:
        name = settings.choose_sandbox(request.sandbox, request.template)
    except ValueError as exc:
        raise _Refused(str(exc)) from None
    if name == "process":  # the operator's choice, see `ServerSettings`
        return backend(name, i_know_there_is_no_isolation=True)
    if name != "e2b":
        return backend(name)
    if not settings.e2b_api_key:
        raise _Refused("the sandbox 'e2b' needs an account: E2B_API_KEY is not set")
    return backend("e2b", api_key=settings.e2b_api_key, template=request.template or None)


@asynccontextmanager
async def _model(request: RolloutRequest, settings: ServerSettings) -> AsyncIterator[Model]:
    """Give the model that is asked; a scripted one lives as long as the block."""
    cap = request.max_tokens_cap if request.max_tokens_cap > 0 else None
    if request.endpoint == SCRIPTED:
        scripted = ScriptedModel(_script(request))
        await asyncio.to_thread(scripted.start)
        try:
            yield Model(**scripted.model(), top_logprobs=request.top_logprobs, max_tokens_cap=cap, sampling=Sampling())
        finally:
            await asyncio.shield(asyncio.to_thread(scripted.close))
        return
    thinks_not = request.disable_thinking
    if request.endpoint:
        endpoint = resolve_for_caller(
            request.endpoint,
            base_url=request.base_url,
            api_key=request.api_key,
            model=request.model,
            environ=settings.environ,
        )
        url, key, name = endpoint.base_url, endpoint.api_key, endpoint.model
        thinks_not = endpoint.disable_thinking_default if thinks_not is None else thinks_not
    else:
        url, key, name = with_version(request.base_url), request.api_key, request.model
    yield Model(
        base_url=url,
        name=name,
        api_key=SecretStr(key),
        top_logprobs=request.top_logprobs,
        max_tokens_cap=cap,
        disable_thinking=bool(thinks_not),
        sampling=Sampling(),  # what an endpoint has by default cannot be trained on: nothing names it
    )


def _script(request: RolloutRequest) -> Script:
    """Return the script to play: the caller's, or the one that writes a binary search."""
    if request.script is None:
        known = binary_search()
        if request.model not in ("", known.name, known.model_name):
            raise EndpointError(f"no script is called {request.model!r}: give one as `script`, or leave model out")
        return known
    try:
        return Script.model_validate(dict(request.script))
    except ValidationError as exc:
        raise EndpointError(f"script is none: {exc.error_count()} fields are wrong: {exc}") from None


def _result(request: RolloutRequest, outcome: Outcome) -> RolloutResult:
    is_seen = request.mode == "transparent_proxy"
    return RolloutResult(
        task_id=outcome.task_id,
        sandbox_id=outcome.sandbox_id,
        reward=outcome.reward,
        trust=outcome.trust,
        agent_exit_code=outcome.agent_exit_code,
        wall_s=outcome.wall_s,
        mode=request.mode,
        setup_results=outcome.setup_results,
        verify_results=outcome.verify_results,
        proxy_turns=outcome.turns if is_seen else [],
        files=outcome.files,
        files_extra=outcome.files_extra,
        agent_log_tail=outcome.agent_log_tail[-_TAIL:],
        proxy_log_tail=_proxy_log(outcome.turns)[-_TAIL:] if is_seen else "",
        error=outcome.reason if outcome.status != "ok" else None,
        status=outcome.status,
        phase=outcome.phase,
        rollout_id=outcome.rollout_id,
        sandbox=outcome.sandbox,
        model=outcome.model,
        is_scripted=request.endpoint == SCRIPTED,
        phase_s=outcome.phase_s,
        metadata=outcome.metadata,
    )


def _proxy_log(turns: list[RolloutTurn]) -> str:
    """Report each model call in one line."""
    lines = []
    for turn in turns:
        ended = turn.finish_reason or "broken off"
        error = "" if turn.upstream_error is None else f" error {turn.upstream_error.get('message', '')}"
        lines.append(
            f"call {turn.turn}: {ended}, {len(turn.completion_tokens)} tokens, {turn.latency_s:.2f} s{error}\n"
        )
    return "".join(lines)
