"""Servers that also accept an environment instance: one shared environment behind plain, stateful HTTP.

Subclasses the current server and changes one decision: which environment answers a plain HTTP call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from openenv.env.environment import Environment
from openenv.protocol.json_values import serialize_observation
from openenv.protocol.schema import deserialize_action
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

# Routes that open sessions: they would give the shared environment to one caller, or close it after one request.
_NOT_SHARED = ("/ws", "/sessions", "/{env_name}/")


class SharedGymRoutes(GymRoutes):
    """Routes that send every call to the one shared environment, whatever session the caller names."""

    def __init__(self, service: EnvService) -> None:
        super().__init__(service)
        self._shared: Session | None = None
        self._opening = asyncio.Lock()

    async def _run(self, scope: Scope, receive: Receive, send: Send, operation: Operation, argument: Any) -> None:
        async with self._opening:  # simultaneous first calls must not open two sessions
            session = self._shared
            if session is None or session.is_ending:
                session = self._shared = await self._manager.open(SessionKind.SOCKET)
        await respond(send, 200, await session.run(operation, argument))


class HTTPEnvServer(_HTTPEnvServer):
    """Serves an environment instance, or a class as the current server does."""

    def __init__(self, env: Any, action_cls: Any, observation_cls: Any, *args: Any, **kwargs: Any) -> None:
        self._is_shared = isinstance(env, Environment)
        factory = _always(env) if self._is_shared else env
        self._action_class: type[Any] = _current(action_cls)
        super().__init__(factory, self._action_class, observation_cls, *args, **kwargs)
        if self._is_shared:
            self.service.describe_as(env.get_metadata())

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Add the routes; for a shared environment, leave out those that open sessions."""
        previous = list(app.router.routes)
        super().register_routes(app, mode)
        if self._is_shared:
            added = [route for route in app.router.routes if route not in previous]
            shared = [route for route in added if not getattr(route, "path", "").startswith(_NOT_SHARED)]
            app.router.routes = [*previous, *shared]

    def _deserialize_action(self, action_data: Mapping[str, Any]) -> Any:
        """Validate the `action` of a `/step` body as the server's action class.

        Raises:
            pydantic.ValidationError: The data does not fit the class.
        """
        return deserialize_action(action_data, self._action_class)

    def _serialize_observation(self, observation: Any) -> dict[str, Any]:
        """Return a step's response in the form of 0.1: observation, reward and done, without metadata.

        The routes of this server send the current form, which adds `metadata`. Clients of 0.1 ignore it.
        """
        payload = serialize_observation(observation)
        payload.pop("metadata", None)
        return {**payload, "observation": {k: v for k, v in payload["observation"].items() if k != "metadata"}}

    def _gym_routes(self) -> GymRoutes:
        return SharedGymRoutes(self.service) if self._is_shared else super()._gym_routes()


def _always(env: Any) -> Callable[[], Any]:
    """Return a factory that always returns `env`, with the name and annotation that the server reads."""

    def shared() -> Any:
        return env

    shared.__name__ = type(env).__name__
    shared.__annotations__["return"] = type(env)
    return shared


def _current(action_cls: Any) -> Any:
    """Replace the legacy base class by the current one, which servers recognise as open to every action."""
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
