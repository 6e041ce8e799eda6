"""`@tool`: methods of an environment as its tools, what they earn, and how such a class is served."""

from __future__ import annotations

from typing import Any

import pytest

from openenv import Action, LocalEnv, MCPEnvironment, Observation, tool
from openenv.env.binding import infer_models
from openenv.errors import ToolNotFoundError
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation, ListToolsAction
from openenv.server.loading import as_app
from openenv.testing import serve


class Bank(MCPEnvironment):
    """Two accounts."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None) -> Observation:
        self.accounts = {"ann": 100, "bob": 20}
        return Observation()

    @tool
    def transfer(self, amount: int) -> dict[str, int]:
        """Move money from ann to bob."""
        if amount > self.accounts["ann"]:
            raise ValueError("not enough money")
        self.accounts["ann"] -= amount
        self.accounts["bob"] += amount
        self.earn(0.5)
        if self.accounts["ann"] == self.accounts["bob"]:
            self.earn(0.5, done=True)
        return self.accounts

    @tool
    async def peek(self) -> int:
        """Return ann's balance."""
        return self.accounts["ann"]

    @tool(mode="simulation")
    def total(self) -> int:
        """Return the sum of both balances."""
        return sum(self.accounts.values())

    def helper(self) -> int:
        return 1


class Refusing(Bank):
    def transfer(self, amount: int) -> dict[str, int]:
        raise NotImplementedError


class Talk(Action):
    words: str


class Talking(Bank):
    def _step_impl(self, action: Talk, timeout_s: float | None = None, **kwargs: Any) -> Observation:  # type: ignore[override]
        return Observation(metadata={"heard": action.words})


def call(name: str, **arguments: Any) -> CallToolAction:
    return CallToolAction(tool_name=name, arguments=arguments)


def test_marked_methods_are_the_tools_in_their_order() -> None:
    with LocalEnv(Bank) as env:
        env.reset()
        listed = env.step(ListToolsAction()).observation.tools
        assert [one.name for one in listed] == ["transfer", "peek"]
        assert listed[0].description == "Move money from ann to bob."
        assert listed[0].input_schema["properties"] == {"amount": {"type": "integer"}}


def test_a_tool_earns_the_reward_of_its_step_and_ends_the_episode() -> None:
    with LocalEnv(Bank) as env:
        env.reset()
        first = env.step(call("transfer", amount=10))
        assert (first.reward, first.done, first.observation.result.data) == (0.5, False, {"ann": 90, "bob": 30})
        assert env.step(call("peek")).reward is None
        last = env.step(call("transfer", amount=30))
        assert (last.reward, last.done) == (1.0, True)
        assert env.state().step_count == 3


def test_what_was_earned_outside_of_a_step_comes_with_the_next_one_but_never_in_another_episode() -> None:
    env = Bank()
    env.reset()
    env.earn(0.25)  # as a tool does that an agent calls over MCP
    assert env.step(call("transfer", amount=1)).reward == 0.75
    env.earn(0.25)
    env.reset()
    assert env.step(call("peek")).reward is None


def test_a_tool_that_fails_keeps_what_it_had_earned() -> None:
    env = Bank()
    env.reset()
    refused = env.step(call("transfer", amount=1000))
    assert isinstance(refused, CallToolObservation)
    assert refused.error is not None
    assert "not enough money" in refused.error.message
    assert refused.reward is None


def test_an_override_without_a_mark_is_no_tool() -> None:
    with LocalEnv(Refusing) as env:
        env.reset()
        assert [one.name for one in env.step(ListToolsAction()).observation.tools] == ["peek"]


def test_an_action_that_is_no_tool_call_names_the_tools() -> None:
    env = Bank()
    env.reset()
    with pytest.raises(ValueError, match="Talk is no action of Bank; call one of its tools: transfer"):
        env.step(Talk(words="hi"))


def test_the_models_of_a_served_class_are_those_of_tools_or_of_its_own_action() -> None:
    tools, own = infer_models(Bank), infer_models(Talking)
    assert [tools.action, tools.observation, tools.reset_observation] == [
        CallToolAction,
        CallToolObservation,
        Observation,
    ]
    assert [own.action, own.observation, own.reset_observation] == [Talk, Observation, None]


def test_a_class_is_served_without_an_application() -> None:
    from openenv import MCPToolClient

    with serve(as_app(Bank, "Bank")) as server, MCPToolClient(base_url=server.url).sync() as client:
        client.reset()
        assert {one.name for one in client.list_tools()} == {"transfer", "peek", "total"}
        assert client.call_tool("transfer", amount=5) == {"ann": 95, "bob": 25}
        with pytest.raises(ToolNotFoundError):
            client.call_tool("helper")
        assert client.step(call("transfer", amount=35)).done


@pytest.mark.parametrize("mode", ["both", ""])
def test_a_mode_that_does_not_exist_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match="Invalid mode"):
        tool(mode=mode)


def test_a_reserved_name_is_refused() -> None:
    class Closing(Bank):
        @tool
        def close(self) -> None:
            """Close."""

    with pytest.raises(ValueError, match="close"):
        Closing()
