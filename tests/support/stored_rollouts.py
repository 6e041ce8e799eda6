"""Stores of rollouts as engines leave them: records, captured calls, work trees and events; made without a sandbox.

Calls are written by the capture proxy's own recorder, so what reads them reads real records.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv.rollout import CommandResult, Outcome, RolloutStore, Sampling, Task
from openenv.rollout.capture.export import turns
from openenv.rollout.capture.records import FILE, Recorder, read
from openenv.rollout.store.archives import write_archive

SYSTEM = {"role": "system", "content": "You are a coding agent.\nWork in the folder that you are given."}
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
PROGRAM = "def square(n):\n    return n * n\n"


def sampled(text: str, *, start: int = 100) -> tuple[list[int], list[dict[str, Any]]]:
    """Return ids and log-probability entries for a text, a token for each word; every third is unlikely."""
    words = [word + " " for word in text.split(" ")] or [""]
    entries = []
    for number, word in enumerate(words):
        chance = 0.2 if number % 3 == 2 else 0.9
        others = [{"token": word, "logprob": math.log(chance)}, {"token": "or ", "logprob": math.log((1 - chance) / 2)}]
        entries.append({"token": word, "logprob": math.log(chance), "top_logprobs": others})
    return [start + number for number in range(len(words))], entries


class Talk:
    """Writes the captured calls of one rollout, as chat completions with ids and log-probabilities."""

    def __init__(self, folder: Path, rollout_id: str, *, model: str = "tiny") -> None:
        self._recorder = Recorder(folder / FILE)
        about = {"name": model, "sampling": Sampling().parameters()}
        self._recorder.create({"rollout_id": rollout_id, "metadata": {}, "model": about, "budget": {}})
        self._ids = itertools.count(1)
        self._model = model
        self.path = folder

    def call(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: Sequence[int],
        text: str = "",
        *,
        reasoning: str = "",
        tools: Sequence[Mapping[str, Any]] = (TOOL,),
        calls: Sequence[tuple[str, Mapping[str, Any]]] = (),
        is_ended: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], list[int]]:
        """Record a call; return the assistant's message and all ids after it."""
        body: dict[str, Any] = {"model": self._model, "messages": list(messages), "logprobs": True}
        body.update(Sampling().parameters())
        if tools:
            body["tools"] = list(tools)
        about = {"dialect": "openai_chat", "to": "openai_chat", "path": "/v1/chat/completions", "stream": False}
        call = self._recorder.begin({**about, "not_trainable": [], **(facts or {})}, body, body)
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"c{next(self._ids)}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for name, arguments in calls
            ]
        said = " ".join(filter(None, [reasoning, text, *(json.dumps(arguments) for _, arguments in calls)]))
        ids, entries = sampled(said, start=1000 * call.number)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
            "logprobs": {"content": entries},
            "token_ids": ids,
        }
        call.head(200, {})
        call.prompt(list(prompt))
        response = {"id": "r", "object": "chat.completion", "model": self._model, "choices": [choice]}
        call.body(
            json.dumps({**response, "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}).encode()
        )
        if is_ended:
            call.end("complete", {"attempts": 1, "tokens": len(ids)})
        return message, [*prompt, *ids]


def write_square(folder: Path, rollout_id: str, *, model: str = "tiny", note: str = "Done.") -> Path:
    """Record an agent that thinks, writes a file, looks at a picture, is asked again, and ends; and one for a title."""
    talk = Talk(folder, rollout_id, model=model)
    talk.call([{"role": "user", "content": "A title, please."}], [7, 7], "Squares in Python", tools=())
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Write square.py."}]
    prompt = [1, 2, 3, 4]
    first, ids = talk.call(
        messages,
        prompt,
        "I will write it.",
        reasoning="The user wants a square.",
        calls=[("write", {"path": "square.py", "content": PROGRAM})],
    )
    answer = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "written\n" * 30}
    picture = {
        "role": "user",
        "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
    }
    later, after = [*messages, first, answer, picture], [*ids, 5, 6]
    talk.call(later, after, "Not this one.")
    last, ids = talk.call(later, after, note)
    talk.call([*later, last, {"role": "user", "content": "And?"}], [*ids, 8], "That is all.")
    return talk.path


def rollout_outcome(rollout_id: str, **fields: Any) -> Outcome:
    """Return the outcome of a rollout that passed two checks of three."""
    checks = [
        CommandResult(cmd="test -e square.py", exit_code=0, duration_s=0.02, trust="isolated"),
        CommandResult(
            cmd="python3 -m pytest -q",
            exit_code=1,
            stdout="1 failed\n",
            stderr="\x1b[31mAssertionError\x1b[0m\n",
            duration_s=1.5,
            note="not passed: no test passed",
            trust="shared",
        ),
        CommandResult(
            cmd="grep -qx 9 out",
            exit_code=0,
            run=CommandResult(cmd="python3 square.py 3", exit_code=0, stdout="9\n"),
            trust="judged",
        ),
    ]
    known: dict[str, Any] = {
        "rollout_id": rollout_id,
        "task_id": "square",
        "status": "ok",
        "reward": 2 / 3,
        "trust": "shared",
        "agent": "opencode",
        "model": "tiny",
        "sandbox": "local",
        "setup_results": [CommandResult(cmd="echo ready", exit_code=0, stdout="ready\n")],
        "verify_results": checks,
        "started_at": 1_790_000_000.0,
        "wall_s": 12.5,
        "phase_s": {"sandbox": 0.5, "setup": 1.0, "agent": 9.0, "collect": 0.5, "verify": 1.5},
    }
    return Outcome.model_validate({**known, **fields})


SQUARE = Task(
    instruction="Write square.py. Its function square(n) returns the square of n.",
    files={"README.md": "# Squares\nold\n"},
    setup=("echo ready",),
    verify=("test -e square.py", "python3 -m pytest -q"),
    verify_files={"tests/test_square.py": "from square import square\n"},
    task_id="square",
)


def add_square(store: RolloutStore, rollout_id: str, *, folder: Path, note: str = "Done.", **fields: Any) -> Outcome:
    """Store a whole rollout: transcript, files before and after, log, verdict."""
    store.begin(rollout_id, SQUARE, about={"agent": "opencode", "model": "tiny"})
    write_square(store.captures / rollout_id, rollout_id, note=note)
    files = {"README.md": b"# Squares\nnew\nmore\n", "square.py": PROGRAM.encode(), "data.bin": b"\0\1\2"}
    baseline = {"workdir/README.md": b"# Squares\nold\n", "workdir/gone.txt": b"x\n", ".profile": b"y"}
    write_archive(folder / f"{rollout_id}.work.tar", files, mode=0o644)
    write_archive(folder / f"{rollout_id}.base.tar", baseline, mode=0o644)
    log = store.live_file(rollout_id, "agent.log")
    log.write_text("I begin\n\x1b[32mI end\x1b[0m\n")
    outcome = rollout_outcome(
        rollout_id, turns=turns(read(store.captures / rollout_id)), **{"metadata": {"group": "g1"}, **fields}
    )
    store.add(
        outcome,
        SQUARE,
        worktree=folder / f"{rollout_id}.work.tar",
        baseline=folder / f"{rollout_id}.base.tar",
        agent_log=log,
    )
    return outcome


def fill_store(root: Path, count: int, *, tasks: int = 200) -> None:
    """Write a shard of many small records; the store's index is made when it is first read."""
    statuses = ("ok", "ok", "ok", "policy_failed", "truncated", "env_failed")
    shards = root / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    for folder in ("rollouts", "captures"):
        (root / folder).mkdir(exist_ok=True)
    with (shards / f"made-{count}.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            status = statuses[number % len(statuses)]
            reward = None if status == "env_failed" else round((number * 7919 % 101) / 100, 2)
            outcome = {
                "rollout_id": f"{number:016x}",
                "task_id": f"task-{number % tasks:03}",
                "status": status,
                "reward": 1.0 if reward is not None and reward > 0.6 else reward,
                "trust": ("shared", "isolated", "judged")[number % 3],
                "agent": ("opencode", "codex")[number % 2],
                "model": f"model-{number % 5}",
                "sandbox": "local",
                "turns": [{"turn": 1, "completion_tokens": ["a"] * (number % 7)}],
                "started_at": 1_790_000_000.0 + number,
                "wall_s": number % 300,
                "metadata": {"group": f"g{number // 8}"},
            }
            record = {
                "format": 1,
                "record_id": f"r{number:015x}",
                "rollout_id": outcome["rollout_id"],
                "kind": "rollout",
                "verdict": "first",
                "stored_at": 1_790_000_000.0 + number,
                "outcome": outcome,
                "task": {"instruction": "x", "task_id": outcome["task_id"]},
            }
            file.write(json.dumps(record) + "\n")
