"""The same agents on both capture servers, in front of one endpoint: what they see, and what trainers get."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from program_interpreters import Interpreter

pytestmark = [pytest.mark.slow, pytest.mark.published, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parent
ADMIN = {"authorization": "Bearer the-admin-key"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION = {"name": "f", "description": "do", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
AGENTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "openai_chat": (
        "/v1/chat/completions",
        [
            {"model": "x", "messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS, "temperature": 0.5},
            {"model": "x", "messages": [{"role": "user", "content": "title"}], "max_tokens": 7},
        ],
    ),
    "anthropic": (
        "/v1/messages",
        [
            {
                "model": "x",
                "max_tokens": 50,
                "system": "be",
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"name": "f", "description": "do", "input_schema": SCHEMA}],
            }
        ],
    ),
    "openai_responses": (
        "/v1/responses",
        [{"model": "x", "instructions": "be", "input": "hi", "tools": [{"type": "function", **FUNCTION}]}],
    ),
    "google": (
        "/v1beta/models/x:generateContent",
        [{"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "tools": [{"functionDeclarations": [FUNCTION]}]}],
    ),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running capture server."""

    def __init__(self, interpreter: Any, llm_url: str) -> None:
        port = free_port()
        command = [interpreter.python, str(FOLDER / "serve_sessions.py"), llm_url, str(port)]
        environment = interpreter.environment(FOLDER)
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False)

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def servers(ours: Interpreter, published: Interpreter, engine: Any) -> Iterator[list[Server]]:
    running: list[Server] = []
    try:
        for interpreter in (ours, published):
            running.append(Server(interpreter, engine.url))
        yield running
    finally:
        for server in running:
            server.stop()


def seen(name: str, answer: Any) -> Any:
    """What an agent reads of an answer."""
    if name == "openai_chat":
        choice = answer["choices"][0]
        return [choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]]
    if name == "anthropic":
        return [answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"], answer["model"]]
    if name == "openai_responses":
        return [
            [item["content"][0]["text"] for item in answer["output"]],
            answer["status"],
            answer["usage"]["total_tokens"],
        ]
    candidate = answer["candidates"][0]
    return [candidate["content"], candidate["finishReason"], answer["usageMetadata"]]


def play(server: Server, purpose: str) -> dict[str, Any]:
    """Make a session, have an agent of each dialect call in it, and read all that trainers can."""
    client = server.client
    body = {"session_id": f"s-{purpose}", "purpose": purpose, "metadata": {"task": "t"}, "max_model_calls": 6}
    made = client.post("/sessions", json=body, headers=ADMIN).json()
    key = {"authorization": f"Bearer {made['session_id']}"}
    several = client.post("/v1/chat/completions", json={"messages": [], "n": 2}, headers=key).status_code
    answers = {}
    for name, (path, requests) in AGENTS.items():
        answers[name] = [seen(name, client.post(path, json=request, headers=key).json()) for request in requests]
    stop = [
        client.post(AGENTS["openai_chat"][0], json=AGENTS["openai_chat"][1][0], headers=key).json() for _ in range(2)
    ]
    document = client.get(f"/sessions/{made['session_id']}/rollout?include_messages=true", headers=ADMIN).json()
    entries = client.get(f"/sessions/{made['session_id']}/trace_entries", headers=ADMIN)
    status = client.get(f"/sessions/{made['session_id']}", headers=ADMIN).json()
    return {
        "made": {**made, "llm_url": ""},
        "answers": answers,
        "stop": stop[-1]["choices"][0]["message"]["content"],
        "status": {key: value for key, value in status.items() if key.startswith("n_")},
        "stats": document["stats"],
        "turns": [
            [turn["n_sampled"], turn["n_prompt"], turn["n_tools"], turn["finish_reason"], turn["discarded"]]
            for turn in document["turns"]
        ],
        "messages": [[message["role"] for message in turn["request_messages"]] for turn in document["turns"]],
        "sequences": [
            [row["role"], row["input_ids"], row["loss_mask"], row["logprobs"], row["trainable"], row["turn_lengths"]]
            for row in document["sequences"]
        ],
        "kind": [
            document["rollout_type"],
            document["trainable"],
            document["capture_level"],
            document["budget_stop_count"],
        ],
        "entries": [
            [entry["prompt_token_ids"], entry["completion_token_ids"], entry["per_token_logps"], entry["loss_mask"]]
            for entry in entries.json().get("entries", [])
        ],
        "entries status": entries.status_code,
        "refused": [
            client.post("/v1/chat/completions", json={}, headers={"authorization": "Bearer unknown"}).status_code,
            client.get("/sessions").status_code,
            client.get("/sessions/none", headers=ADMIN).status_code,
            several,
        ],
        "counts": client.post("/v1/messages/count_tokens", json={"messages": []}, headers=key).json(),
    }


@pytest.mark.parametrize("purpose", ["auto", "train", "eval"])
def test_agents_and_trainers_get_the_same(servers: list[Server], purpose: str) -> None:
    mine, theirs = (play(server, purpose) for server in servers)
    for key, value in theirs.items():
        assert mine[key] == value, key
