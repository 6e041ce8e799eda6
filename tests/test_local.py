"""`LocalEnv`: the client's interface on an environment of this process, awaited or blocking."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from environments import Idle
from forked_environments import Bookkeeper, Locked, Single, Walker
from openenv import LocalEnv
from openenv.env.environment import Environment
from openenv.errors import EnvironmentFactoryError, ExecutionError, NotForkable, RequestValidationError, SessionLost
from openenv.types import Action, Observation, State


class Count(Action):
    by: int = 1


class Counted(Observation):
    total: int = 0


class Counter(Environment[Count, Counted, State]):
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Counted:
        self.total, self.steps = seed or 0, 0
        return Counted(total=self.total, metadata=kwargs)

    def step(self, action: Count, timeout_s: float | None = None, **kwargs: Any) -> Counted:
        if action.by < 0:
            raise ArithmeticError("only upwards")
        self.total += action.by
        self.steps += 1
        return Counted(total=self.total, reward=float(action.by), done=self.total > 9)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)

    def close(self) -> None:
        type(self).closed += 1


class AsyncCounter(Counter):
    async def step_async(self, action: Count, timeout_s: float | None = None, **kwargs: Any) -> Counted:
        await asyncio.sleep(0)
        return self.step(action)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        type(self).closed += 1


@pytest.fixture(params=[Counter, AsyncCounter], ids=["sync env", "async env"])
def counter(request: pytest.FixtureRequest) -> type[Counter]:
    return type("FreshCounter", (request.param,), {"closed": 0})


def test_outside_a_loop_it_blocks(counter: type[Counter]) -> None:
    with LocalEnv(counter) as env:
        assert env.reset(seed=5, level=2).metadata == {"level": 2}
        result = env.step(Count(by=2))
        assert (result.observation.total, result.reward, result.done) == (7, 2.0, False)
        assert env.step({"by": 3}).done
        assert env.state().step_count == 2
    assert counter.closed == 1


@pytest.mark.anyio
async def test_inside_a_loop_it_is_awaited(counter: type[Counter]) -> None:
    async with LocalEnv(counter) as env:
        await env.reset()
        results = [await env.step({"by": 1}) for _ in range(3)]
        assert [result.observation.total for result in results] == [1, 2, 3]
        assert (await env.state()).step_count == 3
    assert counter.closed == 1


@pytest.mark.anyio
async def test_the_blocking_twin_works_inside_a_running_loop(counter: type[Counter]) -> None:
    with LocalEnv(counter).sync() as env:
        env.reset()
        assert env.step(Count(by=4)).observation.total == 4
        assert env.state().step_count == 1
    assert counter.closed == 1


def test_observations_are_the_environments_own_objects() -> None:
    with LocalEnv(Counter) as env:
        assert type(env.reset().observation) is Counted
        assert isinstance(env.env, Counter)


def test_a_bad_action_is_a_validation_error_and_the_episode_goes_on() -> None:
    with LocalEnv(Counter) as env:
        env.reset()
        with pytest.raises(RequestValidationError) as caught:
            env.step({"by": "much"})
        assert caught.value.details["errors"][0]["loc"] == ["by"]
        assert env.step({"by": 1}).observation.total == 1


def test_what_the_environment_raises_is_an_execution_error_with_its_cause() -> None:
    with LocalEnv(Counter) as env:
        env.reset()
        with pytest.raises(ExecutionError, match="only upwards") as caught:
            env.step(Count(by=-1))
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert env.step(Count(by=1)).observation.total == 1


def test_a_constructor_that_fails_is_a_factory_error() -> None:
    def fail() -> Counter:
        raise OSError("no display")

    with pytest.raises(EnvironmentFactoryError) as caught, LocalEnv(fail):
        pass
    assert caught.value.reason == "OSError: no display"


def test_after_close_only_reset_opens_another_environment(counter: type[Counter]) -> None:
    env = LocalEnv(counter)
    env.reset()
    env.close()
    with pytest.raises(SessionLost):
        env.step(Count())
    with pytest.raises(SessionLost):
        env.state()
    assert env.reset().observation.total == 0
    env.close()
    assert counter.closed == 2


def test_children_have_environments_of_their_own_and_are_closed_too(counter: type[Counter]) -> None:
    with LocalEnv(counter) as env:
        env.reset()
        child = env.new_session()
        child.reset(seed=100)
        child.step({"by": 1})
        assert env.step({"by": 1}).observation.total == 1
        assert env.env is not child.env
    assert counter.closed == 2


def test_a_factory_that_does_not_name_its_class_takes_dicts_from_the_first_step() -> None:
    with LocalEnv(lambda: Counter()) as env:
        assert env.step({"by": 2}).observation.total == 2
    late = LocalEnv(lambda: Counter())
    assert late.step({"by": 2}).observation.total == 2
    late.close()


def test_the_action_class_may_be_given() -> None:
    class Double(Count):
        pass

    seen: list[Any] = []

    class Watching(Counter):
        def step(self, action: Count, timeout_s: float | None = None, **kwargs: Any) -> Counted:
            seen.append(type(action))
            return super().step(action)

    with LocalEnv(Watching, Double) as env:
        env.step({"by": 1})
    assert seen == [Double]


def test_state_before_reset_is_allowed() -> None:
    with LocalEnv(Counter) as env:
        assert env.state().step_count == 0


@pytest.mark.anyio
async def test_concurrent_steps_take_turns() -> None:
    async with LocalEnv(AsyncCounter) as env:
        await env.reset()
        results = await asyncio.gather(*(env.step({"by": 1}) for _ in range(5)))
        assert sorted(result.observation.total for result in results) == [1, 2, 3, 4, 5]


def test_an_environment_instead_of_its_class_is_refused_at_once() -> None:
    for given in (Counter(), "counter"):
        with pytest.raises(TypeError, match="must be a callable"):
            LocalEnv(given)  # type: ignore[arg-type]


def test_a_local_client_shows_what_it_runs_and_how_it_is() -> None:
    local = LocalEnv(Counter)
    assert repr(local) == "<LocalEnv of Counter, not built>"
    with local.sync() as twin:
        assert repr(twin) == "<SyncLocalEnv of <LocalEnv of Counter, ready>>"
    assert repr(local) == "<LocalEnv of Counter, closed>"


def test_a_forgotten_await_names_the_method() -> None:
    async def forget() -> None:
        LocalEnv(Counter).reset()

    with pytest.warns(RuntimeWarning, match=r"LocalEnv\.reset"):
        asyncio.run(forget())


@pytest.mark.parametrize("value", [None, ("observation", 0.0, True)])
def test_what_is_no_observation_is_an_error_in_process_too(value: object) -> None:
    class Wrong(Idle):
        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return value

    with LocalEnv(Wrong).sync() as env:
        env.reset()
        with pytest.raises(ExecutionError, match="not an Observation"):
            env.step(Action())


def test_forks_go_on_as_their_parent_does_and_share_nothing() -> None:
    with LocalEnv(Walker) as env:
        local = env.sync()
        local.reset(seed=3)
        local.step({"by": 1})
        one, other = local.fork(2)
        snapshot = local.snapshot()
        ways = [[each.step({"by": by}).observation for by in (2, 3)] for each in (one, other, local)]
        assert ways[0] == ways[1] == ways[2]
        one.step({"by": 90})
        assert [each.step({"by": 0}).observation.at for each in (one, other, local)] == [96, 6, 6]
        one.restore(snapshot)
        assert one.step({"by": 2}).observation == ways[0][0]
        other.close()
        assert local.step({"by": 1}).observation.at == 7
        snapshot.close()
        with pytest.raises(NotForkable, match="closed"):
            local.restore(snapshot)
        one.close()


def test_forks_are_awaited_too() -> None:
    async def play() -> list[Any]:
        async with LocalEnv(Bookkeeper) as env:
            await env.reset(seed=3)
            forks = await env.fork(2)
            snapshot = await env.snapshot()
            seen = [(await one.step({"by": 4})).observation for one in (env, *forks)]
            await env.restore(snapshot)
            seen.append((await env.step({"by": 4})).observation)
            for one in (*forks, snapshot):
                await one.close()
            return seen

    first, *others = asyncio.run(play())
    assert others == [first] * 3


@pytest.mark.parametrize("env_cls", [Locked, Single])
def test_what_cannot_be_forked_says_so(env_cls: type[Any]) -> None:
    with LocalEnv(env_cls) as env:
        local = env.sync()
        local.reset()
        with pytest.raises(NotForkable):
            local.fork(2)
        with pytest.raises(ValueError, match="at least 1"):
            local.fork(0)
        assert local.step({"by": 2}).observation.at == 2
