"""Collects episodes with the OpenEnv of its interpreter, and prints what came of it in the last line.

Not a test: `test_collected.py` runs it, with this package and with the published one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
    collect,
)
from openenv.core.llm_client import (
    LLMClient,
    LLMResponse,
    ToolCall,
    _clean_mcp_schema,
    _mcp_tools_to_anthropic,
    _mcp_tools_to_openai,
    _openai_msgs_to_anthropic,
)


class Session(ResourceSession):
    """A call is worth its number; 13 breaks."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.reward: float | None = None

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": str(self.task)}]

    def list_tools(self) -> list[Tool]:
        return [Tool(name="call", description="Call.", input_schema={"type": "object", "properties": {"n": {}}})]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if arguments["n"] == 13:
            raise RuntimeError("broken")
        self.reward = float(arguments["n"])
        return ToolResult(data={"n": arguments["n"]}, done=True, metadata={"reward": self.reward})

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> VerifyResult:
        assert sorted(final_state) == ["done", "events", "metrics", "tool_trace"]
        return VerifyResult(env_reward=self.reward, done=True, metrics={"m": 1}, artifacts={"a": 2})

    def close(self) -> None:
        pass


class Factory(ResourceSessionFactory):
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Session:
        return Session(task)


class Teacher(LLMClient):
    """Calls with the number in the task."""

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        return prompt

    async def complete_with_tools(self, messages: Any, tools: Any, **kwargs: Any) -> LLMResponse:
        assert [tool["inputSchema"]["type"] for tool in tools] == ["object"]
        assert kwargs == {"top_p": 0.5}
        return LLMResponse(messages[0]["content"], [ToolCall("id", "call", {"n": int(messages[1]["content"])})])


def run(folder: Path, tasks: list[Any], **how: Any) -> dict[str, Any]:
    runner = collect.CollectRunner(
        session_factory=Factory(),
        harness_adapter=MCPHarnessAdapter(),
        serializer=collect.RolloutSerializer(folder),
        tasks=tasks,
        limits=HarnessRunLimits(max_turns=2, sampling={"top_p": 0.5, "top_k": 3}),
    )
    step = collect.build_model_step(Teacher("http://127.0.0.1", 1), system_prompt="Call.")
    result = runner.run(model_step=step, **how)
    names = "num_collected num_skipped num_dropped num_failed episode_ids avg_reward success_rate"
    return {name: getattr(result, name) for name in names.split()}


def collected() -> dict[str, Any]:
    """Return what several runs in one folder say and write."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = Path(name)
        results = [
            run(folder, [1, -2, 13], num_episodes=3, should_keep=lambda record: record.reward >= 0),
            run(folder, [1, -2, 3, 4], num_episodes=4, episode_id_prefix="ep"),
            run(folder, [5], num_episodes=1, resume=False, episode_id_prefix="x"),
        ]
        collect.RolloutSerializer(folder).write_metadata({"env": "e", "n": 1})
        files = sorted(path.name if "bak" not in path.name else "results.TIME.bak.jsonl" for path in folder.iterdir())
        rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
        moved = [str(one.message).partition(" to ")[0] for one in caught if "moved" in str(one.message)]
        dropped = {str(one.message) for one in caught if "sampling" in str(one.message)}
        front_matter = collect.build_dataset_readme(folder).split("---")[1].partition("tags")[0].strip()
        metadata = json.loads((folder / collect.METADATA_FILENAME).read_text())
    return {
        "results": results,
        "files": files,
        "rows": rows,
        "warnings": [moved, sorted(dropped)],
        "metadata": metadata,
        "front_matter": front_matter,
    }


SCHEMAS: list[Any] = [
    *(None, {}, {"type": "object"}, {"type": "array"}, "text"),
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    *({"oneOf": [{"type": "string"}]}, {"oneOf": []}, {"anyOf": [{"type": "string"}]}, {"allOf": []}),
    {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"x": {}}}]},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {}}}]},
    {"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]},
]
TOOLS = [{"name": "n"}, {"name": "n", "description": "d", "inputSchema": {"type": "object"}}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "a"},
    {"role": "system", "content": "b"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "tool", "tool_call_id": "0", "content": "r"},
    {
        "role": "assistant",
        "content": "t",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "r1"},
    {"role": "tool", "tool_call_id": "2", "content": "r2"},
    {"role": "assistant"},
    {"role": "user", "content": "go"},
]


def converted() -> dict[str, Any]:
    """Return what the helpers of clients of models make of the same values."""
    return {
        "schemas": [_clean_mcp_schema(schema) for schema in SCHEMAS],
        "openai": _mcp_tools_to_openai(TOOLS),
        "anthropic": _mcp_tools_to_anthropic(TOOLS),
        "conversation": _openai_msgs_to_anthropic(CONVERSATION),
    }


if __name__ == "__main__":
    assert ModelStepResult(response=LLMResponse("")).prompt_ids == []
    sys.stdout.write("\n" + json.dumps({"collected": collected(), "converted": converted()}) + "\n")
