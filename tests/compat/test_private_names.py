"""Private names and texts that public code relies on: the same program gets the same answers from both packages."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

PROGRAM = """
import asyncio, json, sys, tempfile
from pathlib import Path
from openenv.core import GenericEnvClient
from openenv.core.harness import ResourceSession, SessionMCPBridge, ToolResult, VerifyResult
from openenv.core.harness.collect import RolloutSerializer, build_dataset_readme
from openenv.core.env_server.mcp_types import Tool

facts = {}

async def client():
    env = GenericEnvClient(base_url=sys.argv[1], connect_timeout_s=7.0)
    facts["before"] = [env._ws is None, env._connect_timeout]
    env._connect_timeout = 60.0
    await env.connect()
    facts["connected"] = env._ws is not None
    reset = await env._send_and_receive({"type": "reset", "data": {"seed": 1, "episode_id": "mine"}})
    state = await env._send_and_receive({"type": "state"})
    facts["messages"] = [reset["type"], sorted(reset["data"]), state["type"], state["data"]["episode_id"]]
    await env.close()
    facts["after"] = env._ws is None

asyncio.run(client())
doc = GenericEnvClient.__init__.__doc__.lower()
facts["doc"] = [word in doc for word in ("mode", "simulation", "production")]

class Session(ResourceSession):
    def initial_messages(self): return []
    def list_tools(self): return [Tool(name="add", description="Add.", input_schema={"type": "object"})]
    def call_tool(self, name, arguments):
        if name == "add": return ToolResult(data=3, done=True)
        raise {"gone": KeyError("Unknown tool: gone"), "bad": ValueError("bad a")}.get(name, RuntimeError("broke"))
    def verify(self, transcript, final_state=None): return VerifyResult(env_reward=1.0)
    def close(self): pass

bridge = SessionMCPBridge(Session())
facts["session"] = type(bridge.session).__name__
requests = [{"method": "tools/list"}, {"method": "nothing"}, {"method": "tools/call", "params": {}}]
requests += [{"method": "tools/call", "params": {"name": name}} for name in ("add", "reset", "gone", "bad", "worse")]
answers = [bridge.handle_request({"jsonrpc": "2.0", "id": 1, **each}) for each in requests]
answers.append(bridge.handle_request({"id": 1, "method": "tools/list"}))
facts["bridge"] = [
    [a["error"]["code"], a["error"]["message"]] if a.get("error") else sorted(a["result"]) for a in answers
]

folder = Path(tempfile.mkdtemp())
(folder / "results.jsonl").write_text(json.dumps({"episode_id": "e", "messages": [], "reward": 1.0}) + "\\n")
RolloutSerializer(folder).write_metadata({"model": "m"})
card = build_dataset_readme(folder)
facts["card"] = [text in card for text in ("OpenEnv rollouts", "Episodes:** 1", "Schema", "`model`", "split: train")]
print(json.dumps(facts))
"""


def facts(interpreter: Interpreter, url: str, folder: Path) -> dict[str, Any]:
    command = [interpreter.python, "-c", PROGRAM, url]
    done = subprocess.run(
        command, env=interpreter.environment(folder), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (interpreter.name, done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_private_names_and_texts_are_those_of_the_published_package(
    ours: Interpreter, published: Interpreter, server: Callable[..., Any], tmp_path: Path
) -> None:
    url = server(ours, MAX_CONCURRENT_ENVS="64").url
    expected = facts(published, url, tmp_path)
    assert expected["doc"] == [True, True, True]
    assert expected["card"] == [True] * 5
    assert expected["before"] == [True, 7.0]
    assert facts(ours, url, tmp_path) == expected
