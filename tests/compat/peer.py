"""Plays scripts with the clients of whichever OpenEnv its interpreter has: one script per line in, its outcomes out.

A script is `{"url", "client": "typed" | "generic", "use": "async" | "sync", "calls": [[who, method, argument], ...]}`;
each `who` is a client of its own. Not a test: `conftest.py` runs it, with this package or with the published one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import sys
from typing import Any

from pydantic import BaseModel
from sample_env import CounterAction, CounterEnv

from openenv.core.generic_client import GenericAction, GenericEnvClient


def plain(value: Any) -> Any:
    """Turn what clients return into JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value if isinstance(value, (dict, list, str, int, float, type(None))) else type(value).__name__


def failure(exc: Exception) -> dict[str, Any]:
    """Describe an exception by its builtin bases and its text."""
    bases = [cls.__name__ for cls in type(exc).__mro__ if cls.__module__ == "builtins"]
    return {"raised": bases, "text": str(exc)}


def arguments(method: str, argument: Any, kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Find out how a method is called."""
    if method == "reset":
        return [], dict(argument or {})
    if method == "step":
        return [CounterAction(**argument) if kind == "typed" else GenericAction(**argument)], {}
    return ([] if argument is None else [argument]), {}


async def play(script: dict[str, Any]) -> list[Any]:
    """Run a script and return an outcome per call."""
    cls = CounterEnv if script["client"] == "typed" else GenericEnvClient
    clients: dict[str, Any] = {}
    outcomes: list[Any] = []
    for who, method, argument in script["calls"]:
        if who not in clients:
            client = cls(base_url=script["url"], message_timeout_s=20)
            clients[who] = client.sync() if script["use"] == "sync" else client
        args, kwargs = arguments(method, argument, script["client"])
        try:
            outcome = getattr(clients[who], method)(*args, **kwargs)
            outcomes.append(plain(await outcome if inspect.isawaitable(outcome) else outcome))
        except Exception as exc:
            outcomes.append(failure(exc))
    for client in clients.values():
        closing = client.close()
        if inspect.isawaitable(closing):
            await closing
    return outcomes


def run(script: dict[str, Any]) -> list[Any]:
    """Run a script on an event loop, or where none runs."""
    work = play(script)
    if script["use"] == "async":
        return asyncio.run(work)
    try:
        work.send(None)  # nothing in a blocking script is awaited
    except StopIteration as end:
        outcomes: list[Any] = end.value
        return outcomes
    raise RuntimeError("a blocking client wanted to be awaited")


def main() -> None:
    """Answer scripts until the input ends."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
