"""`HarnessEnvironment`: episodes and turns of a real process, what ends them, and what is left then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from openenv.adapters.turns import (
    AgenticHarnessAdapter,
    HarnessAction,
    HarnessConfig,
    HarnessEnvironment,
    HarnessEvent,
    HarnessEventType,
    HarnessResponse,
)
from openenv.adapters.turns import turn_environment as harness_environment
from openenv.env.rubrics.rubric import Rubric
from openenv.errors import HarnessError, HarnessNotRunningError, HarnessStartupError
from openenv.protocol.tool_messages import CallToolAction, ListToolsAction, Tool
from openenv.types import Action, Observation
from slow_steps import take_async
from turn_environments import TalkingEnv, talking_adapter
from waiting import wait_until, wait_until_async

pytestmark = pytest.mark.anyio


class Logged(AgenticHarnessAdapter):
    """Notes what is called, and plays events."""

    BUILTIN_TOOL_NAMES = frozenset({"add"})

    def __init__(self, *events: Any, **config: Any) -> None:
        super().__init__(HarnessConfig(name="logged", command=["none"], **config))
        self.events = events
        self.log: list[Any] = []
        self.alive = True

    async def start(self, working_directory: str) -> None:
        """Note it."""
        self.log.append(["start", working_directory])

    async def stop(self) -> None:
        """Note it."""
        self.log.append(["stop"])

    async def inject_tools(self, tools: list[Tool], bridge_url: str | None = None) -> None:
        """Note it."""
        self.log.append(["inject", [tool.name for tool in tools], bridge_url is not None])

    async def is_alive(self) -> bool:
        """As it was set."""
        return self.alive

    async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        """Play the events: an exception is raised, a number slept."""
        self.log.append(["send", message])
        for item in self.events or [{"type": "turn_complete", "data": {"response": message.upper()}}]:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, float):
                await take_async(item)
            else:
                yield HarnessEvent.model_validate(item)


class Fixed(Rubric):
    """Scores the length of the response."""

    async def forward(self, action: Any, observation: Any) -> float:
        """Score."""
        return float(len(observation.metadata["response"]))


async def test_a_conversation_with_a_process() -> None:
    env = TalkingEnv()
    with pytest.raises(HarnessNotRunningError, match="No active episode"):
        await env.step_async(HarnessAction(message="early"))
    first = await env.reset_async(episode_id="one")
    assert first.metadata == {"episode_id": "one", "injected_tools": ["add", "fail"]}
    turn = await env.step_async(HarnessAction(message="echo hello"))
    assert turn.metadata["response"] == "hello"
    assert [event["type"] for event in turn.metadata["turn_events"]] == ["text_output", "turn_complete"]
    assert (await env.step_async(HarnessAction(message="count"))).metadata["response"] == "2"
    last = await env.step_async(HarnessAction(message="bye now"))
    assert (last.done, last.metadata["turn_number"]) == (True, 3)
    assert env.state.step_count == 3
    assert len(env.trajectory) == 4
    await env.reset_async()
    assert (await env.step_async(HarnessAction(message="count"))).metadata["response"] == "1"
    assert env.state.step_count == 1
    process = env.adapter._process
    env.close()
    await wait_until_async(lambda: not process.is_running())
    with pytest.raises(HarnessError, match="closed"):
        await env.reset_async()


async def test_the_agent_calls_tools_of_the_environment() -> None:
    env = TalkingEnv()
    await env.reset_async()
    assert (await env.step_async(HarnessAction(message="tools"))).metadata["response"] == "add fail"
    turn = await env.step_async(HarnessAction(message='call add {"a": 2, "b": 3}'))
    assert turn.metadata["response"] == "5"
    failed = await env.step_async(HarnessAction(message="call fail {}"))
    assert failed.metadata["turn_events"][1]["data"]["is_error"]
    assert "out of stock" in failed.metadata["response"]
    listed: Any = await env.step_async(ListToolsAction())
    assert len(listed.tools) == 2
    called: Any = await env.step_async(CallToolAction(tool_name="add", arguments={"a": 1, "b": 1}))
    assert called.result.data == 2
    await env.end_episode()


async def test_the_order_in_which_an_adapter_is_called() -> None:
    adapter = Logged()
    env = TalkingEnv()
    env.adapter = adapter
    await env.reset_async()
    await env.step_async(HarnessAction(message="hi"))
    await env.reset_async()
    begin = [["inject", ["env_add", "fail"], True], ["start", "/workspace"]]
    assert adapter.log == [["stop"], *begin, ["send", "hi"], ["stop"], *begin]
    await env.end_episode()


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("quit 3", "harness_crashed", "the agent ended within its turn: the agent gave up"),
        ("hang", "turn_timeout", "exceeded 0.5 seconds"),
    ],
)
async def test_a_turn_that_fails_ends_the_episode_without_a_reward(message: str, kind: str, text: str) -> None:
    env = TalkingEnv()
    await env.reset_async()
    process = env.adapter._process
    url = env._bridge.url if env._bridge is not None else None
    assert url is not None
    turn = await env.step_async(HarnessAction(message=message), timeout_s=0.5 if message == "hang" else None)
    assert (turn.done, turn.reward, turn.metadata["error_type"]) == (True, None, kind)
    assert text in turn.metadata["error"]
    assert turn.metadata["turn_events"][-1]["data"]["recoverable"] is False
    assert not process.is_running()
    assert env._bridge is None
    with pytest.raises(HarnessNotRunningError):
        await env.step_async(HarnessAction(message="echo x"))
    await env.reset_async()
    assert (await env.step_async(HarnessAction(message="echo x"))).metadata["response"] == "x"
    await env.end_episode()


async def test_a_dead_agent_is_noticed_before_the_turn() -> None:
    env = TalkingEnv()
    await env.reset_async()
    env.adapter._process._process.kill()
    wait_until(lambda: not env.adapter._process.is_running())
    turn = await env.step_async(HarnessAction(message="echo x"))
    assert (turn.reward, turn.metadata["error"]) == (None, "harness process is not running")


async def test_what_an_adapter_raises_ends_the_episode_too() -> None:
    adapter = Logged(RuntimeError("boom"))
    env = HarnessEnvironment(adapter)
    await env.reset_async()
    with pytest.raises(RuntimeError, match="boom"):
        await env.step_async(HarnessAction(message="x"))
    assert adapter.log[-1] == ["stop"]
    with pytest.raises(HarnessNotRunningError):
        await env.step_async(HarnessAction(message="x"))


async def test_events_before_a_failure_are_kept() -> None:
    env = HarnessEnvironment(Logged({"type": "text_output", "data": {"text": "so far"}}))
    await env.reset_async()
    turn = await env.step_async(HarnessAction(message="x"))
    assert [event["type"] for event in turn.metadata["turn_events"]] == ["text_output", "error"]
    assert [event.type.value for event in env.trajectory] == ["text_output", "error"]


async def test_a_cancelled_turn_stops_the_agent() -> None:
    env = TalkingEnv()
    await env.reset_async()
    process = env.adapter._process
    turn = asyncio.ensure_future(env.step_async(HarnessAction(message="hang")))
    await wait_until_async(lambda: len(env.trajectory) >= 1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert not process.is_running()


async def test_an_adapter_that_refuses_to_be_cancelled_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(Logged):
        async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
            while not self.released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.released.wait()
            yield HarnessEvent(type=HarnessEventType.TEXT_OUTPUT)

        def __init__(self) -> None:
            super().__init__(session_timeout_s=0.1)
            self.released = asyncio.Event()

    monkeypatch.setattr(harness_environment, "_CANCEL_S", 0.1)
    adapter = Stubborn()
    env = HarnessEnvironment(adapter)
    await env.reset_async()
    turn = await env.step_async(HarnessAction(message="x"))
    assert turn.metadata["error_type"] == "turn_timeout"
    assert adapter.log[-1] == ["stop"]
    adapter.released.set()


async def test_an_agent_that_cannot_be_stopped_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Endless(Logged):
        async def stop(self) -> None:
            if self.log:
                await asyncio.Event().wait()

    class Failing(Logged):
        async def stop(self) -> None:
            if self.log:
                raise OSError("no such process")

    monkeypatch.setattr(harness_environment, "_STOP_S", 0.1)
    for adapter, text in ((Endless(), "did not stop within"), (Failing(), "could not be stopped")):
        env = HarnessEnvironment(adapter)
        await env.reset_async()
        await env.end_episode()
        assert text in caplog.text


async def test_two_turns_at_once_are_refused_and_the_first_goes_on() -> None:
    env = HarnessEnvironment(Logged(0.1, {"type": "turn_complete", "data": {"response": "r"}}))
    await env.reset_async()
    first, second = await asyncio.gather(
        env.step_async(HarnessAction(message="1")), env.step_async(HarnessAction(message="2")), return_exceptions=True
    )
    assert isinstance(first, Observation)
    assert first.metadata["response"] == "r"
    assert isinstance(second, HarnessError)
    assert (await env.step_async(HarnessAction(message="3"))).metadata["turn_number"] == 2


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    env = TalkingEnv(working_directory=str(tmp_path / "missing"))
    with pytest.raises(HarnessStartupError, match="does not exist"):
        await env.reset_async()
    assert env._bridge is None
    with pytest.raises(HarnessNotRunningError):
        await env.step_async(HarnessAction(message="x"))


async def test_a_rubric_scores_turns() -> None:
    env = HarnessEnvironment(Logged(), rubric=Fixed())
    await env.reset_async()
    assert (await env.step_async(HarnessAction(message="four"))).reward == 4.0


async def test_an_adapter_may_write_send_message_itself() -> None:
    class Own(Logged):
        async def send_message(self, message: str) -> HarnessResponse:
            return HarnessResponse(response=f"own {message}", done=True)

    env = HarnessEnvironment(Own())
    await env.reset_async()
    turn = await env.step_async(HarnessAction(message="x"))
    assert (turn.done, turn.metadata["response"]) == (True, "own x")


async def test_another_action_is_refused() -> None:
    env = HarnessEnvironment(Logged())
    await env.reset_async()
    with pytest.raises(TypeError, match="HarnessAction"):
        await env.step_async(Action())


def test_it_works_from_synchronous_code() -> None:
    env = TalkingEnv()
    env.reset()
    process: Any = env.adapter._process  # type: ignore[attr-defined]
    assert env.step(HarnessAction(message="echo sync")).metadata["response"] == "sync"
    assert env.step(HarnessAction(message='call add {"a": 1, "b": 1}')).metadata["response"] == "2"
    env.close()
    assert not process.is_running()


async def test_close_from_another_thread_waits_for_the_end() -> None:
    env = HarnessEnvironment(talking_adapter())
    await env.reset_async()
    process: Any = env.adapter._process  # type: ignore[attr-defined]
    await asyncio.to_thread(env.close)
    assert not process.is_running()
