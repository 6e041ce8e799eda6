"""What a turn of `play` costs: turns per second, CPU of the playing process per turn, and its memory.

    python benchmarks/play.py [--episodes 16] [--turns 40] [--concurrency 16]
    python benchmarks/play.py --turns 5 --concurrency 256 1024 4096         # so many sessions at once

The model's endpoint and the environment are processes of their own. The endpoint answers at once with the IDs and the
log-probabilities of ten tokens; each message of the conversation counts as twenty tokens of the prompt. Every session
plays at least one episode. 4,096 sessions need 8,192 open files: raise the hard limit if it is lower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httptools
from procfs import raise_file_limit

import openenv
from openenv.rollout import Model
from openenv.train import play

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(openenv.__file__).parents[1])}
SAMPLED = 10
PER_MESSAGE = 20


class EndpointConnection(asyncio.Protocol):
    """Answers chat completions."""

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
        """Answer."""
        body, self.body = self.body, b""
        count = body.count(b'"role"')
        # The next prompt begins with this one and its answer, like that of a real engine.
        prompt = [token for number in range(count) for token in _message(number)]
        ids = _message(count)[:SAMPLED]
        entries = [{"token": f"t{token}", "logprob": -0.5, "bytes": [116], "top_logprobs": []} for token in ids]
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": f"word {count}"},
                    "logprobs": {"content": entries},
                    "token_ids": ids,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": SAMPLED},
        }
        data = json.dumps(answer, separators=(",", ":")).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
        self.transport.write(head + data)


def _message(number: int) -> list[int]:
    return list(range(number * 100, number * 100 + PER_MESSAGE))


async def serve_endpoint() -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(EndpointConnection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def serve_environment() -> None:
    """Serve the environment until killed."""
    from openenv import Action, Environment, Observation, State, create_app
    from openenv.testing import serve

    class Word(Action):
        text: str = ""

    class Hint(Observation):
        hint: str = ""

    class Echo(Environment[Word, Hint, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
            return Hint(hint="Begin.")

        def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Hint:
            return Hint(hint=f"{action.text} is wrong.", reward=0.1)

        @property
        def state(self) -> State:
            return State()

    with serve(create_app(Echo, Word, Hint, max_concurrent_envs=8192)) as served:
        print(served.url, flush=True)
        sys.stdin.read()


@contextmanager
def process(what: str) -> Iterator[str]:
    """Start this file as another process, and yield its first line."""
    command = [sys.executable, __file__, what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRON) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.kill()


async def measure(url: str, port: str, concurrency: int, options: argparse.Namespace) -> str:
    """Play, and return the figures."""
    episodes = max(options.episodes, concurrency)
    model = Model(base_url=f"http://127.0.0.1:{port}/v1", name="m")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = play(
        url,
        model,
        range(episodes),
        samples=1,
        concurrency=concurrency,
        max_turns=options.turns,
        max_ahead=episodes,
    )
    async with stream as groups:
        began, cpu, turns, tokens = time.perf_counter(), time.process_time(), 0, 0
        async for group in groups:
            for sample in group.samples:
                assert sample.outcome.status == "truncated", sample.outcome.reason
                turns += sum(len(one.turn_lengths) for one in sample.sequences)
                tokens += sum(len(one.input_ids) for one in sample.sequences)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    return (
        f"{concurrency} sessions, {turns} turns: {turns / wall_s:,.0f} turns/s, "
        f"{1000 * cpu_s / turns:.2f} ms of CPU a turn; {tokens:,} tokens, memory grew by {grown:,.0f} MB"
    )


def main() -> None:
    """Measure, or be one of the other processes."""
    if sys.argv[1:] == ["endpoint"]:
        asyncio.run(serve_endpoint())
        return
    if sys.argv[1:] == ["environment"]:
        serve_environment()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16], help="sessions at once, one run for each")
    parser.add_argument("--into", type=Path, help="a file for the figures")
    options = parser.parse_args()
    raise_file_limit()
    rows, cores = [], len(os.sched_getaffinity(0))
    with process("endpoint") as port, process("environment") as url:
        for concurrency in options.concurrency:
            rows.append(f"{asyncio.run(measure(url, port, concurrency, options))}; {cores} cores.")
            print(rows[-1], flush=True)
    if options.into:
        options.into.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
