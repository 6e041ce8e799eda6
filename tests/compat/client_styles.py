"""Plays one short episode in each of the ways that people use clients, and prints as JSON what came of it.

Run with the URL of a server of `sample_echo`, by interpreters with this package and with the published one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from sample_echo import EchoAction, EchoEnv

URL = sys.argv[1] if __name__ == "__main__" else ""
STYLES: dict[str, Callable[[], Any]] = {}


def style(function: Callable[[], Any]) -> Callable[[], Any]:
    """Note a way to use clients; its name says which."""
    STYLES[function.__name__] = function
    return function


class Provider:
    """Starts nothing: the server is there already."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def start_container(self, image: str, port: int | None = None, env_vars: Any = None, **kwargs: Any) -> str:
        self.log.append(["start", image, port, env_vars, kwargs])
        return URL

    def wait_for_ready(self, base_url: str | None = None, timeout_s: float = 30.0) -> None:
        self.log.append("ready")

    def stop_container(self) -> None:
        self.log.append("stop")


async def episode(client: Any) -> list[str]:
    """Play, awaiting."""
    begun = await client.reset(seed=1)
    return [begun.observation.echoed, (await client.step(EchoAction(message="ü✓"))).observation.echoed]


def blocking_episode(client: Any) -> list[str]:
    """Play, blocking."""
    begun = client.reset(seed=1)
    return [begun.observation.echoed, client.step(EchoAction(message="ü✓")).observation.echoed]


@style
async def a_client_in_async_with() -> Any:
    async with EchoEnv(base_url=URL) as client:
        return await episode(client), await client.say_twice("x"), (await client.state()).step_count


@style
def a_client_in_with() -> Any:
    with EchoEnv(base_url=URL) as client:
        return blocking_episode(client), client.state().step_count


@style
async def a_client_in_with_where_a_loop_runs() -> Any:
    with EchoEnv(base_url=URL) as client:  # a cell of a notebook
        return blocking_episode(client), client.state().step_count


@style
async def a_sync_client_where_a_loop_runs() -> Any:
    with EchoEnv(base_url=URL).sync() as client:
        return blocking_episode(client), client.say_twice("x")


@style
def a_client_that_was_awaited_and_closed_and_then_blocks() -> Any:
    client = EchoEnv(base_url=URL)

    async def use() -> list[str]:
        played = await episode(client)
        await client.close()
        return played

    first = asyncio.run(use())
    again = blocking_episode(client)
    client.close()
    return first, again


@style
def a_client_that_was_awaited_is_closed_when_its_loop_has_ended() -> Any:
    client = EchoEnv(base_url=URL)

    async def use() -> list[str]:
        return await episode(client)

    return asyncio.run(use()), client.close()


@style
async def a_new_session_is_awaited() -> Any:
    async with EchoEnv(base_url=URL) as client, await client.new_session() as other:
        return await episode(client), await episode(other), type(other).__name__


@style
def a_new_session_blocks() -> Any:
    with EchoEnv(base_url=URL).sync() as client:
        return blocking_episode(client), blocking_episode(client.new_session())


@style
def an_image_is_started_by_asyncio_run() -> Any:
    provider = Provider()
    client = asyncio.run(EchoEnv.from_docker_image("echo-env:latest", provider=provider))
    return type(client).__name__, provider.log


@style
async def an_image_is_started_as_a_task() -> Any:
    provider = Provider()
    client = await asyncio.create_task(EchoEnv.from_docker_image("echo-env:latest", provider=provider, port=8))
    played = await episode(client)
    await client.close()
    return played, provider.log


@style
def an_image_is_started_and_used_by_one_asyncio_run() -> Any:
    provider = Provider()

    async def use() -> list[str]:
        async with await EchoEnv.from_docker_image("echo-env:latest", provider=provider, env_vars={"A": "b"}) as client:
            return await episode(client)

    return asyncio.run(use()), provider.log


@style
def an_image_is_started_and_blocks() -> Any:
    provider = Provider()
    with EchoEnv.from_docker_image("echo-env:latest", provider=provider, gpus=1).sync() as client:
        return blocking_episode(client), provider.log[:]


@style
def an_image_is_never_started() -> Any:
    provider = Provider()
    EchoEnv.from_docker_image("echo-env:latest", provider=provider).close()
    return provider.log


@style
def a_space_is_started_and_blocks() -> Any:
    provider = Provider()
    with EchoEnv.from_env("Org/My_Space", provider=provider, tag="v1").sync() as client:
        return blocking_episode(client), provider.log[:]


@style
def addresses_come_back_without_a_slash() -> Any:
    return [EchoEnv(base_url=url).base_url for url in ("http://host:1/", "https://host/path/", "host:8000")]


def main() -> None:
    """Print what each style leads to."""
    outcomes: dict[str, Any] = {}
    for name, function in STYLES.items():
        try:
            outcomes[name] = asyncio.run(function()) if inspect.iscoroutinefunction(function) else function()
        except Exception as exc:
            outcomes[name] = f"{type(exc).__name__}: {exc}"
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
