"""`HarnessEnvironment`: an agent with its loop as an environment; one step is one turn of its conversation.

    reset: stop the former agent ─> serve the tools ─> inject_tools ─> start
    step:  is_alive ─> send_message_streaming ... TURN_COMPLETE ─> rubric ─> observation
           a turn that fails or is cancelled ends the episode: the agent is stopped, and only `reset` begins another

Knows adapters and tools; must not know the wire.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from fastmcp import FastMCP

from openenv.env.binding import OFFLOAD, Offload
from openenv.env.environment import Transform
from openenv.env.mcp_environment import MCPEnvironment
from openenv.env.rubrics.rubric import Rubric
from openenv.env.tools.execution import TOOL_LOOP
from openenv.env.tools.source import ToolOutcome, ToolRequest
from openenv.errors import HarnessError, HarnessNotRunningError, HarnessTurnTimeoutError, ToolTransportError, message_of
from openenv.protocol.tool_messages import CallToolAction, ListToolsAction, Tool
from openenv.protocol.turn_messages import HarnessEvent, HarnessEventType
from openenv.types import Action, Observation, State

from .tool_bridge import HarnessMCPBridge, forwarding_server
from .turns import (
    AgenticHarnessAdapter,
    HarnessResponse,
    events_to_metadata,
    resolve_tool_conflicts,
    response_of,
    turn_events,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

OnEvent = Callable[[HarnessEvent], Awaitable[None]]
"""Takes an event of a turn as soon as it comes; the turn waits for it."""

_STOP_S = 30.0
_CANCEL_S = 5.0


class HarnessAction(Action):
    """A message to the agent: one turn."""

    message: str


class HarnessEnvironment(MCPEnvironment):
    """Serves an agent that brings its own loop. The environment's tools reach it over MCP.

    Rewards come from the rubric, which sees the message and the turn. A failed turn is not a reward of 0: its
    observation has `done` and no reward, and its metadata `error` and `error_type` (`turn_timeout`, `harness_crashed`).

    Args:
        adapter: Connects the agent.
        mcp: A FastMCP server with the environment's tools, if it has any.
        rubric: Scores turns.
        transform: Changes observations on their way out.
    """

    # One adapter drives one agent at a time.
    SUPPORTS_CONCURRENT_SESSIONS = False
    # The agent's process cannot be copied, so forks are refused.
    HAS_EXTERNAL_STATE = True
    SERVES_TURNS: ClassVar[bool] = True

    def __init__(
        self,
        adapter: AgenticHarnessAdapter,
        mcp: Any | None = None,
        rubric: Rubric | None = None,
        transform: Transform[Observation] | None = None,
    ) -> None:
        super().__init__(FastMCP("harness-env-tools") if mcp is None else mcp, transform=transform)
        self.adapter = adapter
        self.rubric = rubric
        self._state = State()
        self._trajectory: list[HarnessEvent] = []
        self._bridge: HarnessMCPBridge | None = None
        self._tool_calls: set[concurrent.futures.Future[ToolOutcome]] = set()
        # started: the adapter may have a process. active: the episode can take a turn.
        self._was_started = False
        self._is_active = False
        self._is_in_turn = False
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of the last `reset`: the adapter runs on it
        # How the server runs blocking code of this session.
        self._offload: Offload = asyncio.to_thread
        self._ending: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """The episode's id, and how many turns it had."""
        return self._state

    @property
    def trajectory(self) -> list[HarnessEvent]:
        """Every event of the episode, including failed turns."""
        return list(self._trajectory)

    # -- episodes -------------------------------------------------------------------------------------------------

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Begin a conversation with a newly started agent.

        Args:
            seed: Not used; agents have none.
            episode_id: The name of the episode; by default random.
            kwargs: Not used; subclasses may.

        Raises:
            HarnessError: The agent did not start, or the environment is closed.
        """
        if self._is_closed:
            raise HarnessError("the environment is closed")
        # Read before `end_episode` resets it.
        had_episode = self._was_started
        await self.end_episode()
        self._loop, self._offload = asyncio.get_running_loop(), OFFLOAD.get()
        await self._reset_rubric_async()
        self._trajectory.clear()
        self._was_started = True
        try:
            if not had_episode:  # else it was stopped above; adapters may rely on it before the first start too
                await self.adapter.stop()
            # Order: serve the tools, tell the agent, start it. It may list its tools at once.
            tools, url = await self._serve_tools()
            await self.adapter.inject_tools(tools, bridge_url=url)
            await self.adapter.start(self.adapter.config.working_directory)
        except BaseException:
            await self.end_episode()
            raise
        self._is_active = True
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        metadata = {"episode_id": self._state.episode_id, "injected_tools": [tool.name for tool in tools]}
        return self._apply_transform(Observation(reward=0.0, metadata=metadata))

    async def _serve_tools(self) -> tuple[list[Tool], str | None]:
        """Start the bridge; return the tools under the names that agents use, and its address."""
        # The environment's names, before conflicts with the agent's built-in tools are resolved.
        own = await self.tools.list_tools()
        tools = resolve_tool_conflicts(own, self.adapter.BUILTIN_TOOL_NAMES)
        if not tools:
            return [], None
        renames = {tool.name: former.name for tool, former in zip(tools, own, strict=True)}
        server = forwarding_server("environment", await self.tools.describe(), renames, self._call_from_bridge)
        # Kept before it starts: a cancelled start is stopped by `end_episode`.
        self._bridge = HarnessMCPBridge(server)
        return tools, await asyncio.to_thread(self._bridge.start)

    async def _call_from_bridge(self, request: ToolRequest) -> ToolOutcome:
        """Run a tool for the agent in the session's thread; called on the bridge's loop."""
        # The bridge has a loop in another thread; the environment's tools belong to the session's loop.
        loop, offload = self._loop, self._offload

        async def call() -> ToolOutcome:
            # A context variable: the coroutine runs in a new context.
            OFFLOAD.set(offload)
            return await self.tools.call(request)

        if loop is None or not loop.is_running():  # `reset` ran on a loop that has ended
            return await self.tools.call(request)
        future = asyncio.run_coroutine_threadsafe(call(), loop)
        self._tool_calls.add(future)
        outcome = asyncio.wrap_future(future)
        try:
            # `wait` does not cancel the call when this task is cancelled; the `finally` does, on the right loop.
            await asyncio.wait({outcome})
        finally:
            future.cancel()
            self._tool_calls.discard(future)
        # The agent gets an error, not a hanging request.
        if outcome.cancelled():
            raise ToolTransportError(request.name, "the episode has ended")
        return outcome.result()

    async def end_episode(self) -> None:
        """Stop the agent and the bridge to its tools; goes on in the background if it is cancelled."""
        self._is_active = False
        # All callers share one ending: stopping an agent twice at once confuses adapters.
        if self._ending is None or self._ending.done() or self._ending.get_loop() is not asyncio.get_running_loop():
            self._ending = asyncio.ensure_future(self._end())
        # A caller may give up; the process must be stopped in any case.
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        # Tools first: the bridge waits for open calls when it stops.
        for call in list(self._tool_calls):
            call.cancel()
        bridge, self._bridge = self._bridge, None
        was_started, self._was_started = self._was_started, False
        if bridge is not None:
            await asyncio.to_thread(bridge.stop)
        if not was_started:
            return
        # Adapters of other packages may hang here. The server logs that and goes on.
        stopping = asyncio.ensure_future(self.adapter.stop())
        await asyncio.wait({stopping}, timeout=_STOP_S)
        if not stopping.done():
            stopping.cancel()
            logger.error("harness %s did not stop within %g s", self.adapter.config.name, _STOP_S)
        elif not stopping.cancelled() and (problem := stopping.exception()) is not None:
            logger.error("harness %s could not be stopped", self.adapter.config.name, exc_info=problem)

    def close(self) -> None:
        """Stop the agent and close the tools."""
        self._is_closed, self._is_active = True, False
        loop = self._loop
        if loop is not None and loop.is_running() and loop is _current_loop():
            self._ending = loop.create_task(self._end())  # this thread runs the loop and cannot wait for it
        # Called from another thread than the loop's: wait for the end there.
        elif loop is not None and loop.is_running():
            self._wait_for(asyncio.run_coroutine_threadsafe(self.end_episode(), loop))
        # The loop of the episode has ended, so a general one does the work.
        elif self._was_started:
            self._wait_for(TOOL_LOOP.submit(self.end_episode()))
        super().close()

    def _wait_for(self, ending: concurrent.futures.Future[None]) -> None:
        try:
            ending.result(_STOP_S + _CANCEL_S)
        except Exception:
            logger.exception("the episode of harness %s did not end", self.adapter.config.name)

    # -- turns ----------------------------------------------------------------------------------------------------

    async def run_turn(
        self, message: str, *, on_event: OnEvent | None = None, timeout_s: float | None = None
    ) -> HarnessResponse:
        """Take a turn. If it fails in any way, the episode ends too.

        Args:
            message: The message to the agent.
            on_event: Takes each event when it comes.
            timeout_s: How long the turn may take; by default the configuration's `session_timeout_s`.

        Raises:
            HarnessNotRunningError: No episode has begun, or the agent has ended.
            HarnessTurnTimeoutError: The turn took too long.
            HarnessError: The agent failed, or another turn is under way.
        """
        if not self._is_active:
            raise HarnessNotRunningError("No active episode; call reset() before step()")
        # Turns of one conversation cannot overlap.
        if self._is_in_turn:
            raise HarnessError("the agent's turn has not ended yet")
        self._is_in_turn = True
        limit_s = self.adapter.config.session_timeout_s if timeout_s is None else timeout_s
        try:
            response = await _within(limit_s, self._take_turn(message, on_event))
        except BaseException as exc:
            # The trajectory ends with the reason, as clients of the socket see it.
            if isinstance(exc, HarnessError):
                data = {"message": message_of(exc), "recoverable": False}
                self._trajectory.append(HarnessEvent(type=HarnessEventType.ERROR, data=data))
            await self.end_episode()
            raise
        finally:
            self._is_in_turn = False
        self._state.step_count += 1
        return response

    async def _take_turn(self, message: str, on_event: OnEvent | None) -> HarnessResponse:
        # An agent that died between turns would otherwise cost the whole time limit.
        if not await self.adapter.is_alive():
            raise HarnessNotRunningError("harness process is not running")
        if type(self.adapter).send_message is not AgenticHarnessAdapter.send_message and on_event is None:
            response = await self.adapter.send_message(message)  # the adapter writes its own
            self._trajectory += response.events
            return response
        events: list[HarnessEvent] = []
        async with contextlib.aclosing(turn_events(self.adapter, message)) as stream:
            async for event in stream:
                events.append(event)
                self._trajectory.append(event)
                if on_event is not None:
                    await on_event(event)
        return response_of(events)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Take a turn, or list or call the environment's own tools.

        Raises:
            HarnessNotRunningError: No episode has begun; call `reset`.
            TypeError: The action is of another class.
        """
        if isinstance(action, (ListToolsAction, CallToolAction)):
            return await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if not isinstance(action, HarnessAction):
            text = "HarnessEnvironment only accepts HarnessAction, ListToolsAction, or CallToolAction"
            raise TypeError(f"{text}; got {type(action).__name__}")
        if not self._is_active:
            raise HarnessNotRunningError("No active episode; call reset() before step()")
        # Events of this turn only, if it fails.
        begun = len(self._trajectory)
        try:
            turn = await self.run_turn(action.message, timeout_s=timeout_s)
        except HarnessError as exc:
            if self._is_active:  # another turn is under way: this one was refused, and nothing has ended
                raise
            observation = self._failed_turn(exc, self._trajectory[begun:])
        else:
            metadata = {
                "response": turn.response,
                "turn_events": events_to_metadata(turn.events),
                "turn_number": self._state.step_count,
            }
            observation = Observation(done=turn.done, metadata=metadata)
            # The rubric sees the whole turn in the metadata.
            observation.reward = await self._apply_rubric_async(action, observation)
        return self._apply_transform(observation)

    def _failed_turn(self, exc: HarnessError, events: list[HarnessEvent]) -> Observation:
        kind = "turn_timeout" if isinstance(exc, HarnessTurnTimeoutError) else "harness_crashed"
        metadata = {"error": message_of(exc), "error_type": kind, "turn_events": events_to_metadata(events)}
        return Observation(done=True, reward=None, metadata=metadata)

    # -- from synchronous code ------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Begin a conversation, from synchronous code; raises as `reset_async` does."""
        return _blocking(self.reset_async(seed=seed, episode_id=episode_id, **kwargs))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return _blocking(self.step_async(action, timeout_s=timeout_s, **kwargs))


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    return TOOL_LOOP.run(work)


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Wait for a turn up to its limit, and not much longer for its cancellation: an adapter may refuse it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks it as seen
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.cancelled():
            raise HarnessError("the adapter has cancelled the turn")
        if task.done():
            return task.result()
        raise HarnessTurnTimeoutError(f"harness turn exceeded {limit_s} seconds")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)
