"""Scenarios of sessions: how they begin, how long they live, and what is left of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.types import ConcurrencyConfig

from .environment import Move, Seen, WatchedAsync
from .stage import PATIENCE_S, Stage, result, until

LONG_ENOUGH_S = 6.0  # the published reaper looks every five seconds


def sessions_in_use(stage: Stage) -> str:
    """W4: with a short session timeout one client thinks for long and another waits for a long step."""
    config = ConcurrencyConfig(max_concurrent_envs=2, session_timeout=0.5)
    server = stage.serve(stage.app(WatchedAsync, concurrency_config=config))
    thinking, waiting = stage.socket(server), stage.socket(server)
    thinking.step()
    waiting.ask({"type": "step", "data": {"number": int(LONG_ENOUGH_S / 0.05)}}, timeout_s=4 * LONG_ENOUGH_S)
    found = "is closed in mid-step" if stage.watch.count("closed during a step") else "finishes"
    before = stage.watch.count("step after close")
    reply = result(thinking.step())
    where = "a closed environment" if stage.watch.count("step after close") > before else "its own environment"
    return f"the long step {found}, the idle client's next step runs on {where} ({reply})"


class Deadline:
    """A middleware that gives up on connections that take too long to begin."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        work = asyncio.ensure_future(self._app(scope, receive, send))
        done, _ = await asyncio.wait([work], timeout=0.3)
        if not done and b"slow" in scope["query_string"]:
            work.cancel()
        await asyncio.wait([work])


def cancelled_while_building(stage: Stage) -> str:
    """W5: a connection is cancelled while its environment is being built; is the slot free afterwards?"""
    app = stage.app(max_concurrent_envs=1)
    app.add_middleware(Deadline)
    server = stage.serve(app)
    stage.watch.hold("construct")
    stage.socket(server, path="/ws?slow").receive()
    stage.watch.release()
    assert until(lambda: stage.watch.count("built") == 1)
    closed = until(lambda: stage.watch.count("close") == 1, PATIENCE_S)
    next_one = result(stage.socket(server).ask({"type": "reset"}))
    return f"{'closed' if closed else 'never closed'}; the next client gets {next_one}"


def threads_after_shutdown(stage: Stage) -> str:
    """W8: the threads that ran environments, after the server has stopped."""
    app = FastAPI(lifespan=_lifespan)
    HTTPEnvServer(stage.factory(), Move, Seen, max_concurrent_envs=4).register_routes(app)
    before = set(threading.enumerate())
    server = stage.serve(app)
    for _ in range(3):
        stage.socket(server).ask({"type": "reset"})
        server.ask("POST", "/reset", {})
    server.stop()

    def left() -> set[threading.Thread]:
        ran = stage.watch.threads("construct", "reset")
        return {thread for thread in set(threading.enumerate()) - before if thread.ident in ran}

    return "all ended" if until(lambda: not left(), PATIENCE_S) else "left running"


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


def client_gone_in_mid_step(stage: Stage) -> str:
    """W9: a client vanishes during a long step."""
    one = stage.socket(stage.serve(stage.app(WatchedAsync, max_concurrent_envs=1)))
    one.send({"type": "step", "data": {"number": 40}})
    assert until(lambda: stage.watch.count("step_async") == 1)
    one.vanish()
    until(lambda: stage.watch.count("cancelled") + stage.watch.count("finished") == 1)
    return "the step is cancelled" if stage.watch.count("cancelled") else "the step runs on without a client"


def a_hundred_sessions(stage: Stage) -> str:
    """W13: the threads of 100 sessions of a fast environment."""
    server = stage.serve(stage.app(max_concurrent_envs=100))
    for _ in range(100):
        stage.socket(server).step()
    return "few threads" if len(stage.watch.threads("step")) <= 64 else "a thread each"
