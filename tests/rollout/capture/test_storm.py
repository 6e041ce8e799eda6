"""Thousands of streams, agents that hang up at random, and a proxy that is killed: nothing that an agent saw is lost.

Whatever an agent received is on disk, in order. A stream that came to its end is on disk whole, token for token. Ids,
log-probabilities and texts have one length in every call. What is still on the wire when the proxy is killed was seen
by no agent, and is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

import openenv
from openenv.rollout.capture import read
from waiting import wait_until_async

HERE = Path(__file__).parent
ENGINE = str(HERE.parents[1] / "support" / "fake_engine.py")
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(openenv.__file__).parents[1])}
ENVIRON.pop("OPENENV_CAPTURE_ADMIN_KEY", None)


@dataclass
class Result:
    """What one agent saw of one call."""

    call: str
    tokens: list[int] = field(default_factory=list)
    whole: bool = False


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run Python, and yield the process and the first line of its output."""
    child = subprocess.Popen([sys.executable, *arguments], env=ENVIRON, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline()
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()


@contextlib.contextmanager
def proxy(root: Path, engine_port: str, rollouts: int) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """Run a proxy, and open rollouts at it."""
    with process("-m", "openenv.rollout.capture", "--root", str(root), "--port", "0") as (child, line):
        about = json.loads(line)
        headers = {"authorization": f"Bearer {about['admin_key']}"}
        body = {"llm_url": f"http://127.0.0.1:{engine_port}/v1", "model": "m", "top_logprobs": 0}
        with httpx2.Client(base_url=about["url"], headers=headers, trust_env=False, timeout=20) as client:
            keys = [client.post("/sessions", json=body).json()["api_key"] for _ in range(rollouts)]
        yield child, int(about["url"].rpartition(":")[2]), keys


async def call(
    port: int, key: str, result: Result, *, tokens: int, hang_up_after: int | None, delay_s: float = 0.0
) -> None:
    """Make one streamed call; hang up after some tokens where the plan says so."""
    order = json.dumps({"call": result.call, "tokens": tokens, "delay_s": delay_s})
    body = json.dumps({"model": "any", "stream": True, "messages": [{"role": "user", "content": order}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        text = ""
        while data := await reader.read(65536):
            text += data.decode()
            result.tokens = [int(token) for token in re.findall(r'"content":"t(\d+) "', text)]
            if hang_up_after is not None and len(result.tokens) >= hang_up_after:
                writer.transport.abort()
                return
        result.whole = text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
    finally:
        writer.close()


@dataclass
class Plan:
    """Calls to be recorded, and what came of those that were."""

    waiting: list[tuple[Result, int, int | None]]
    results: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, calls: int, rng: random.Random) -> Plan:
        """Calls of random lengths, a quarter of which the agent ends by hanging up."""
        ends = (rng.randint(0, 20) if rng.random() < 0.25 else None for _ in range(calls))
        return cls([(Result(str(number)), rng.randint(1, 25), end) for number, end in enumerate(ends)])


async def storm(port: int, keys: list[str], plan: Plan, rng: random.Random, *, until: int = 0) -> None:
    """Make calls, many at a time, until so many are left; those that find no proxy wait for the next one."""

    async def work() -> None:
        while len(plan.waiting) > until:
            planned = plan.waiting.pop()
            result, tokens, after = planned
            try:
                one_call = call(port, rng.choice(keys), result, tokens=tokens, hang_up_after=after)
                await asyncio.wait_for(one_call, 60)
            except ConnectionRefusedError:
                plan.waiting.append(planned)
                return
            except OSError:
                pass  # the proxy was killed in the middle
            plan.results.append(result)

    await asyncio.gather(*(work() for _ in range(32)))


async def killed_storm(port: int, keys: list[str], plan: Plan, child: Any) -> None:
    """Make calls, and kill the proxy when half of them were begun."""
    half = len(plan.waiting) // 2
    running = asyncio.create_task(storm(port, keys, plan, random.Random(2)))
    await wait_until_async(lambda: len(plan.waiting) <= half or running.done(), timeout_s=500)
    child.send_signal(signal.SIGKILL)
    await running


def verify(results: list[Result], records: Path, planned: dict[str, list[int]]) -> dict[str, int]:
    """Compare what agents saw, what the engine sampled and what is on disk."""
    by_name: dict[str, Any] = {}
    torn = 0
    for folder in records.iterdir():
        recording = read(folder)
        torn += bool(recording.torn_bytes)
        for recorded in recording.calls:
            by_name[json.loads(recorded.request["messages"][-1]["content"])["call"]] = recorded
    counts = {"calls": len(results), "whole": 0, "cut": 0, "unseen": 0, "tokens": 0, "torn": torn}
    for result in results:
        recorded = by_name.get(result.call)
        if recorded is None:
            assert not result.tokens, f"call {result.call} was seen by an agent and is not on disk"
            counts["unseen"] += 1
            continue
        sampled = recorded.completion.sampled
        assert len(sampled.ids) == len(sampled.logprobs) == len(sampled.texts)
        assert None not in sampled.ids
        assert None not in sampled.logprobs
        assert not sampled.problems
        assert list(sampled.ids[: len(result.tokens)]) == result.tokens
        assert list(sampled.ids) == planned.get(result.call, [])[: len(sampled)]
        assert list(sampled.texts) == [f"t{token} " for token in sampled.ids]
        counts["tokens"] += len(sampled)
        if result.whole:
            assert list(sampled.ids) == planned[result.call]
            assert recorded.ended == "complete"
            assert recorded.completion.prompt_ids
            counts["whole"] += 1
        else:
            counts["cut"] += 1
    return counts


def run_storm(folder: Path, calls: int) -> dict[str, int]:
    """Run it all; return the counts."""
    records, log = folder / "records", folder / "engine.log"
    plan = Plan.of(calls, random.Random(1))
    with process(ENGINE, str(log)) as (_, line):
        with proxy(records, line.strip(), 20) as (child, port, keys):
            asyncio.run(killed_storm(port, keys, plan, child))
        with proxy(records, line.strip(), 20) as (_, port, keys):
            asyncio.run(storm(port, keys, plan, random.Random(3)))
            lines = [json.loads(text) for text in log.read_text().splitlines()]
    assert len(plan.results) == calls
    return verify(plan.results, records, {entry["call"]: entry["tokens"] for entry in lines})


def test_nothing_that_an_agent_saw_is_lost_when_the_proxy_is_killed(tmp_path: Path) -> None:
    counts = run_storm(tmp_path, 400)
    assert counts["whole"] > 200
    assert counts["cut"] > 20
    assert counts["unseen"] < 40


@pytest.mark.slow
def test_two_hundred_streams_at_once_are_all_captured_whole(tmp_path: Path) -> None:
    records, log = tmp_path / "records", tmp_path / "engine.log"
    results = [Result(str(number)) for number in range(200)]

    async def run(port: int, keys: list[str]) -> None:
        calls = (
            call(port, keys[number % 20], one, tokens=20, hang_up_after=None, delay_s=0.05)
            for number, one in enumerate(results)
        )
        await asyncio.wait_for(asyncio.gather(*calls), 60)

    with (
        process(ENGINE, str(log)) as (_, line),
        proxy(records, line.strip(), 20) as (_, port, keys),
    ):
        asyncio.run(run(port, keys))
        lines = [json.loads(text) for text in log.read_text().splitlines()]
    counts = verify(results, records, {entry["call"]: entry["tokens"] for entry in lines})
    assert (counts["whole"], counts["tokens"]) == (200, 4000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_that_an_agent_saw_is_lost_in_ten_thousand_streams(tmp_path: Path) -> None:
    counts = run_storm(tmp_path, 10_000)
    sys.stderr.write(f"\n{counts}\n")
    assert counts["whole"] > 6000
    assert counts["cut"] > 500
    assert counts["unseen"] < 40
