"""The environment that serves Harbor's tasks: the Task API lists them, one tool runs a rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from openenv.env.mcp_environment import MCPEnvironment as MCPEnvironment
from openenv.errors import message_of
from openenv.rollout.capture.published.capture_sessions import UpstreamAddress
from openenv.types import Observation as Observation

from .capabilities import capabilities
from .models import HarborRolloutResult
from .models import HarborState as HarborState
from .rollout import run_rollout
from .runner import default_trials_dir
from .service import HarborService
from .tasks import HarborTaskProvider

ROLLOUT_TIMEOUT_S = 1800.0
"""How long a step may take that names no limit."""


class HarborEnvironment(MCPEnvironment):
    """A session of a Harbor server. `configure` says what all of them serve."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    _datasets: Sequence[str] = ()
    _llm_url: str = ""
    _model: str = ""
    _llm: Mapping[str, Any] = {}

    @classmethod
    def configure(
        cls, *, datasets: Sequence[str], llm_url: str = "", model: str = "", llm: Mapping[str, Any] | None = None
    ) -> None:
        """Say what is served: datasets, the default endpoint and model, and what is known of them."""
        cls._datasets, cls._llm_url, cls._model, cls._llm = tuple(datasets), llm_url, model, dict(llm or {})

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("harbor_env")
        server.tool(self._run_rollout, name="run_rollout")
        server.tool(self._capabilities, name="capabilities")
        server.tool(self._list_tasks, name="list_tasks")
        super().__init__(server)
        self._provider = HarborTaskProvider(self._datasets)
        self._state = HarborState(episode_id=str(uuid4()), llm_url=self._llm_url)

    # -- Task API --------------------------------------------------------------------------------------------------

    def list_splits(self) -> list[dict[str, Any]]:
        """Return the datasets."""
        return self._provider.list_splits()

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a dataset has."""
        return self._provider.num_tasks(split)

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return all tasks of a dataset."""
        return self._provider.list_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return a task by its number."""
        return self._provider.get_task(split, index)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the tasks from one number to another."""
        return self._provider.get_task_range(split, start, stop)

    # -- episodes --------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        """Begin a new count; a rollout needs no reset, and nothing starts before one."""
        service = HarborService.current()
        self._state = HarborState(
            episode_id=episode_id or str(uuid4()),
            llm_url=self._llm_url,
            intercept_url="" if service is None else service.public_url,
        )
        message = "Call run_rollout(split=..., task_index=..., harness=..., sandbox=...)"
        return Observation(metadata={"status": "ready", "message": message, "datasets": list(self._datasets)})

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call a tool; a rollout may take half an hour where the call names no limit."""
        return super().step(action, timeout_s=timeout_s or ROLLOUT_TIMEOUT_S, **kwargs)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call a tool without blocking; a rollout may take half an hour where the call names no limit."""
        return await super().step_async(action, timeout_s=timeout_s or ROLLOUT_TIMEOUT_S, **kwargs)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        problem = f"Unknown action {type(action).__name__}; call the tool run_rollout"
        return Observation(metadata={"error": problem})

    @property
    def state(self) -> HarborState:
        """What this session has run."""
        return self._state

    # -- tools -----------------------------------------------------------------------------------------------------

    async def _run_rollout(
        self,
        split: str = "",
        task_index: int = 0,
        harness: str = "opencode",
        sandbox: str = "docker",
        reward_key: str = "",
        keep_sandbox: bool = False,
        force_build: bool = False,
        llm_url: str = "",
        model: str = "",
        api_key: str = "",
        auth_header: str = "",
        agent_timeout_sec: float = 0.0,
        agent_step_limit: int = 0,
        sampling: dict[str, Any] | None = None,
        provider: str = "openai",
        purpose: str = "auto",
        eval_sampling: dict[str, Any] | None = None,
    ) -> str:
        """Run an agent on a task and return a HarborRolloutResult as JSON; a failure is a result with ok = false.

        split is a dataset, task_index the task's number in it. harness is opencode, claude-code, codex, mini-swe-agent,
        oracle (runs the solution) or nop; sandbox is docker or kubernetes. llm_url, model and api_key name another
        endpoint than the server's. agent_timeout_sec and agent_step_limit of 0 are as the task says, and no limit.
        """
        failed = HarborRolloutResult(ok=False, harness=harness, sandbox=sandbox, rollout_type="eval")
        service = HarborService.current()
        if service is None:
            failed.error = "server not initialised: no capture proxy is running"
            return failed.model_dump_json()
        try:
            folder = await asyncio.to_thread(self._provider.task_dir, split, int(task_index))
            engine = await service.engine(
                UpstreamAddress(
                    llm_url=llm_url,
                    model=model,
                    api_key=api_key or None,
                    auth_header=auth_header or "Authorization",
                    provider=provider,
                )
                if llm_url
                else None
            )
        except Exception as exc:  # a caller gets a result, whatever failed
            failed.error, failed.exception_type = message_of(exc)[:400], type(exc).__name__
            return failed.model_dump_json()
        result = await run_rollout(
            task_dir=folder,
            harness=harness,
            sandbox=sandbox,
            registry=service.capture.registry,
            intercept_url=service.capture.url,
            model=engine.model,
            trials_dir=default_trials_dir(),
            dataset=split or self._datasets[0],
            reward_key=reward_key,
            keep_sandbox=keep_sandbox,
            force_build=force_build,
            agent_timeout_sec=agent_timeout_sec or None,
            agent_step_limit=agent_step_limit or None,
            capture_level=engine.capture_level,
            upstream=engine.upstream,
            inference=engine.client,
            sampling=sampling,
            purpose=purpose,
            eval_sampling=eval_sampling,
        )
        state = self._state
        state.step_count += 1
        state.rollouts_completed += 1
        state.last_reward, state.last_task_id, state.last_trial_name = result.reward, result.task_id, result.trial_name
        return result.model_dump_json()

    def _capabilities(self) -> str:
        """Return agents, sandboxes, datasets and endpoint of this server, as JSON."""
        llm = self._llm or {"url": self._llm_url, "model": self._model}
        return json.dumps(capabilities(datasets=self._datasets, llm=llm).to_dict())

    def _list_tasks(self, split: str = "", start: int = 0, stop: int = 20) -> str:
        """Return some tasks of a dataset, as JSON."""
        return json.dumps(self._provider.get_task_range(split, start, stop))
