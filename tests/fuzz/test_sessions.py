"""The session manager under arbitrary orders of events: within its limit, every environment closed once, every request
answered once.

The same machine runs over the inline runner, where all is decided by the order of calls, and over threads, where
constructors, steps and closes can be held up while other things happen.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from environments import Idle
from openenv.errors import OpenEnvError
from openenv.server.runners import current_dispatcher
from openenv.server.sessions.lifetime import SessionLimits
from openenv.server.sessions.manager import SessionClocks, SessionManager
from openenv.server.sessions.operations import CALL, Operation
from openenv.server.sessions.session import Session, SessionKind
from openenv.types import Action, Observation


class Connection:
    """Holds sessions."""

    def holds_back(self, session: Session) -> bool:
        return False

    def let_go(self, session: Session, reason: str) -> None:
        """Forget a session."""


CONNECTION = Connection()


class World:
    """What the environments of one machine did, and the gates that hold them up."""

    def __init__(self) -> None:
        self.built: list[int] = []
        self.closed: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.fail_next: set[str] = set()
        self.gates = {"construct": threading.Event(), "step": threading.Event(), "close": threading.Event()}
        for gate in self.gates.values():
            gate.set()

    def pass_gate(self, name: str) -> None:
        """Wait where the machine wants it, fail where it wants that."""
        if not self.gates[name].wait(20):
            self.wrong.append(f"{name} was never released")
        if name in self.fail_next:
            self.fail_next.discard(name)
            raise RuntimeError(f"{name} fails")


class Controlled(Idle):
    """Does what its world says, and notices when it is called out of turn."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        world.pass_gate("construct")
        self.inside = False
        world.built.append(id(self))

    def use(self) -> None:
        """Take a call that must not meet another one, nor a closed environment."""
        if self.inside:
            self.world.wrong.append("two calls at once")
        if self.world.closed[id(self)]:
            self.world.wrong.append("a call after close")
        self.inside = True
        try:
            self.world.pass_gate("step")
        finally:
            self.inside = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.use()
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.use()
        return Observation()

    def close(self) -> None:
        if self.inside:
            self.world.wrong.append("closed in the middle of a call")
        self.world.closed[id(self)] += 1
        self.world.pass_gate("close")


class AsyncControlled(Controlled):
    """The same with a coroutine that waits for its gate."""

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        await asyncio.to_thread(self.world.gates["step"].wait, 20)
        self.use()
        return Observation()


def _step(env: Any, action: Any) -> Any:
    return env.step(action)


async def _step_async(env: Any, action: Any) -> Any:
    return await env.step_async(action)


STEP = Operation("step", _step, _step_async)
KINDS = st.sampled_from([SessionKind.SOCKET, SessionKind.HTTP, SessionKind.SOFT])


class Sessions(RuleBasedStateMachine):
    """Opens, uses, cancels, expires, evicts and drains in any order."""

    runner = "inline"
    env_cls: type[Controlled] = Controlled

    @initialize(limit=st.integers(1, 3), soft=st.integers(1, 2))
    def begin(self, limit: int, soft: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.world = World()
        self.kept: list[Any] = []
        self.now = 1000.0
        self.limit = limit
        self.manager = SessionManager(
            self.make,
            SessionLimits(
                sessions=limit, idle_s=50, soft_idle_s=10, soft_sessions=soft, closing_wait_s=0.02, drain_s=10
            ),
            runner=self.runner,
            clocks=SessionClocks(lambda: self.now, lambda: self.now),
        )
        self.manager.env_cls = self.env_cls
        self.seen: list[Session] = []
        self.opening: list[asyncio.Task[Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.asked = 0
        self.answers: Counter[int] = Counter()

    def make(self) -> Controlled:
        """The factory; keeps what it makes, so that ids stay unique."""
        env = self.env_cls(self.world)
        self.kept.append(env)
        return env

    def turn(self, times: int = 3) -> None:
        """Let the loop turn, and threads run a little."""

        async def breathe() -> None:
            for _ in range(times):
                await asyncio.sleep(0)
            if self.runner != "inline":
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(breathe())

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call something where a loop runs."""

        async def call() -> Any:
            return function()

        return self.loop.run_until_complete(call())

    def pick(self, number: int) -> Session | None:
        """One of the sessions seen so far, ended ones included."""
        return self.seen[number % len(self.seen)] if self.seen else None

    # -- opening --------------------------------------------------------------------------------------------------

    @rule(kind=KINDS, close_at_once=st.integers(0, 9))
    def open(self, kind: SessionKind, close_at_once: int) -> None:
        def reserved(session: Session) -> None:
            self.seen.append(session)
            if close_at_once == 0:
                session.close("before it began")

        async def work() -> None:
            await self.manager.open(kind, on_reserved=reserved)

        self.opening.append(self.loop.create_task(work()))
        self.turn()

    @rule(number=st.integers(0, 50))
    def cancel_open(self, number: int) -> None:
        if self.opening:
            self.opening[number % len(self.opening)].cancel()
            self.turn()

    @rule(keep=st.booleans())
    def plain_request(self, keep: bool) -> None:
        async def work() -> None:
            async with self.manager.borrow() as session:
                self.seen.append(session)
                await session.run(STEP, Action())
                if keep:
                    self.manager.keep_soft(session)

        self.tasks.append(self.loop.create_task(work()))
        self.turn()

    # -- using ----------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 50), times=st.integers(1, 3))
    def submit(self, number: int, times: int) -> None:
        session = self.pick(number)
        if session is None:
            return
        for _ in range(times):
            self.asked += 1
            ticket = self.asked

            def done(_: Any, error: BaseException | None, ticket: int = ticket) -> None:
                self.answers[ticket] += 1

            self.on_loop(lambda done=done: session.submit(STEP, Action(), done, current_dispatcher()))
        self.turn()

    @rule(number=st.integers(0, 50))
    def run(self, number: int) -> None:
        session = self.pick(number)
        if session is not None:
            self.tasks.append(self.loop.create_task(session.run(CALL, lambda env: None)))
            self.turn()

    @rule(number=st.integers(0, 50))
    def cancel_run(self, number: int) -> None:
        if self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
            self.turn()

    # -- ending ---------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 50))
    def close(self, number: int) -> None:
        session = self.pick(number)
        if session is not None:
            self.on_loop(lambda: session.close("asked to"))
            self.turn()

    @rule(number=st.integers(0, 50), attached=st.booleans())
    def attach(self, number: int, attached: bool) -> None:
        session = self.pick(number)
        if session is not None and session.kind is SessionKind.HTTP:
            if attached:
                session.attach(CONNECTION)
            else:
                session.detach(CONNECTION)

    @rule(seconds=st.integers(1, 60))
    def time_passes(self, seconds: int) -> None:
        spared = [s for s in self.manager.sessions() if s.is_attached or not s.is_idle]
        states = [s.state for s in spared]
        self.now += seconds
        self.on_loop(self.manager._expired)
        if self.runner == "inline":
            assert [s.state for s in spared] == states, "the reaper took a session that was in use"
        self.turn()

    @rule(name=st.sampled_from(["construct", "step", "close"]))
    def fail_once(self, name: str) -> None:
        self.world.fail_next.add(name)

    @precondition(lambda self: self.runner != "inline")
    @rule(name=st.sampled_from(["construct", "step", "close"]))
    def hold(self, name: str) -> None:
        self.world.gates[name].clear()

    @rule(name=st.sampled_from(["construct", "step", "close"]))
    def release(self, name: str) -> None:
        self.world.gates[name].set()
        self.turn()

    def release_all(self) -> None:
        """Hold nothing up any more."""
        for gate in self.world.gates.values():
            gate.set()

    @rule()
    def drain(self) -> None:
        self.release_all()
        self.loop.run_until_complete(asyncio.wait_for(self.manager.drain(), 20))
        assert self.manager.active == 0
        assert not self.manager.slots._once
        self.turn(10)
        assert self.manager.is_draining
        self.manager.resume()

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def is_within_its_limit(self) -> None:
        if hasattr(self, "manager"):
            assert self.manager.active <= self.limit
            assert len(self.manager.slots._once) <= self.limit
            soft = sum(session.kind is SessionKind.SOFT for session in self.manager.sessions())
            assert soft <= self.limit

    @invariant()
    def nothing_went_wrong(self) -> None:
        if hasattr(self, "world"):
            assert not self.world.wrong
            assert all(count == 1 for count in self.world.closed.values())
            assert all(count == 1 for count in self.answers.values())

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.release_all()
        try:
            self.finish()
        finally:
            self.loop.close()

    def finish(self) -> None:
        """Let everything come to its end, and count."""

        async def end() -> None:
            await asyncio.wait_for(self.manager.drain(), 20)
            waiting = [*self.opening, *self.tasks]
            if waiting:
                _, pending = await asyncio.wait(waiting, timeout=20)
                assert not pending, "a task never ended"

        self.loop.run_until_complete(end())
        deadline = time.monotonic() + 10
        while sum(self.answers.values()) < self.asked and time.monotonic() < deadline:
            self.turn()
        for task in (*self.opening, *self.tasks):
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, (OpenEnvError, RuntimeError)), error
        assert self.manager.active == 0
        assert not self.manager.slots._once
        assert not self.world.wrong
        assert self.world.closed == Counter(self.world.built), "an environment was not closed exactly once"
        assert self.answers == Counter(range(1, self.asked + 1)), "a request was not answered exactly once"


class ThreadedSessions(Sessions):
    """The same on threads."""

    runner = "thread"


class AsyncSessions(Sessions):
    """The same with coroutines on the loop, and the rest on threads."""

    runner = "thread"
    env_cls = AsyncControlled


_STEPS = settings(max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestInlineSessions = Sessions.TestCase
TestInlineSessions.pytestmark = [pytest.mark.slow]
TestInlineSessions.settings = settings(_STEPS, max_examples=150)
TestThreadedSessions = ThreadedSessions.TestCase
TestThreadedSessions.settings = _STEPS
TestAsyncSessions = AsyncSessions.TestCase
TestAsyncSessions.pytestmark = [pytest.mark.slow]
TestAsyncSessions.settings = _STEPS
