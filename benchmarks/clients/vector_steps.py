"""Step many sessions with `VectorEnv` for a while and print steps per second, bytes and CPU as one JSON object.

Runs under our package only: the published one has nothing like it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openenv import VectorEnv

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from procfs import machine_cpu_s, process_stats

clock = time.perf_counter


def check(result: Any, options: argparse.Namespace) -> None:
    """Fail loudly when a reply is not what was asked for."""
    for observation in result.observations:
        if options.pixels:
            pixels = observation["pixels"]
            shape = pixels.shape if hasattr(pixels, "shape") else (len(pixels), len(pixels[0]), len(pixels[0][0]))
            good = tuple(shape) == (84, 84, 4)
        else:
            good = observation["echoed"] == "x" * options.payload
        if not good:
            raise SystemExit(f"wrong reply: {str(observation)[:80]!r}")


def all_together(env: Any, action: Any, options: argparse.Namespace) -> Iterator[Any]:
    """Step all sessions, wait for all, and so on."""
    actions = [action] * options.sessions
    while True:
        yield env.step(actions)


def first_ready(env: Any, action: Any, options: argparse.Namespace) -> Iterator[Any]:
    """Keep every session busy: those that are ready first get their next action while the others still step."""
    env.step_async([action] * options.sessions)
    while True:
        result = env.step_wait(k=options.first)
        yield result
        env.step_async(dict.fromkeys(result.slots, action), each=False)


def take(turns: Iterator[Any]) -> Any:
    """Take the next result, and look at its rewards as a trainer does."""
    result = next(turns)
    if sum(result.rewards) != len(result):
        raise SystemExit("wrong rewards")
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--connections", type=int, default=4, help="0: as many as the client thinks fit")
    parser.add_argument("--in-step", action="store_true", help="wait for a line before the load")
    parser.add_argument("--codec", choices=["auto", "json", "msgpack"], default="auto")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warmup", type=float, default=0.5)
    parser.add_argument("--payload", type=int, default=100)
    parser.add_argument("--pixels", action="store_true", help="expect images instead of echoes")
    parser.add_argument("--first", type=int, default=0, help="take the first so many that are ready, not all at once")
    parser.add_argument("--pid", type=int, default=0, help="server process")
    options = parser.parse_args()
    action = {} if options.pixels else {"message": "x" * options.payload}
    connections = options.connections or None
    with VectorEnv(options.url, options.sessions, connections=connections, codec=options.codec) as env:
        env.reset()
        if options.in_step:
            print("ready", flush=True)
            sys.stdin.readline()
        turns = first_ready(env, action, options) if options.first else all_together(env, action, options)
        stop = clock() + options.warmup
        while clock() < stop:
            result = take(turns)
        check(result, options)
        times, steps, received = [], 0, env.traffic[1]
        server, machine, cpu = process_stats(options.pid).cpu_s, machine_cpu_s(), time.process_time()
        start = now = clock()
        while now < start + options.seconds:
            before = now
            result = take(turns)
            steps += len(result)
            now = clock()
            times.append(now - before)
        cpu = time.process_time() - cpu
        server = process_stats(options.pid).cpu_s - server
        machine = machine_cpu_s() - machine
        check(result, options)
        received = env.traffic[1] - received
    seconds = now - start
    times.sort()
    report = {
        "steps_per_s": round(steps / seconds, 1),
        "errors": 0,
        "p50_ms": round(times[len(times) // 2] * 1e3, 3),
        "p99_ms": round(times[int(0.99 * len(times))] * 1e3, 3),
        "bytes_per_step": round(received / steps, 1),
        "client_cpu_us_per_step": round(cpu / steps * 1e6, 1),
        "server_cpu_us_per_step": round(server / steps * 1e6, 1),
        "foreign_cores": round(max(0.0, machine - server - cpu) / seconds, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
