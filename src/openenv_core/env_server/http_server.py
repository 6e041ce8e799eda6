"""Servers that also take an environment instance: one shared environment behind plain, stateful HTTP.

Knows the current server and replaces one decision of it: whose environment a plain call is for.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from openenv.env.environment import Environment
from openenv.server.app import create_app as _create_app
from openenv.server.app import create_fastapi_app as _create_fastapi_app
from openenv.server.app import new_application
from openenv.server.asgi import Send, respond
from openenv.server.compat import HTTPEnvServer as _HTTPEnvServer
from openenv.server.http import GymRoutes
from openenv.sessions.operations import Operation
from openenv.sessions.session import Session, SessionKind, SessionState
from openenv.types import ServerMode

__all__ = ["HTTPEnvServer", "SharedGymRoutes", "create_app", "create_fastapi_app"]


class SharedGymRoutes(GymRoutes):
    """Routes on which every plain call is for the one shared environment."""

    _shared: Session | None = None

    async def _run_plain(self, send: Send, operation: Operation, argument: Any, *, begins: bool) -> None:
        session = self._shared
        if session is None or session.state in (SessionState.CLOSING, SessionState.CLOSED):
            session = self._shared = await self._manager.open(SessionKind.SOCKET)
        await respond(send, 200, await session.run(operation, argument))


class HTTPEnvServer(_HTTPEnvServer):
    """Serves an environment instance, or a class as the current server does."""

    def __init__(self, env: Any, action_cls: Any, observation_cls: Any, *args: Any, **kwargs: Any) -> None:
        self._is_shared = isinstance(env, Environment)
        factory = (lambda: env) if self._is_shared else env
        super().__init__(factory, action_cls, observation_cls, *args, **kwargs)
        if self._is_shared:
            self.service.env_name = kwargs.get("env_name") or type(env).__name__

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Add the routes; a shared environment has no WebSocket, for it has no sessions to give away."""
        super().register_routes(app, mode)
        if self._is_shared:
            app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != "/ws"]

    def _gym_routes(self) -> GymRoutes:
        return SharedGymRoutes(self.service) if self._is_shared else super()._gym_routes()


def create_fastapi_app(env: Any, action_cls: Any, observation_cls: Any, *args: Any, **kwargs: Any) -> FastAPI:
    """Build the application of an environment instance or class."""
    if not isinstance(env, Environment):
        return _create_fastapi_app(env, action_cls, observation_cls, *args, **kwargs)
    app = new_application()
    app.state.openenv_server = server = HTTPEnvServer(env, action_cls, observation_cls, *args, **kwargs)
    server.register_routes(app)
    return app


def create_app(env: Any, action_cls: Any, observation_cls: Any, env_name: str | None = None, **kwargs: Any) -> FastAPI:
    """Build the application of an environment instance or class."""
    if not isinstance(env, Environment):
        return _create_app(env, action_cls, observation_cls, env_name, **kwargs)
    return create_fastapi_app(env, action_cls, observation_cls, env_name=env_name)
