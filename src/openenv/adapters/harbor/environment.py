"""Serve Harbor's tasks as an environment: the Task API lists them, a tool runs rollouts."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from openenv.env.mcp_environment import MCPEnvironment
from openenv.errors import message_of
from openenv.rollout.capture.sessions_api.capture_sessions import UpstreamAddress
from openenv.types import Observation

from .capabilities import capabilities
from .models import HarborRolloutResult, HarborState
from .options import HarborPermissions, HarborRun
from .rollout import run_task
from .runner import default_trials_dir
from .service import HarborService
from .tasks import HarborTaskProvider, resolve_task_dirs


def is_private(url: str) -> bool:
    """Return whether any address of a URL's host is private, or the host is unknown.

    The server would call the address from inside its network, so one private address of several suffices.
    """
    host = urlsplit(url).hostname
    try:
        # Resolve the name: `localhost.example.com` may point to 127.0.0.1.
        addresses = socket.getaddrinfo(host, None) if host else []
    except OSError:
        return True
    return not addresses or any(not ipaddress.ip_address(entry[4][0]).is_global for entry in addresses)


# The default limit of a tool call is far too short for a coding agent.
ROLLOUT_TIMEOUT_S = 1800.0
"""The time limit of a step if the call names none: rollouts take minutes."""


class HarborEnvironment(MCPEnvironment):
    """A session of a Harbor server. `configure` sets the datasets and permissions of all sessions.

    The server makes sessions without arguments, so the configuration belongs to the class.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    _options = HarborPermissions()
    _trials: Path | None = None
    _datasets: Sequence[str] = ()
    _llm_url: str = ""
    _model: str = ""
    _llm: Mapping[str, Any] = {}

    @classmethod
    def configure(
        cls,
        *,
        datasets: Sequence[str],
        llm_url: str = "",
        model: str = "",
        llm: Mapping[str, Any] | None = None,
        options: HarborPermissions | None = None,
        trials_dir: Path | None = None,
    ) -> None:
        """Set the datasets, the default endpoint with its model and probe, and the callers' permissions."""
        cls._datasets, cls._llm_url, cls._model, cls._llm = tuple(datasets), llm_url, model, dict(llm or {})
        cls._options, cls._trials = options or HarborPermissions(), trials_dir

    def __init__(self) -> None:
        # Importing FastMCP takes about a second, so it waits for the first session.
        from fastmcp import FastMCP

        server = FastMCP("harbor_env")
        server.tool(self._run_rollout, name="run_rollout")
        server.tool(self._capabilities, name="capabilities")
        server.tool(self._list_tasks, name="list_tasks")
        # Not registered at all unless allowed, so clients do not see the tool.
        if self._options.adds_datasets:
            server.tool(self._add_dataset, name="add_dataset")
        super().__init__(server)
        # Each session has its provider; a dataset added later reaches new sessions.
        self._provider = HarborTaskProvider(self._datasets)
        self._state = HarborState(episode_id=str(uuid4()), llm_url=self._llm_url)

    # -- Task API --------------------------------------------------------------------------------------------------

    def list_splits(self) -> list[dict[str, Any]]:
        """Return the datasets."""
        return self._provider.list_splits()

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a dataset."""
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
        """Start a new count of rollouts. Calling this before the first rollout is optional."""
        service = HarborService.current()
        self._state = HarborState(
            episode_id=episode_id or str(uuid4()),
            llm_url=self._llm_url,
            intercept_url="" if service is None else service.public_url,
        )
        message = "Call run_rollout(split=..., task_index=..., harness=..., sandbox=...)"
        return Observation(metadata={"status": "ready", "message": message, "datasets": list(self._datasets)})

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call a tool; without `timeout_s` it may take half an hour."""
        return super().step(action, timeout_s=timeout_s or ROLLOUT_TIMEOUT_S, **kwargs)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call a tool without blocking; without `timeout_s` it may take half an hour."""
        return await super().step_async(action, timeout_s=timeout_s or ROLLOUT_TIMEOUT_S, **kwargs)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        problem = f"Unknown action {type(action).__name__}; call the tool run_rollout"
        return Observation(metadata={"error": problem})

    @property
    def state(self) -> HarborState:
        """The rollouts of this session so far."""
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
        oracle (runs the solution) or nop; sandbox is docker or kubernetes. llm_url, model and api_key replace the
        server's endpoint. agent_timeout_sec = 0 keeps the task's limit; agent_step_limit = 0 sets no limit.
        """
        # Errors are results here: a trainer collects hundreds of rollouts and must not lose the batch.
        failed = HarborRolloutResult(ok=False, harness=harness, sandbox=sandbox, rollout_type="eval")
        service = HarborService.current()
        if service is None:
            failed.error = "server not initialised: no capture proxy is running"
            return failed.model_dump_json()
        try:
            # Resolving a host name and reading folders block, so they run in a thread.
            await asyncio.to_thread(self._require_allowed, llm_url)
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
        except Exception as exc:  # a caller gets a result, even if the arguments are wrong
            failed.error, failed.exception_type = message_of(exc)[:400], type(exc).__name__
            return failed.model_dump_json()
        run = HarborRun(
            task_dir=folder,
            harness=harness,
            sandbox=sandbox,
            registry=service.capture.registry,
            intercept_url=service.capture.url,
            model=engine.model,
            trials_dir=self._trials or default_trials_dir(),
            dataset=split or self._datasets[0],
            reward_key=reward_key or self._options.reward_key,
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
        result = await run_task(run)
        # Counted after the rollout, so that the numbers describe finished ones.
        state = self._state
        state.step_count += 1
        state.rollouts_completed += 1
        # Clients read the state to follow a long run.
        state.last_reward, state.last_task_id, state.last_trial_name = result.reward, result.task_id, result.trial_name
        return result.model_dump_json()

    def _require_allowed(self, llm_url: str) -> None:
        options = self._options
        if not options.runs_rollouts:
            raise PermissionError("this server lists tasks and runs no rollouts (--no-rollouts)")
        if llm_url and not options.takes_endpoints:
            raise PermissionError("this server uses its own endpoint only (--no-visitor-endpoints): leave llm_url out")
        if not llm_url and not options.shares_endpoint:
            raise PermissionError("this server shares no endpoint (--no-share-endpoint): name yours with llm_url")
        # Otherwise a caller could reach services in the server's network through it.
        if llm_url and not options.takes_private_urls and is_private(llm_url):
            raise PermissionError("this server calls no private addresses (--no-private-urls)")

    def _add_dataset(self, dataset: str) -> str:
        """Serve another dataset of the Hugging Face Hub, as owner/name; return its number of tasks, as JSON."""
        if Path(dataset).expanduser().exists() or dataset.count("/") != 1:
            # A local path would serve any folder of this machine.
            raise ValueError("name a dataset repository of the Hub, as owner/name")
        count = len(resolve_task_dirs(dataset))
        kind = type(self)
        # The class holds the datasets, because every session should serve the new one.
        kind._datasets = tuple(dict.fromkeys([*kind._datasets, dataset]))
        self._provider = HarborTaskProvider(kind._datasets)
        return json.dumps({"name": dataset, "num_tasks": count})

    def _capabilities(self) -> str:
        """Return agents, sandboxes, datasets and endpoint of this server, as JSON."""
        llm = self._llm or {"url": self._llm_url, "model": self._model}
        return json.dumps(capabilities(datasets=self._datasets, llm=llm).to_dict())

    def _list_tasks(self, split: str = "", start: int = 0, stop: int = 20) -> str:
        """Return some tasks of a dataset, as JSON."""
        return json.dumps(self._provider.get_task_range(split, start, stop))
