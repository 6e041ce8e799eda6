"""What the capture proxy costs: the delay of every chunk of a stream, through the proxy and straight from the engine.

    python benchmarks/capture.py [--quick] [--out FILE.md]

Engine, proxy and agents are processes of their own, on loopback. Each chunk carries the time at which the engine wrote
it, in vLLM's shape with ids and five log-probabilities; the agents take the time at which they have it. Both ways run
in turns within one run, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import httpx2
import uvloop

import openenv
from openenv.rollout.capture import read

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(openenv.__file__).parents[1])}
STAMP = re.compile(rb'"content":"(\d+)')


# --- the engine -------------------------------------------------------------------------------------------------------


def chunk(token: int, stamp: int, *, with_tokens: bool) -> bytes:
    """One chunk with the time in it."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": str(stamp)}, "finish_reason": None}
    if with_tokens:
        top = [{"token": f"tok{n}", "logprob": -1.5 * n, "bytes": [116, 111, 107]} for n in range(5)]
        choice["logprobs"] = {"content": [{"token": "tok", "logprob": -0.5, "bytes": [116], "top_logprobs": top}]}
        choice["token_ids"] = [token]
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


class EngineConnection(asyncio.Protocol):
    """Writes chunks at a pace that the request names."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def data_received(self, data: bytes) -> None:
        """Read a request."""
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Read a piece of a request."""
        self.body += data

    def on_message_complete(self) -> None:
        """Begin an answer."""
        request, self.body = json.loads(self.body), b""
        order = json.loads(request["messages"][-1]["content"])
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.say(0, order["chunks"], order["pause_s"], bool(request.get("return_token_ids")))

    def say(self, index: int, count: int, pause_s: float, with_tokens: bool) -> None:
        """Write a chunk, and come back for the next."""
        if self.transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        if index == count:
            end = b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))
            return
        data = chunk(index, time.monotonic_ns(), with_tokens=with_tokens)
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if pause_s:
            loop.call_later(pause_s, self.say, index + 1, count, pause_s, with_tokens)
        else:
            loop.call_soon(self.say, index + 1, count, pause_s, with_tokens)


async def serve_engine() -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(EngineConnection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the agents -------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Delays in milliseconds, and how long it all took."""

    first: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def add(self, other: Measured) -> None:
        """Take in another round."""
        self.first += other.first
        self.chunks += other.chunks
        self.wall_s += other.wall_s


class AgentConnection(asyncio.Protocol):
    """Makes one call, and takes the time of every chunk."""

    def __init__(self, request: bytes, measured: Measured, done: asyncio.Future[None]) -> None:
        self.request, self.measured, self.done = request, measured, done
        self.tail = b""
        self.began = 0
        self.seen = 0

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self.transport = transport
        self.began = time.monotonic_ns()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Take the time."""
        now = time.monotonic_ns()
        for found in STAMP.finditer(data):
            if self.seen:
                self.measured.chunks.append((now - int(found.group(1))) / 1e6)
            else:
                self.measured.first.append((now - self.began) / 1e6)
            self.seen += 1
        self.tail = (self.tail + data)[-32:]
        if self.tail.endswith(b"0\r\n\r\n"):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish."""
        if not self.done.done():
            self.done.set_result(None)


async def streams(port: int, keys: list[str], count: int, chunks: int, pause_s: float) -> Measured:
    """Run streams at once, begun one after the other within the pause between two chunks."""
    loop = asyncio.get_running_loop()
    order = json.dumps({"chunks": chunks, "pause_s": pause_s})
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": order}]}
    if not keys:
        asked["return_token_ids"] = True  # the engine's bytes are then the same both ways
    body = json.dumps(asked).encode()
    measured, waiting = Measured(), []
    began = time.monotonic()
    for number in range(count):
        key = keys[number % len(keys)] if keys else "none"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        done = loop.create_future()
        await loop.create_connection(lambda r=request, d=done: AgentConnection(r, measured, d), "127.0.0.1", port)
        waiting.append(done)
        await asyncio.sleep(pause_s / count)
    await asyncio.gather(*waiting)
    measured.wall_s = time.monotonic() - began
    assert len(measured.first) == count, "a stream was refused"
    return measured


# --- the run ----------------------------------------------------------------------------------------------------------


@contextmanager
def child(*arguments: str) -> Iterator[str]:
    """Run a process, and give its first line."""
    process = subprocess.Popen([sys.executable, *arguments], env=ENVIRON, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def percentile(values: list[float], share: float) -> float:
    """A percentile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


Opener = Callable[[int], list[str]]


def measure(engine: int, proxy: int, opened: Opener, plan: list[tuple[int, int, float]], rounds: int) -> str:
    """Run every row of the plan both ways, in turns; give a table."""
    lines = [
        "| streams | chunks/s | first chunk p50, direct / proxy | chunk p50, direct / proxy | **added p50** "
        "| chunk p99, direct / proxy |",
        "|---|---|---|---|---|---|",
    ]
    for count, chunks, pause_s in plan:
        direct, through = Measured(), Measured()
        added = []
        for _ in range(rounds):
            one = uvloop.run(streams(engine, [], count, chunks, pause_s))
            other = uvloop.run(streams(proxy, opened(count), count, chunks, pause_s))
            added.append(percentile(other.chunks, 0.5) - percentile(one.chunks, 0.5))
            direct.add(one)
            through.add(other)
        rate = len(through.chunks) / through.wall_s
        lines.append(
            f"| {count} | {rate:,.0f} "
            f"| {percentile(direct.first, 0.5):.2f} / {percentile(through.first, 0.5):.2f} ms "
            f"| {percentile(direct.chunks, 0.5):.2f} / {percentile(through.chunks, 0.5):.2f} ms "
            f"| **{statistics.median(added):.2f} ms** "
            f"| {percentile(direct.chunks, 0.99):.2f} / {percentile(through.chunks, 0.99):.2f} ms |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def saturate(engine: int, proxy: int, opened: Opener, chunks: int) -> str:
    """Let the engine write as fast as it can; give the rates."""
    direct = uvloop.run(streams(engine, [], 16, chunks, 0.0))
    through = uvloop.run(streams(proxy, opened(16), 16, chunks, 0.0))
    rates = [len(one.chunks) / one.wall_s for one in (direct, through)]
    return f"Without pauses, 16 streams: {rates[0]:,.0f} chunks/s direct, {rates[1]:,.0f} through the proxy."


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer chunks and rounds")
    parser.add_argument("--out", type=Path, help="write the result as Markdown")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        uvloop.run(serve_engine())
        return
    chunks = 30 if options.quick else 100
    plan = [(1, chunks, 0.01), (20, chunks, 0.05), (200, chunks, 0.25)]
    with tempfile.TemporaryDirectory() as folder, child(__file__, "--engine") as engine:  # noqa: SIM117
        with child("-m", "openenv.rollout.capture", "--root", folder, "--port", "0") as line:
            said = json.loads(line)
            client = httpx2.Client(base_url=said["url"], trust_env=False)
            headers = {"authorization": f"Bearer {said['admin_key']}"}
            body = {"llm_url": f"http://127.0.0.1:{engine}/v1", "model": "m", "max_tokens_cap": None}

            def opened(count: int) -> list[str]:
                """A rollout for each stream."""
                return [client.post("/sessions", json=body, headers=headers).json()["api_key"] for _ in range(count)]

            port = int(said["url"].rpartition(":")[2])
            uvloop.run(streams(port, opened(4), 4, 5, 0.0))
            table = measure(int(engine), port, opened, plan, 2 if options.quick else 3)
            fastest = saturate(int(engine), port, opened, 50 if options.quick else 300)
            print(fastest)
            calls = [call for one in Path(folder).iterdir() for call in read(one).calls]
            tokens = sum(len(call.completion.sampled) for call in calls)
            size = sum(file.stat().st_size for file in Path(folder).glob("*/calls.log"))
            kept = (
                f"{len(calls)} calls and {tokens:,} tokens were recorded whole, {size / max(tokens, 1):.0f} bytes each."
            )
            assert all(call.ended == "complete" for call in calls)
            print(kept)
    if options.out:
        machine = (
            f"Python {platform.python_version()}, {os.cpu_count()} cores, engine, proxy and agents on one machine."
        )
        text = f"# The capture proxy's cost\n\n{machine} `benchmarks/capture.py` makes this page.\n\n{table}\n\n"
        options.out.write_text(f"{text}{fastest} {kept}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
