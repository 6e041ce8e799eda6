"""Step many sessions with this interpreter's own asynchronous clients, one for each, and print figures as JSON.

All steps of a turn are gathered, as a trainer does that has no `VectorEnv`. Contract names only, so that it runs under
the published package and under ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from openenv.core import GenericEnvClient

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from procfs import machine_cpu_s, process_stats

OPENED_AT_ONCE = 32

clock = time.perf_counter


async def open_all(stack: AsyncExitStack, options: argparse.Namespace) -> list[Any]:
    """Connect a client for each session and begin its episode, a few at a time."""
    extra = {"protocol": options.protocol} if options.protocol else {}
    clients = [GenericEnvClient(base_url=options.url, **extra) for _ in range(options.sessions)]
    for at in range(0, len(clients), OPENED_AT_ONCE):
        some = clients[at : at + OPENED_AT_ONCE]
        await asyncio.gather(*(stack.enter_async_context(client) for client in some))
        await asyncio.gather(*(client.reset() for client in some))
    return clients


def check(results: list[Any], options: argparse.Namespace) -> None:
    """Fail loudly when a reply is not what was asked for."""
    for result in results:
        if result.observation["echoed"] != "x" * options.payload:
            raise SystemExit(f"wrong reply: {str(result.observation)[:80]!r}")


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Step all sessions, wait for all, and so on."""
    action = {"message": "x" * options.payload}
    async with AsyncExitStack() as stack:
        clients = await open_all(stack, options)
        stop = clock() + options.warmup
        while clock() < stop:
            results = await asyncio.gather(*(client.step(action) for client in clients))
        check(results, options)
        times, steps = [], 0
        server, machine, cpu = process_stats(options.pid).cpu_s, machine_cpu_s(), time.process_time()
        start = now = clock()
        while now < start + options.seconds:
            before = now
            results = await asyncio.gather(*(client.step(action) for client in clients))
            if sum(result.reward for result in results) != len(results):
                raise SystemExit("wrong rewards")
            steps += len(results)
            now = clock()
            times.append(now - before)
        cpu = time.process_time() - cpu
        server = process_stats(options.pid).cpu_s - server
        machine = machine_cpu_s() - machine
        check(results, options)
    seconds = now - start
    times.sort()
    return {
        "steps_per_s": round(steps / seconds, 1),
        "errors": 0,
        "p50_ms": round(times[len(times) // 2] * 1e3, 3),
        "p99_ms": round(times[int(0.99 * len(times))] * 1e3, 3),
        "client_cpu_us_per_step": round(cpu / steps * 1e6, 1),
        "server_cpu_us_per_step": round(server / steps * 1e6, 1),
        "foreign_cores": round(max(0.0, machine - server - cpu) / seconds, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warmup", type=float, default=0.5)
    parser.add_argument("--payload", type=int, default=100)
    parser.add_argument("--protocol", help="what our client is to speak; the published one has no choice")
    parser.add_argument("--pid", type=int, default=0, help="server process")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
