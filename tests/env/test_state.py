"""The state of an environment: its own in three forms, or one that counts steps by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from openenv import Action, Environment, LocalEnv, MCPEnvironment, Observation, State
from openenv.env.binding import bind, infer_models
from openenv.protocol.tool_messages import CallToolAction, ListToolsAction


class Noted(State):
    note: str = ""


class Plain(Environment[Action, Observation, Noted]):
    def reset(self, seed: int = 0) -> Observation:
        self.state.note = f"seed {seed}"
        return Observation()

    def step(self, action: Action) -> Observation:
        return Observation(reward=float(self.state.step_count))


class Assigned(Environment[Action, Observation, State]):
    state: State

    def __init__(self) -> None:
        self.state = State(episode_id="mine")

    def reset(self, **kwargs: Any) -> Observation:
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        self.state.step_count += 1
        return Observation()


class Attribute(Environment[Action, Observation, State]):
    state = Noted(note="at first")

    def reset(self, **kwargs: Any) -> Observation:
        return Observation()

    def step(self, action: Action, **kwargs: Any) -> Observation:
        self.state.step_count += 1
        return Observation()


class Awaited(Environment[Action, Observation, State]):
    async def reset(self) -> Observation:  # type: ignore[override]
        return Observation()

    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        return Observation()


class ToolBox(MCPEnvironment):
    def __init__(self) -> None:
        fastmcp = pytest.importorskip("fastmcp")
        server = fastmcp.FastMCP("box")
        server.tool(lambda: 1, name="one")
        super().__init__(server)

    def reset(self, **kwargs: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **kwargs: Any) -> Observation:
        return Observation()


def played(env_cls: type[Any], action: Any = None) -> Any:
    with LocalEnv(env_cls).sync() as env:
        env.reset(episode_id="a")
        for _ in range(2):
            env.step(action or Action())
        return env.state()


@pytest.mark.parametrize("env_cls", [Plain, Awaited])
def test_an_environment_without_a_state_has_one_that_counts(env_cls: type[Any]) -> None:
    state = played(env_cls)
    assert (state.episode_id, state.step_count) == ("a", 2)


def test_it_has_the_declared_model_and_keeps_what_is_put_there() -> None:
    env = Plain()
    assert (type(env.state), env.state.episode_id, env.state.step_count) == (Noted, None, 0)
    env.reset(seed=3)
    first = env.state.episode_id
    assert first
    assert [env.step(Action()).reward, env.step(Action()).reward] == [1.0, 2.0]
    assert env.state.note == "seed 3"
    env.reset(episode_id="named")  # type: ignore[call-arg]  # the wrapper takes it
    assert (env.state.episode_id, env.state.step_count, env.state.note) == ("named", 0, "seed 0")


def test_tools_are_counted_as_steps_and_stay_quick() -> None:
    assert played(ToolBox, CallToolAction(tool_name="one")).step_count == 2
    assert played(ToolBox, ListToolsAction()).step_count == 2
    assert bind(ToolBox).step_is_twofold
    assert "counts" not in vars(vars(MCPEnvironment)["step"])


def test_a_step_that_calls_another_counts_once() -> None:
    class Louder(Plain):
        def step(self, action: Action) -> Observation:
            return super().step(action)

        async def step_async(self, action: Action, *args: Any, **kwargs: Any) -> Observation:
            return self.step(action)

    assert played(Louder).step_count == 2


def test_a_mixin_that_is_no_environment_counts_too() -> None:
    class Steps:
        def step(self, action: Action) -> Observation:
            return Observation()

    class Mixed(Steps, Environment[Action, Observation, State]):  # type: ignore[misc]
        def reset(self, **kwargs: Any) -> Observation:
            return Observation()

    assert played(Mixed).step_count == 2


def test_a_step_that_raises_does_not_stop_the_count() -> None:
    class Fragile(Plain):
        def step(self, action: Action) -> Observation:
            raise ValueError

    env = Fragile()
    env.reset()
    for _ in range(2):
        with pytest.raises(ValueError):
            env.step(Action())
    assert env.state.step_count == 2


def test_a_state_that_is_assigned_is_the_environments_own() -> None:
    assert (played(Assigned).episode_id, played(Assigned).step_count) == ("mine", 2)


def test_a_state_of_the_class_is_copied_for_each_instance() -> None:
    one, two = Attribute(), Attribute()
    one.step(Action())
    assert (one.state.step_count, two.state.step_count, Attribute.state.step_count) == (1, 0, 0)
    assert infer_models(Attribute).state is Noted
    assert played(Attribute).note == "at first"


def test_classes_with_a_property_are_left_as_they_are() -> None:
    def step(self: Any, action: Action) -> Observation:
        return Observation()

    own = type("Own", (Plain,), {"state": property(lambda self: State(step_count=9)), "step": step})
    assert own.step is step
    assert played(own).step_count == 9


def test_copies_count_by_themselves() -> None:
    env = Plain()
    env.reset()
    env.step(Action())
    other = copy.deepcopy(env)
    other.step(Action())
    assert (env.state.step_count, other.state.step_count) == (1, 2)


def test_a_model_that_needs_values_says_what_to_do() -> None:
    class Needy(State):
        word: str

    class Speaking(Environment[Action, Observation, Needy]):
        def reset(self, **kwargs: Any) -> Observation:
            self.state = Needy(word="a")  # type: ignore[misc]
            return Observation()

        def step(self, action: Action, **kwargs: Any) -> Observation:
            return Observation()

    class Mute(Environment[Action, Observation, Needy]):
        def reset(self, **kwargs: Any) -> Observation:
            return Observation()

        def step(self, action: Action, **kwargs: Any) -> Observation:
            return Observation()

    assert played(Speaking).word == "a"
    env = Mute()
    env.reset()
    with pytest.raises(TypeError, match=r"self\.state = Needy"):
        _ = env.state
