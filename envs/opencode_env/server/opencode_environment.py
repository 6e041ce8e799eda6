"""The OpenCode environment: one tool that runs a whole rollout and returns what came of it.

Callers see progress while it runs and may cancel it. Knows the tool, its limits and its state; how a rollout is run is
`server.rollouts`' matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, get_args

from fastmcp import Context, FastMCP
from pydantic import Field

from opencode_env.client import patience
from opencode_env.models import OpenCodeState, RolloutResult
from opencode_env.server.rollouts import RolloutRequest, roll
from opencode_env.server.settings import ServerSettings
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation
from openenv.rollout import Progress
from openenv.rollout.progress import Phase

STEP_TIMEOUT_S = 900.0
"""Seconds that a step may take when it names no limit, unless its rollout may take longer by its own arguments."""
HEARTBEAT_S = 10.0
_PHASES: tuple[str, ...] = get_args(Phase)
_FIRST: dict[str, Any] = {"x-openenv-first": True}
"""Marks the arguments that the page shows above *More options*."""


class OpenCodeEnvironment(MCPEnvironment):
    """Let OpenCode work on a task in a sandbox, and verify its work in another.

    Args:
        settings: How rollouts are run; by default what the environment's variables say.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, settings: ServerSettings | None = None) -> None:
        server = FastMCP("opencode_env")
        server.tool(self.run_rollout)
        super().__init__(server)
        self._settings = settings or ServerSettings.from_environ()
        self._state = OpenCodeState(episode_id=str(uuid.uuid4()))
        self._last: RolloutResult | None = None

    async def run_rollout(
        self,
        ctx: Context,
        endpoint: Annotated[
            str,
            Field(
                description="vllm, openai, hf_router or scripted; or fill in base_url and model",
                examples=["vllm", "openai", "hf_router", "scripted"],
                json_schema_extra=_FIRST,
            ),
        ] = "",
        base_url: Annotated[str, Field(description="The model's endpoint, ending in /v1")] = "",
        api_key: Annotated[str, Field(description="The endpoint's key; the sandbox never sees it")] = "",
        model: Annotated[str, Field(description="The model's id at that endpoint")] = "",
        instruction: Annotated[
            str,
            Field(
                description="What the agent has to do, in words",
                json_schema_extra={**_FIRST, "x-openenv-required": True},
            ),
        ] = "",
        setup: Annotated[
            list[str] | None, Field(description="Shell lines that run in the sandbox before the agent starts")
        ] = None,
        verify: Annotated[
            list[str | dict[str, Any]] | None,
            Field(
                description="Shell lines that decide the reward, in a fresh sandbox: the share that exits with 0",
                json_schema_extra=_FIRST,
            ),
        ] = None,
        task_id: Annotated[str, Field(description="A name, under which rollouts of one task are found again")] = "",
        mode: Annotated[str, Field(description="transparent_proxy; black_box leaves the turns out of the result")] = (
            "transparent_proxy"
        ),
        disable_thinking: Annotated[bool | None, Field(description="Whether the model is asked not to reason")] = None,
        max_tokens_cap: Annotated[int, Field(description="How many tokens one answer has at most")] = 4096,
        top_logprobs: Annotated[int, Field(description="How many alternatives are recorded for each token")] = 5,
        agent_timeout_s: Annotated[float, Field(description="How many seconds the agent may work")] = 600.0,
        template: Annotated[str, Field(description="A template of E2B, where the operator has a key")] = "",
        sandbox: Annotated[str, Field(description="The kind of sandbox: local, docker or e2b")] = "",
        files: Annotated[
            dict[str, str] | None, Field(description="Files that the agent finds: path and content")
        ] = None,
        verify_files: Annotated[
            dict[str, str] | None, Field(description="Files that only the verify lines find")
        ] = None,
        script: Annotated[dict[str, Any] | None, Field(description="What the endpoint 'scripted' plays")] = None,
        sequences: Annotated[bool, Field(description="Whether the result has token sequences for training")] = False,
        reward_file: Annotated[
            bool | None, Field(description="Whether reward.txt counts; by default where a line or a file names it")
        ] = None,
    ) -> str:
        """Run OpenCode on a task in a sandbox, verify its work in a fresh one, and return a RolloutResult as JSON.

        Name an endpoint (vllm, openai, hf_router, scripted) or give base_url, api_key and model. All setup lines run
        before the agent starts; the reward is what the verify lines write into ~/logs/verifier/reward.txt, else the
        share of them that exit with 0. In place of a line, {"run": ..., "judge": ..., "keep": [...]} runs the agent's
        work in one sandbox and judges what it printed in another.
        """
        request = RolloutRequest(
            instruction=instruction,
            endpoint=endpoint,
            base_url=base_url,
            api_key=api_key,
            model=model,
            setup=tuple(setup or ()),
            verify=tuple(verify or ()),
            task_id=task_id,
            mode=mode,
            disable_thinking=disable_thinking,
            max_tokens_cap=max_tokens_cap,
            top_logprobs=top_logprobs,
            agent_timeout_s=agent_timeout_s,
            template=template,
            sandbox=sandbox,
            files=files,
            verify_files=verify_files,
            script=script,
            sequences=sequences,
            reward_file=reward_file,
        )
        self._last = None
        async with _reporting(ctx) as report:
            result = await roll(request, self._settings, report)
        self._note(result)
        return result.model_dump_json()

    def _run_rollout_impl(self, *, progress_cb: Callable[[str], None] | None = None, **arguments: Any) -> RolloutResult:
        """Run a rollout from synchronous code; `progress_cb` gets a line of text for each event."""
        arguments |= {name: tuple(arguments.get(name) or ()) for name in ("setup", "verify")}
        report = None if progress_cb is None else lambda event: progress_cb(_line(event))
        result = asyncio.run(roll(RolloutRequest(**arguments), self._settings, report))
        self._note(result)
        return result

    def _note(self, result: RolloutResult) -> None:
        self._last = result
        state = self._state
        state.step_count += 1
        state.rollouts_completed += 1
        state.last_reward, state.last_task_id = result.reward, result.task_id or None
        state.last_sandbox_id = result.sandbox_id or None

    # -- Environment ------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Begin a new count; a rollout needs no reset."""
        self._state = OpenCodeState(episode_id=episode_id or str(uuid.uuid4()))
        return Observation(metadata={"status": "ready", "message": "call run_rollout with a task and an endpoint"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call the tool; the observation has the rollout's reward."""
        observation = super().step(action, timeout_s=_limit(action, timeout_s), **kwargs)
        return self._rewarded(action, observation)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Call the tool without blocking; the observation has the rollout's reward."""
        observation = await super().step_async(action, timeout_s=_limit(action, timeout_s), **kwargs)
        return self._rewarded(action, observation)

    def _rewarded(self, action: Action, observation: Observation) -> Observation:
        if _is_rollout(action) and isinstance(observation, CallToolObservation) and observation.error is None:
            observation.reward = self._last.reward if self._last is not None else None
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"error": f"{type(action).__name__} is no action here: call the tool run_rollout"})

    @property
    def state(self) -> OpenCodeState:
        """The rollouts of this session."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name="opencode_env",
            description="A real coding agent works in a sandbox; its tokens and a trustworthy reward come back.",
            version="0.11.0",
        )


def _is_rollout(action: Action) -> bool:
    return isinstance(action, CallToolAction) and action.tool_name == "run_rollout"


def _limit(action: Action, timeout_s: float | None) -> float | None:
    if timeout_s is not None or not isinstance(action, CallToolAction) or not _is_rollout(action):
        return timeout_s
    try:
        return max(STEP_TIMEOUT_S, patience(action.arguments))
    except (TypeError, ValueError):  # arguments that the tool will refuse
        return STEP_TIMEOUT_S


@asynccontextmanager
async def _reporting(ctx: Context) -> AsyncIterator[Callable[[Progress], None]]:
    """Yield a function that passes a rollout's events on, from any thread; the last one is repeated as a heartbeat."""
    loop = asyncio.get_running_loop()
    reports = _ProgressReports(ctx)

    def report(event: Progress) -> None:
        loop.call_soon_threadsafe(reports.add, event)

    sending = asyncio.create_task(reports.send())
    try:
        yield report
    finally:
        await asyncio.sleep(0)  # events that came with the end are sent
        reports.end()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


class _ProgressReports:
    """The progress of one rollout, in order, with numbers that only grow, as MCP demands."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._events: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._phase, self._count = 0, 0
        self._last = ""

    def add(self, event: Progress) -> None:
        """Queue an event."""
        self._events.put_nowait(event)

    def end(self) -> None:
        """Send the queued events, and no more."""
        self._events.put_nowait(None)

    async def send(self) -> None:
        """Report the events as progress, until the end."""
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), HEARTBEAT_S)
            except asyncio.TimeoutError:
                await self._report(self._last)
                continue
            if event is None:
                return
            phase = _PHASES.index(event.phase)
            if phase > self._phase:
                self._phase, self._count = phase, 0
            self._last = _line(event)
            await self._report(self._last)

    async def _report(self, message: str) -> None:
        self._count += 1
        progress = self._phase + self._count / (self._count + 1)
        await self._ctx.report_progress(progress, len(_PHASES), message)


def _line(event: Progress) -> str:
    return f"{event.phase}: {event.message}"
