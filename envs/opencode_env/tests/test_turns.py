"""OpenCode turn by turn: what it prints as events, and the real program with a scripted model and tools over MCP."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastmcp import FastMCP

from opencode_env.config import OpenCodeConfig
from opencode_env.turns import OpenCodeAdapter
from openenv.adapters.turns import HarnessAction, HarnessEnvironment
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn

PRINTS = """\
import json, os, sys
config = json.load(open(os.environ["OPENCODE_CONFIG"]))
for printed in (
    {"type": "step_start", "timestamp": 1500, "sessionID": "ses_1", "part": {}},
    {"type": "text", "sessionID": "ses_1", "part": {"text": " ".join(sys.argv[1:])}},
    {"type": "text", "sessionID": "ses_1", "part": {"text": sys.stdin.read().strip()}},
    {"type": "tool_use", "sessionID": "ses_1", "part": {
        "tool": "bash", "callID": "c1", "state": {"status": "error", "input": {"command": "x"}, "error": "no"}}},
    {"type": "step_finish", "sessionID": "ses_1", "part": {"reason": "stop", "cost": 0}},
    {"type": "new_kind", "sessionID": "ses_1"},
):
    print(json.dumps(printed))
print("not json", config["model"])
"""


def program(folder: Path, code: str) -> str:
    """Write a program that stands for OpenCode."""
    path = folder / "opencode"
    path.write_text(f"#!{sys.executable} -S\n{code}")
    path.chmod(0o755)
    return str(path)


def talking(adapter: OpenCodeAdapter, mcp: Any = None) -> HarnessEnvironment:
    env = HarnessEnvironment(adapter, mcp=mcp)
    env.reset()
    return env


def test_what_opencode_prints_becomes_events(tmp_path: Path) -> None:
    config = OpenCodeConfig(base_url="http://127.0.0.1:9/v1")
    adapter = OpenCodeAdapter(config, working_directory=str(tmp_path), executable=program(tmp_path, PRINTS))
    env = talking(adapter)
    try:
        home = adapter._home
        first = env.step(HarnessAction(message="hello"))
        assert first.metadata["response"] == "run --format json\nhello"
        events = first.metadata["turn_events"]
        kinds = ["llm_request", "text_output", "text_output", "tool_call", "tool_result", "llm_response"]
        assert [event["type"] for event in events] == [*kinds, "turn_complete"]
        assert events[0]["timestamp"] == 1.5
        assert events[3]["data"] == {"name": "bash", "call_id": "c1", "arguments": {"command": "x"}}
        assert events[4]["data"] == {"name": "bash", "call_id": "c1", "output": "no", "is_error": True}
        second = env.step(HarnessAction(message="again"))
        assert second.metadata["response"] == "run --format json --session ses_1\nagain"
    finally:
        env.close()
    assert home is not None
    assert not home.exists()


def test_an_error_that_opencode_reports_fails_the_turn(tmp_path: Path) -> None:
    code = 'print(\'{"type": "error", "error": {"name": "APIError", "data": {"message": "no such model"}}}\')'
    config = OpenCodeConfig(base_url="http://127.0.0.1:9/v1")
    adapter = OpenCodeAdapter(config, working_directory=str(tmp_path), executable=program(tmp_path, code))
    env = talking(adapter)
    turn = env.step(HarnessAction(message="hello"))
    env.close()
    assert turn.reward is None
    assert "no such model" in turn.metadata["error"]


@pytest.mark.slow
def test_the_real_opencode_takes_turns_with_tools(
    opencode: Path, play: Callable[..., ScriptedModel], tmp_path: Path
) -> None:
    shelf: list[str] = []
    server: FastMCP[Any] = FastMCP("shop")

    @server.tool
    def put(item: str) -> int:
        """Put an item on the shelf."""
        shelf.append(item)
        return len(shelf)

    script = Script(
        name="shop",
        turns=(
            Turn(text="I put it.", calls=(ScriptedCall(name="environment_put", arguments={"item": "pear"}),)),
            Turn(text="Now there is ${result}."),
            Turn(text="It is a pear."),
        ),
    )
    model = play(script)
    config = OpenCodeConfig(base_url=model.url, api_key="a-key", model=model.name, agent_timeout_s=120)
    env = talking(OpenCodeAdapter(config, working_directory=str(tmp_path), executable=str(opencode)), server)
    try:
        first = env.step(HarnessAction(message="Put a pear on the shelf"))
        assert shelf == ["pear"], json.dumps(first.metadata, indent=1)
        assert first.metadata["response"] == "I put it.\nNow there is 1."
        called = [event["data"] for event in first.metadata["turn_events"] if event["type"] == "tool_result"]
        assert [(call["name"], call["output"]) for call in called] == [("environment_put", "1")]
        second = env.step(HarnessAction(message="What is on the shelf?"))
        assert second.metadata["response"] == "It is a pear."  # the third answer: the conversation went on
        assert second.metadata["turn_number"] == 2
    finally:
        env.close()
