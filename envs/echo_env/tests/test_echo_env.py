"""The Echo environment: in this process, and served from its folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from fastmcp import Client

from echo_env import EchoAction, EchoEnv, EchoObservation
from echo_env.models import EchoStepAction
from echo_env.server.app import app
from echo_env.server.echo_environment import EchoEnvironment
from openenv import LocalEnv
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.types import Action
from openenv.errors import RequestValidationError
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]

TOOLS = ["echo_message", "echo_with_length"]


def echo(env: Any, message: Any, tool: str = "echo_message") -> Any:
    return env.step(CallToolAction(tool_name=tool, arguments={"message": message})).observation


def test_the_tools_are_listed() -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        assert env.reset().metadata == {"status": "ready", "message": "Echo environment ready!"}
        tools = env.step(ListToolsAction()).observation.tools
        assert [tool.name for tool in tools] == TOOLS
        assert all(tool.description and tool.input_schema["required"] == ["message"] for tool in tools)


@pytest.mark.parametrize("message", ["", "héllo", "x" * 100_000])
def test_a_message_comes_back(message: str) -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        env.reset()
        assert echo(env, message).result.data == message
        assert echo(env, message, "echo_with_length").result.data == {"message": message, "length": len(message)}


def test_what_is_no_message_or_no_tool_is_an_error_of_its_call() -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        env.reset()
        assert echo(env, ["no", "text"]).error.error_type == "invalid_args"
        assert echo(env, "x", "shout").error.error_type == "tool_not_found"
        assert echo(env, "still there").result.data == "still there"


def test_a_plain_message_comes_back_and_earns_by_its_length() -> None:
    with LocalEnv(EchoEnvironment, EchoStepAction).sync() as env:
        assert env.reset().observation.echoed_message == "Echo environment ready!"
        for action in ({"message": "héllo"}, EchoAction(message="héllo")):
            result = env.step(action)
            assert (result.observation.echoed_message, result.observation.message_length) == ("héllo", 5)
            assert result.reward == pytest.approx(0.5)
        assert env.step({"message": "x" * 20_000}).reward == 1000
        assert env.step({"type": "list_tools"}).observation.tools
        assert env.step({"tool_name": "echo_message", "arguments": {"message": "a"}}).observation.result.data == "a"
        with pytest.raises(RequestValidationError):
            env.step({"message": 7})
        assert env.state().step_count == 5


def test_the_client_steps_with_messages_and_tools_of_one_episode(serve_env: Callable[..., Served]) -> None:
    with EchoEnv(base_url=serve_env(app).url).sync() as env:
        assert isinstance(env.reset().observation, EchoObservation)
        result = env.step(EchoAction(message="hello"))
        assert isinstance(result.observation, EchoObservation)
        assert (result.observation.echoed_message, result.reward, result.done) == ("hello", 0.5, False)
        assert env.call_tool("echo_message", message="hi") == "hi"
        called = env.step(CallToolAction(tool_name="echo_message", arguments={"message": "a"})).observation
        assert called.result["data"] == "a"
        assert env.state().step_count == 2  # the call of a tool beside the steps is none


def test_other_actions_get_the_list_of_tools_as_an_error() -> None:
    env = EchoEnvironment()
    assert "tools" in env.step(Action()).metadata["error"]
    env.close()


def test_a_reset_begins_a_new_episode() -> None:
    with LocalEnv(EchoEnvironment).sync() as env:
        env.reset(episode_id="first")
        echo(env, "a")
        assert (env.state().episode_id, env.state().step_count) == ("first", 1)
        env.reset()
        assert env.state().episode_id not in (None, "first")
        assert env.state().step_count == 0


@pytest.mark.slow
def test_the_client_calls_tools_of_the_environment_served_from_its_folder(serve_folder: Callable[[str], str]) -> None:
    url = serve_folder("echo_env")
    with EchoEnv(base_url=url).sync() as env, env.new_session() as other:
        env.reset(episode_id="mine")
        other.reset(episode_id="other")
        assert [tool.name for tool in env.list_tools()] == TOOLS
        assert env.call_tool("echo_message", message="hello") == "hello"
        assert env.call_tool("echo_with_length", message="hello") == {"message": "hello", "length": 5}
        with pytest.raises(RuntimeError, match=r"(?i)not found"):
            env.call_tool("shout", message="hello")
        result = env.step(CallToolAction(tool_name="echo_message", arguments={"message": "as a step"}))
        assert result.observation.result["data"] == "as a step"
        assert not result.done
        assert (env.state().episode_id, other.state().episode_id) == ("mine", "other")
        assert other.state().step_count == 0


@pytest.mark.slow
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        call = {"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "hi"}}
        return chance.choice([{"message": "hello"}, call])

    returns = try_package("echo_env", choose, most_steps=5)
    assert len(returns) == 100
    assert 0.0 <= min(returns) < max(returns) <= 2.5


def test_an_mcp_client_calls_the_same_tools(serve_env: Callable[..., Served]) -> None:
    url = serve_env(app).url

    async def use() -> tuple[list[str], Any]:
        async with Client(url + "/mcp") as client:
            tools = [tool.name for tool in await client.list_tools()]
            return tools, (await client.call_tool("echo_message", {"message": "hello"})).data

    assert asyncio.run(use()) == (TOOLS, "hello")
