"""Servers that also take an environment instance: one shared environment behind plain, stateful HTTP.

Knows the current server and replaces one decision of it: whose environment a plain call is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from openenv.env.environment import Environment
from openenv.server.app import HTTPEnvServer as _HTTPEnvServer
from openenv.server.app import create_app as _create_app
from openenv.server.app import create_fastapi_app as _create_fastapi_app
from openenv.server.app import new_application
from openenv.server.asgi import Receive, Scope, Send, respond
from openenv.server.http_routes import GymRoutes
from openenv.server.service import EnvService
from openenv.server.sessions.operations import Operation
from openenv.server.sessions.session import Session, SessionKind
from openenv.types import Action, ServerMode

from .types import Action as LegacyAction

__all__ = ["HTTPEnvServer", "SharedGymRoutes", "create_app", "create_fastapi_app"]


# These would give the environment away, or close it after a single request.
_NOT_SHARED = ("/ws", "/sessions", "/{env_name}/")


class SharedGymRoutes(GymRoutes):
    """Routes on which every call is for the one shared environment, whatever session it names."""

    def __init__(self, service: EnvService) -> None:
        super().__init__(service)
        self._shared: Session | None = None
        self._opening = asyncio.Lock()

    async def _run(self, scope: Scope, receive: Receive, send: Send, operation: Operation, argument: Any) -> None:
        async with self._opening:
            session = self._shared
            if session is None or session.is_ending:
                session = self._shared = await self._manager.open(SessionKind.SOCKET)
        await respond(send, 200, await session.run(operation, argument))


class HTTPEnvServer(_HTTPEnvServer):
    """Serves an environment instance, or a class as the current server does."""

    def __init__(self, env: Any, action_cls: Any, observation_cls: Any, *args: Any, **kwargs: Any) -> None:
        self._is_shared = isinstance(env, Environment)
        factory = _always(env) if self._is_shared else env
        super().__init__(factory, _current(action_cls), observation_cls, *args, **kwargs)
        if self._is_shared:
            self.service.describe_as(env.get_metadata())

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Add the routes; a shared environment has no sessions to give away, so none that open one."""
        known = list(app.router.routes)
        super().register_routes(app, mode)
        if self._is_shared:
            added = [route for route in app.router.routes if route not in known]
            kept = [route for route in added if not getattr(route, "path", "").startswith(_NOT_SHARED)]
            app.router.routes = [*known, *kept]

    def _gym_routes(self) -> GymRoutes:
        return SharedGymRoutes(self.service) if self._is_shared else super()._gym_routes()


def _always(env: Any) -> Callable[[], Any]:
    """Return a factory of one instance, with its class's name and annotated with its class."""

    def shared() -> Any:
        return env

    shared.__name__ = type(env).__name__
    shared.__annotations__["return"] = type(env)
    return shared


def _current(action_cls: Any) -> Any:
    """Return the class that servers know as open to every action, where it is meant."""
    return Action if action_cls is LegacyAction else action_cls


def create_fastapi_app(env: Any, action_cls: Any, observation_cls: Any, *args: Any, **kwargs: Any) -> FastAPI:
    """Build the application of an environment instance or class."""
    if not isinstance(env, Environment):
        return _create_fastapi_app(env, _current(action_cls), observation_cls, *args, **kwargs)
    app = new_application()
    app.state.openenv_server = server = HTTPEnvServer(env, action_cls, observation_cls, *args, **kwargs)
    server.register_routes(app)
    return app


def create_app(env: Any, action_cls: Any, observation_cls: Any, env_name: str | None = None, **kwargs: Any) -> FastAPI:
    """Build the application of an environment instance or class."""
    if not isinstance(env, Environment):
        return _create_app(env, _current(action_cls), observation_cls, env_name, **kwargs)
    return create_fastapi_app(env, action_cls, observation_cls, env_name=env_name)
