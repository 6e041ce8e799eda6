"""Adapters of command line programs, with real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fastmcp import FastMCP

from openenv.adapters.turns import CommandAdapter, HarnessAction, HarnessConfig, HarnessEnvironment
from openenv.errors import HarnessError, HarnessNotRunningError, HarnessStartupError
from turn_environments import talking_adapter

pytestmark = pytest.mark.anyio


def command(code: str, *arguments: str, folder: Path, **fields: Any) -> HarnessConfig:
    line = [sys.executable, "-S", "-c", code, *arguments]
    return HarnessConfig(**{"name": "cli", "command": line, "working_directory": str(folder), **fields})


async def turns(adapter: CommandAdapter, *messages: str) -> list[Any]:
    env = HarnessEnvironment(adapter)
    await env.reset_async()
    observations = [await env.step_async(HarnessAction(message=message)) for message in messages]
    await env.end_episode()
    return observations


async def test_a_program_is_run_once_for_each_turn(tmp_path: Path) -> None:
    code = "import sys; print(*sys.argv[1:]); print('in', repr(sys.stdin.read()))"
    config = command(code, "--say", "{message}", folder=tmp_path)
    first, second = await turns(CommandAdapter(config, continue_arguments=["--continue"]), "a b", "$(c)")
    assert first.metadata["response"] == "--say a b\nin ''"
    assert second.metadata["response"] == "--say $(c) --continue\nin ''"
    assert [event["type"] for event in first.metadata["turn_events"]] == ["text_output"] * 2 + ["turn_complete"]


async def test_without_a_place_in_the_command_the_message_is_read_from_the_input(tmp_path: Path) -> None:
    code = "import sys; print(sys.stdin.read().upper(), end='')"
    [turn] = await turns(CommandAdapter(command(code, folder=tmp_path)), "two\nlines")
    assert turn.metadata["response"] == "TWO\nLINES"


async def test_a_program_need_not_read_its_input(tmp_path: Path) -> None:
    [turn] = await turns(CommandAdapter(command("print('deaf')", folder=tmp_path)), "x" * 1_000_000)
    assert turn.metadata["response"] == "deaf"


async def test_an_agent_that_never_reads_is_ended_all_the_same(tmp_path: Path) -> None:
    config = command("import signal; signal.pause()", folder=tmp_path, session_timeout_s=0.5)
    [turn] = await turns(CommandAdapter(config), "x" * 1_000_000)
    assert turn.metadata["error_type"] == "turn_timeout"


async def test_an_exit_code_is_a_failure_of_the_turn(tmp_path: Path) -> None:
    code = "import sys; print('half'); sys.exit('no model')"
    [turn] = await turns(CommandAdapter(command(code, folder=tmp_path)), "x")
    assert turn.reward is None
    assert turn.metadata["error"] == "the agent ended with exit code 1: no model"
    assert turn.metadata["turn_events"][0]["data"] == {"text": "half"}


async def test_a_program_that_does_not_exist_is_a_failure_of_the_turn(tmp_path: Path) -> None:
    config = HarnessConfig(name="cli", command=["/no/such/agent"], working_directory=str(tmp_path))
    [turn] = await turns(CommandAdapter(config), "x")
    assert "/no/such/agent" in turn.metadata["error"]


async def test_a_message_before_the_start_is_refused(tmp_path: Path) -> None:
    for adapter in (CommandAdapter(command("", folder=tmp_path)), talking_adapter()):
        assert not await adapter.is_alive()
        with pytest.raises(HarnessNotRunningError):
            await adapter.send_message("x")


async def test_the_agent_finds_its_tools_in_a_variable_and_in_a_file(tmp_path: Path) -> None:
    server: FastMCP[Any] = FastMCP("tools")
    server.tool(lambda: "pong", name="ping")
    code = "import os; print(os.environ['OPENENV_MCP_URL']); print(open('conf/mcp.json').read())"
    config = command(code, folder=tmp_path, mcp_config_path="conf/mcp.json")
    env = HarnessEnvironment(CommandAdapter(config), mcp=server)
    await env.reset_async()
    response = (await env.step_async(HarnessAction(message="x"))).metadata["response"]
    await env.end_episode()
    url, _, text = response.partition("\n")
    assert json.loads(text) == {"mcpServers": {"environment": {"type": "http", "url": url}}}


async def test_the_key_of_the_model_reaches_the_agent_or_the_start_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print(os.environ.get('OPENENV_MODEL_KEY'))"
    config = command(code, folder=tmp_path, api_key_env_var="OPENENV_MODEL_KEY")
    with pytest.raises(HarnessStartupError, match="OPENENV_MODEL_KEY is not set"):
        await CommandAdapter(config).start(str(tmp_path))
    monkeypatch.setenv("OPENENV_MODEL_KEY", "the-key")
    [turn] = await turns(CommandAdapter(config), "x")
    assert turn.metadata["response"] == "the-key"


async def test_lines_that_are_no_events_are_text() -> None:
    adapter = talking_adapter()
    await adapter.start(adapter.config.working_directory)
    try:
        process = adapter._process
        assert process is not None
        turn = await adapter.send_message("echo {not json")
        assert turn.response == "{not json"
        with pytest.raises(HarnessError):
            await adapter.send_message("quit 1")
    finally:
        await adapter.stop()
