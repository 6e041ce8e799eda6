"""Every way from a client to an environment, behind one blocking facade, so that one test can speak to them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dict_client import DictHTTPClient
from gateways import ChangingBackends, RunningGateway
from openenv import GenericEnvClient, LocalEnv
from openenv.server.app import create_app
from servers import PlainAsgi, loops_by_uvloop


class Awaited:
    """An asynchronous client, driven from blocking code on a loop of its own."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._client = client
        self._loop = loop or asyncio.new_event_loop()
        self._owns_loop = loop is None

    def _run(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return await call()

        return self._loop.run_until_complete(run())

    def reset(self, **kwargs: Any) -> Any:
        return self._run(lambda: self._client.reset(**kwargs))

    def step(self, action: Any) -> Any:
        return self._run(lambda: self._client.step(action))

    def state(self) -> Any:
        return self._run(self._client.state)

    def new_session(self) -> Awaited:
        return Awaited(self._client.new_session(), self._loop)

    def close(self) -> None:
        self._run(self._client.close)
        if self._owns_loop:
            self._loop.close()
            self._loop = asyncio.new_event_loop()

    def dispose(self) -> None:
        if self._owns_loop and not self._loop.is_closed():
            self._loop.close()


class Way:
    """One transport: starts what it needs for an environment and makes clients of it."""

    def __init__(self, name: str, serve: Callable[..., Any], stack: contextlib.ExitStack) -> None:
        self.name = name
        self.is_local = name.startswith("local")
        self.is_http = name.startswith("http")
        self.publishes_null = self.is_http or "v1" in name  # for a reward that is not a finite number
        self.server: Any = None
        self._serve = serve
        self._stack = stack
        self._env: Any = None
        self._gateway: RunningGateway | None = None

    def serve(self, env: Any, action_cls: Any, observation_cls: Any, sessions: int = 4) -> Way:
        """Make an environment reachable."""
        self._env = env
        if self.is_local:
            return self
        app: Any = create_app(env, action_cls, observation_cls, max_concurrent_envs=sessions)
        if "plain" in self.name or "asgi" in self.name:
            self.server = self._serve(PlainAsgi(app) if "asgi" in self.name else app, ws="auto", http="auto")
        elif "dual" in self.name:
            self.server = self._serve(app)
        else:
            with loops_by_uvloop():
                self.server = self._serve(app)
        if "gateway" in self.name:
            self._gateway = RunningGateway(ChangingBackends([self.server.url]))
            self._stack.callback(self._gateway.stop)
        return self

    def client(self) -> Any:
        """Return another client; it is closed when the test ends."""
        made = self._make()
        self._stack.callback(self._close, made)
        return made

    @staticmethod
    def _close(client: Any) -> None:
        client.close()
        if isinstance(client, Awaited):
            client.dispose()

    def _make(self) -> Any:
        if self.is_local:
            local = LocalEnv(self._env)
            return Awaited(local) if self.name == "local, awaited" else local.sync()
        url = (self._gateway or self.server).url
        if self.is_http:
            return DictHTTPClient(url, request_timeout_s=60)  # as the others: a busy machine starts processes slowly
        client = GenericEnvClient(url, protocol="v1" if "v1" in self.name else "v2")
        if "awaited" in self.name:
            return Awaited(client)
        return client if "dual" in self.name else client.sync()


WAYS = [
    "ws, awaited",
    "ws, blocking",
    "ws, dual mode",
    "ws, awaited, plain uvicorn",
    "ws, awaited, asgi",
    "ws, blocking, asgi",
    "ws v1, awaited, asgi",
    "ws v1, blocking",
    "http",
    "ws, blocking, gateway",
    pytest.param("ws v1, blocking, gateway", marks=pytest.mark.slow),
    "http, gateway",
    "local, awaited",
    "local, blocking",
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, serve: Callable[..., Any]) -> Iterator[Way]:
    """Each transport in turn."""
    with contextlib.ExitStack() as stack:
        yield Way(request.param, serve, stack)
