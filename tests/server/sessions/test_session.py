"""One session: its states, one call at a time in order, every way it can end, every request answered once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openenv import Environment, MCPEnvironment, Observation, tool
from openenv.errors import SessionClosedError
from openenv.server.runners import InlineRunner, Runner, ThreadRunner, current_dispatcher
from openenv.server.sessions.operations import CALL, Operation, StepInput, build_operations
from openenv.server.sessions.session import Session, SessionCallbacks, SessionKind, SessionState
from waiting import wait_until_async

pytestmark = pytest.mark.anyio

OPS = build_operations(lambda observation: observation, lambda state: state)


class Recorder:
    """An environment that is none: writes down what is asked of it, and by which thread."""

    def __init__(self) -> None:
        self.log: list[Any] = ["init"]
        self.threads = {threading.get_ident()}
        self.gate: threading.Event | None = None

    def _note(self, entry: Any) -> Any:
        self.log.append(entry)
        self.threads.add(threading.get_ident())
        return entry

    def reset(self, **kwargs: Any) -> Any:
        return self._note(("reset", kwargs))

    def step(self, action: Any, **kwargs: Any) -> Any:
        if self.gate is not None:
            assert self.gate.wait(10)
        if isinstance(action, BaseException):
            raise action
        return self._note(("step", action, kwargs) if kwargs else ("step", action))

    @property
    def state(self) -> Any:
        return self._note("state")

    def close(self) -> None:
        self._note("close")


class AsyncRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.cancelled = False
        self.entered = asyncio.Event()

    async def step_async(self, action: Any) -> Any:
        self.entered.set()
        try:
            await (asyncio.Event().wait() if action == "forever" else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return self._note(("step", action))

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("close")


class World:
    """Builds sessions and remembers what they report."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.now = 100.0
        self.ready: list[BaseException | None] = []
        self.closed: list[Session] = []
        self.closing_threads: list[int] = []

    def _note_closed(self, session: Session) -> None:
        self.closed.append(session)
        self.closing_threads.append(threading.get_ident())

    def new(self) -> Session:
        return Session(
            "s1",
            SessionKind.SOCKET,
            lane=self.runner.lane(),
            clock=lambda: self.now,
            listener=SessionCallbacks(lambda _, error: self.ready.append(error), self._note_closed),
        )

    async def built(self, factory: Callable[[], Any]) -> tuple[Session, Any]:
        session = self.new()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.construct(factory, lambda result, error: done.set_result((result, error)), current_dispatcher())
        await done
        return session, session.env

    async def until_closed(self, session: Session) -> None:
        await wait_until_async(lambda: self.closed)
        assert self.closed == [session]
        assert session.state is SessionState.CLOSED


@pytest.fixture(params=["thread", "inline"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    runner: Runner = ThreadRunner() if request.param == "thread" else InlineRunner()
    yield World(runner)
    runner.close()


@pytest.fixture
def threaded() -> Iterator[World]:
    runner = ThreadRunner()
    yield World(runner)
    runner.close()


async def test_a_session_lives_through_its_states(world: World) -> None:
    session = world.new()
    assert session.state is SessionState.CREATING
    session, env = await world.built(Recorder)
    assert session.state is SessionState.READY
    assert session.is_idle
    assert world.ready == [None]
    await session.run(OPS.reset, {"seed": 1})
    assert await session.run(OPS.step, "a") == ("step", "a")
    assert session.is_idle
    session.close()
    await world.until_closed(session)
    assert env.log == ["init", ("reset", {"seed": 1}), ("step", "a"), "close"]


async def test_all_code_of_a_session_runs_on_one_thread_that_is_not_the_loops(threaded: World) -> None:
    session, env = await threaded.built(Recorder)
    await session.run(OPS.reset, {})
    await session.run(OPS.step, 1)
    await session.run(OPS.state)
    await session.run(CALL, lambda env: env._note("call"))
    session.close()
    await threaded.until_closed(session)
    assert len(env.threads) == 1
    assert threading.get_ident() not in env.threads


async def test_requests_are_answered_in_the_order_they_came(world: World) -> None:
    session, env = await world.built(Recorder)
    answers = await asyncio.gather(*(session.run(OPS.step, i) for i in range(50)))
    assert answers == [("step", i) for i in range(50)]
    assert env.log[1:] == answers


async def test_requests_may_wait_for_the_constructor(threaded: World) -> None:
    gate, session = threading.Event(), threaded.new()

    def build() -> Recorder:
        assert gate.wait(10)
        return Recorder()

    session.construct(build, lambda result, error: None, current_dispatcher())
    waiting = asyncio.ensure_future(session.run(OPS.step, 1))
    await asyncio.sleep(0)
    assert session.state is SessionState.CREATING
    gate.set()
    assert await waiting == ("step", 1)


async def test_a_running_session_is_busy_and_counts_successful_steps(threaded: World) -> None:
    session, env = await threaded.built(Recorder)
    env.gate = threading.Event()
    running = asyncio.ensure_future(session.run(OPS.step, 1))
    await asyncio.sleep(0)
    assert session.state is SessionState.BUSY
    assert not session.is_idle
    env.gate.set()
    await running
    with pytest.raises(ValueError):
        await session.run(OPS.step, ValueError())
    assert session.step_count == 1


async def test_activity_is_noted_at_the_beginning_and_at_the_end(threaded: World) -> None:
    session, env = await threaded.built(Recorder)
    env.gate = threading.Event()
    threaded.now = 200.0
    running = asyncio.ensure_future(session.run(OPS.step, 1))
    await asyncio.sleep(0)
    assert session.last_activity_at == 200.0
    threaded.now = 300.0
    env.gate.set()
    await running
    assert session.last_activity_at == 300.0


@pytest.mark.parametrize("error", [ValueError("v"), SystemExit(3), KeyboardInterrupt(), StopIteration(7)], ids=repr)
async def test_whatever_an_environment_raises_reaches_the_requester_and_the_session_lives(
    world: World, error: BaseException
) -> None:
    session, _ = await world.built(Recorder)
    with pytest.raises(Exception) as caught:
        await session.run(OPS.step, error)
    assert type(error).__name__ in repr(caught.value)
    assert await session.run(OPS.step, "next") == ("step", "next")


async def test_a_constructor_that_fails_closes_the_session_and_tells_why(world: World) -> None:
    def fail() -> Any:
        raise OSError("no display")

    session, env = await world.built(fail)
    assert env is None
    await world.until_closed(session)
    assert isinstance(world.ready[0], OSError)
    assert session.close_reason == "factory failed"


async def test_requests_waiting_for_a_constructor_that_fails_are_answered(threaded: World) -> None:
    gate, session = threading.Event(), threaded.new()

    def fail() -> Any:
        assert gate.wait(10)
        raise OSError("no display")

    session.construct(fail, lambda result, error: None, current_dispatcher())
    waiting = asyncio.ensure_future(session.run(OPS.step, 1))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(SessionClosedError, match="factory failed"):
        await asyncio.wait_for(waiting, 10)


async def test_close_refuses_what_waits_and_lets_a_running_call_finish(threaded: World) -> None:
    session, env = await threaded.built(Recorder)
    env.gate = threading.Event()
    running = asyncio.ensure_future(session.run(OPS.step, 1))
    waiting = asyncio.ensure_future(session.run(OPS.step, 2))
    await asyncio.sleep(0)
    session.close("leaving")
    with pytest.raises(SessionClosedError, match="leaving"):
        await waiting
    assert session.state is SessionState.CLOSING
    env.gate.set()
    assert await running == ("step", 1)
    await threaded.until_closed(session)
    assert env.log == ["init", ("step", 1), "close"]


async def test_close_while_the_environment_is_built_closes_it_once_it_is_there(threaded: World) -> None:
    gate, built, session = threading.Event(), [], threaded.new()

    def build() -> Recorder:
        assert gate.wait(10)
        built.append(Recorder())
        return built[0]

    session.construct(build, lambda result, error: None, current_dispatcher())
    session.close("gone")
    assert session.state is SessionState.CLOSING
    gate.set()
    await threaded.until_closed(session)
    assert built[0].log == ["init", "close"]


async def test_close_is_heard_once_however_often_it_is_said(world: World) -> None:
    session, env = await world.built(Recorder)
    for reason in ("first", "second"):
        session.close(reason)
    await world.until_closed(session)
    session.close("third")
    assert session.close_reason == "first"
    assert env.log.count("close") == 1
    assert session.env is None


async def test_a_closed_session_refuses(world: World) -> None:
    session, _ = await world.built(Recorder)
    session.close("over")
    with pytest.raises(SessionClosedError, match="over"):
        await session.run(OPS.step, 1)
    await world.until_closed(session)
    with pytest.raises(SessionClosedError, match="over"):
        await session.run(OPS.step, 1)


async def test_a_close_that_fails_is_logged_and_the_session_ends(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(Recorder):
        def close(self) -> None:
            raise RuntimeError("I will not")

    session, _ = await world.built(Stubborn)
    session.close()
    await world.until_closed(session)
    assert "I will not" in caplog.text


async def test_an_environment_without_close_can_be_closed(world: World) -> None:
    session, _ = await world.built(object)
    session.close()
    await world.until_closed(session)


class Tools(MCPEnvironment):
    def reset(self, seed: int | None = None) -> Observation:
        return Observation()

    @tool
    def wave(self) -> str:
        return "hello"


class ToolsAndMore(Tools):
    def close(self) -> None:
        super().close()


@pytest.mark.parametrize(
    ("kind", "has_client", "is_at_once"), [(Tools, False, True), (Tools, True, False), (ToolsAndMore, False, False)]
)
async def test_tools_close_on_the_loop_unless_their_close_may_wait(
    kind: type[Tools], has_client: bool, is_at_once: bool
) -> None:
    world = World(InlineRunner(closes_apart=True))
    session, env = await world.built(kind)
    if has_client:
        assert await env.tools.ask_server(lambda client: client.list_resources()) == []
    session.close()
    await world.until_closed(session)
    assert (world.closing_threads == [threading.get_ident()]) is is_at_once


async def test_a_session_without_work_at_its_end_ends_with_its_last_call_in_the_same_turn(threaded: World) -> None:
    class Quick(Recorder):
        close = Environment.close

    async def last(kind: type[Recorder]) -> Session:
        session, env = await threaded.built(kind)
        assert await session.run(OPS.step, 1, is_last=True) == ("step", 1)
        assert threading.get_ident() not in env.threads
        return session

    session = await last(Quick)
    await threaded.until_closed(session)
    assert session.close_reason == "request done"
    assert threading.get_ident() not in threaded.closing_threads
    session.close("later")
    assert session.close_reason == "request done"
    session = await last(Recorder)  # its `close` may hang, so only the caller can close it
    assert session.is_idle
    session.close("now")
    await wait_until_async(lambda: len(threaded.closed) == 2)
    assert session.close_reason == "now"


async def test_asynchronous_methods_run_on_the_loop_and_the_others_in_the_lane(threaded: World) -> None:
    session, env = await threaded.built(AsyncRecorder)
    assert await session.run(OPS.step, 1) == ("step", 1)
    assert threading.get_ident() in env.threads
    env.threads.clear()
    await session.run(OPS.reset, {})
    assert threading.get_ident() not in env.threads
    session.close()
    await threaded.until_closed(session)
    assert env.log[-1] == "close"


async def test_closing_interrupts_a_coroutine_and_then_closes_the_environment(world: World) -> None:
    session, env = await world.built(AsyncRecorder)
    running = asyncio.ensure_future(session.run(OPS.step, "forever"))
    await asyncio.wait_for(env.entered.wait(), 30)
    session.close("enough")
    with pytest.raises(SessionClosedError, match="enough"):
        await asyncio.wait_for(running, 30)
    await world.until_closed(session)
    assert env.cancelled
    assert env.log == ["init", "close"]


async def test_closing_right_after_an_asynchronous_request_ends_the_session_too(world: World) -> None:
    session, env = await world.built(AsyncRecorder)
    running = asyncio.ensure_future(session.run(OPS.step, "forever"))
    await asyncio.sleep(0)
    session.close("at once")
    with pytest.raises(SessionClosedError):
        await asyncio.wait_for(running, 10)
    await world.until_closed(session)
    assert env.log == ["init", "close"]


@pytest.mark.parametrize("factory", [Recorder, AsyncRecorder])
async def test_closing_from_within_an_answer_closes_the_environment_exactly_once(
    world: World, factory: type[Recorder]
) -> None:
    session, env = await world.built(factory)
    session.submit(OPS.step, 1, lambda result, error: session.close("in the answer"), current_dispatcher())
    await world.until_closed(session)
    assert env.log == ["init", ("step", 1), "close"]


async def test_sessions_closed_at_the_very_moment_a_step_ends_close_their_environment_once(threaded: World) -> None:
    for _ in range(200):
        threaded.closed.clear()
        session, env = await threaded.built(Recorder)
        running = asyncio.ensure_future(session.run(OPS.step, 1))
        await asyncio.to_thread(session.close)
        await asyncio.gather(running, return_exceptions=True)
        await threaded.until_closed(session)
        assert env.log[-1] == "close"
        assert env.log.count("close") == 1


async def test_a_requester_that_gives_up_does_not_disturb_the_session(threaded: World) -> None:
    session, env = await threaded.built(Recorder)
    env.gate = threading.Event()
    running = asyncio.ensure_future(session.run(OPS.step, 1))
    await asyncio.sleep(0)
    running.cancel()
    env.gate.set()
    assert await session.run(OPS.step, 2) == ("step", 2)
    assert env.log == ["init", ("step", 1), ("step", 2)]


async def test_keywords_of_a_step_are_filtered_and_free_operations_can_be_run(world: World) -> None:
    session, _ = await world.built(Recorder)
    assert await session.run(OPS.step_with, StepInput("a", {"timeout_s": 2})) == ("step", "a", {"timeout_s": 2})
    doubled = Operation("call", lambda env, number: number * 2)
    assert await session.run(doubled, 21) == 42


async def test_a_state_method_is_called_and_a_state_property_is_read(world: World) -> None:
    class Old(Recorder):
        def state(self) -> Any:  # type: ignore[override]
            return "from a method"

    session, _ = await world.built(Old)
    assert await session.run(OPS.state) == "from a method"
