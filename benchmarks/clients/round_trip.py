"""Step one session with this interpreter's `EnvClient` and time each round trip; prints one JSON object.

Contract names only, so that it runs under the published package and under ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    """Carry the message to be echoed."""

    message: str


class EchoObservation(Observation):
    """Carry the echoed message."""

    echoed: str = ""


class EchoClient(EnvClient[EchoAction, EchoObservation, State]):
    """Translate between the wire and the echo environment's types, as an environment's author would."""

    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        observation = EchoObservation(
            echoed=payload["observation"].get("echoed", ""), done=payload["done"], reward=payload["reward"]
        )
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


def check(result: StepResult[EchoObservation], message: str) -> None:
    """Fail loudly when the reply is not the echo of the message."""
    if result.observation.echoed != message:
        raise SystemExit(f"wrong echo: {result.observation.echoed[:80]!r}")


async def step_async(url: str, *, message: str, warmup: int, steps: int) -> list[float]:
    """Return the seconds of each step of the async client."""
    times = []
    clock = time.perf_counter
    async with EchoClient(base_url=url) as client:
        await client.reset()
        for n in range(warmup + steps):
            start = clock()
            result = await client.step(EchoAction(message=message))
            took = clock() - start
            check(result, message)
            if n >= warmup:
                times.append(took)
    return times


def step_sync(url: str, *, message: str, warmup: int, steps: int) -> list[float]:
    """Return the seconds of each step of the sync client."""
    times = []
    clock = time.perf_counter
    with EchoClient(base_url=url).sync() as client:
        client.reset()
        for n in range(warmup + steps):
            start = clock()
            result = client.step(EchoAction(message=message))
            took = clock() - start
            check(result, message)
            if n >= warmup:
                times.append(took)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--kind", choices=["async", "sync"], required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=200)
    options = parser.parse_args()
    wanted = {"message": "x" * 100, "warmup": options.warmup, "steps": options.steps}
    cpu = time.process_time()
    if options.kind == "async":
        times = asyncio.run(step_async(options.url, **wanted))
    else:
        times = step_sync(options.url, **wanted)
    cpu = time.process_time() - cpu
    times.sort()
    report = {
        "median_us": round(statistics.median(times) * 1e6, 1),
        "p99_us": round(times[int(0.99 * len(times))] * 1e6, 1),
        "client_cpu_us": round(cpu / (options.warmup + options.steps) * 1e6, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
