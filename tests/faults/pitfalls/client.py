"""Scenarios of the client: does an episode stay one episode, and a reply its request's?"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from openenv.core import GenericEnvClient

from .environment import Move, Seen, Watched
from .stage import Stage


class Sleeper(Watched):
    """Sleeps for as many milliseconds as the action says."""

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        time.sleep(action.number / 1000)
        return super().step(action)


def step_after_a_timeout(stage: Stage) -> str:
    """W26: a step times out; the next one must not run on an environment that was never reset."""
    url = stage.serve(stage.app(Sleeper)).url

    async def play() -> str:
        async with GenericEnvClient(base_url=url, message_timeout_s=1.5) as client:
            await client.reset()
            for _ in range(3):
                await client.step({})
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await client.step({"number": 2500})
            return await _step(client)

    return asyncio.run(play())


def step_after_a_lost_connection(stage: Stage) -> str:
    """W26: a proxy drops the connection in mid-episode."""
    app = stage.app()
    app.add_middleware(CutOnDemand)
    server = stage.serve(app)

    async def play() -> str:
        async with GenericEnvClient(base_url=server.url, message_timeout_s=30) as client:
            await client.reset()
            for _ in range(3):
                await client.step({})
            await asyncio.to_thread(server.ask, "POST", "/cut")
            await asyncio.sleep(0.2)  # the client's side hears of it
            return await _step(client)

    return asyncio.run(play())


async def _step(client: Any) -> str:
    try:
        taken = await client.step({})
    except Exception as exc:
        return type(exc).__name__
    count = taken.observation["count"]
    return f"step {count} of {'the same episode' if count == 4 else 'another environment'}"


class CutOnDemand:
    """A middleware that ends all WebSockets when `/cut` is asked for, as a tunnel or a proxy may."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._cut = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/cut":
            self._cut.set()
            self._cut = asyncio.Event()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        work = asyncio.ensure_future(self._app(scope, receive, send))
        cut = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait([work, cut], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await send({"type": "websocket.close", "code": 1012})
            await asyncio.wait([work], timeout=2)
            work.cancel()
        cut.cancel()


def gathered_steps(stage: Stage) -> str:
    """W27: ten steps awaited together on one client."""
    url = stage.serve(stage.app()).url

    async def play() -> str:
        async with GenericEnvClient(base_url=url) as client:
            await client.reset()
            steps = [_awaited(client.step({"number": number})) for number in range(10)]
            results: list[Any] = await asyncio.gather(*steps, return_exceptions=True)
        failures = {type(one).__name__ for one in results if isinstance(one, BaseException)}
        if failures:
            return f"fail with {', '.join(sorted(failures))}"
        numbers = [one.observation["number"] for one in results]
        return "each gets its own reply" if numbers == list(range(10)) else "replies are mixed up"

    return asyncio.run(play())


async def _awaited(pending: Any) -> Any:
    return await pending


def forgotten_await(stage: Stage) -> str:
    """W31: inside a loop the caller reads a result without `await`; is the loop blocked?"""
    url = stage.serve(stage.app()).url

    async def play() -> str:
        client = GenericEnvClient(base_url=url)
        pending: Any = client.reset()
        if hasattr(pending, "observation"):
            return "it is, until there is one"
        await pending
        await client.close()
        return "there is none yet"

    return asyncio.run(play())
