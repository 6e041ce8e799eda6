"""The Task API: an environment's catalogue of tasks over HTTP.

Knows the routes and their shapes; the catalogue itself is the environment's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.encoders import jsonable_encoder
from pydantic import BaseModel

from ..sessions.operations import CALL
from ..types import GetTaskRangeRequest, GetTaskRequest, ListTasksRequest, NumTasksRequest
from .asgi import BodyLimit
from .routes import AdmittingRoute, ErrorBody
from .service import EnvService

_SPLIT_TYPES = frozenset({"train", "validation", "test"})
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "There is no such task"},
    404: {"description": "No environment of that name is served here"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    500: {"description": "The environment failed"},
    501: {"description": "The environment has no such catalogue"},
    503: {"model": ErrorBody, "description": "The server is shutting down"},
}


class TaskRoutes:
    """The handlers of the Task API; each call runs on an environment of its own."""

    def __init__(self, service: EnvService) -> None:
        self._service = service

    def register(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        router = APIRouter(tags=["Task API"], route_class=AdmittingRoute)
        router.add_api_route("/list_environments", self.list_environments, methods=["GET"])
        router.add_api_route("/{env_name}/splits", self.splits, methods=["GET"], responses=_ERRORS)
        router.add_api_route("/{env_name}/tasks", self.tasks, methods=["POST"], responses=_ERRORS)
        router.add_api_route("/{env_name}/num_tasks", self.num_tasks, methods=["POST"], responses=_ERRORS)
        router.add_api_route("/{env_name}/task", self.task, methods=["POST"], responses=_ERRORS)
        router.add_api_route("/{env_name}/task_range", self.task_range, methods=["POST"], responses=_ERRORS)
        for route in router.routes:
            assert isinstance(route, AdmittingRoute)
            route.app = BodyLimit(route.app, lambda: self._service.options.max_message_bytes)
        app.router.routes.extend(router.routes)

    async def list_environments(self) -> list[str]:
        """Name the environments served here."""
        return [self._service.env_name]

    async def splits(self, env_name: str) -> list[Any]:
        """List the splits of an environment's tasks."""
        found = await self._ask(env_name, "list_splits", shape=list)
        return [_split(item) for item in found]

    async def tasks(self, env_name: str, request: ListTasksRequest) -> dict[str, Any]:
        """List the tasks of a split."""
        found = await self._ask(env_name, "list_tasks", request.split, shape=list)
        return {"tasks": jsonable_encoder(found), "env_name": self._service.env_name}

    async def num_tasks(self, env_name: str, request: NumTasksRequest) -> dict[str, int]:
        """Count the tasks of a split."""
        return {"num_tasks": int(await self._ask(env_name, "num_tasks", request.split))}

    async def task(self, env_name: str, request: GetTaskRequest) -> dict[str, Any]:
        """Return one task."""
        return {"task": jsonable_encoder(await self._ask(env_name, "get_task", request.split, request.index))}

    async def task_range(self, env_name: str, request: GetTaskRangeRequest) -> dict[str, Any]:
        """Return some tasks of a split."""
        arguments = (request.split, request.start, request.stop)
        return {"tasks": jsonable_encoder(await self._ask(env_name, "get_task_range", *arguments, shape=list))}

    async def _ask(
        self, env_name: str, method: str, *arguments: Any, shape: Callable[[Any], Any] = lambda found: found
    ) -> Any:
        """Call a method of the catalogue. A result that is made while it is read is read while the environment lives.

        Args:
            shape: Applied to the result, in the environment's thread.
        """
        if env_name.lower() != self._service.env_name.lower():
            raise HTTPException(404, f"unknown environment '{env_name}'")
        unsupported = HTTPException(501, f"{method} is not supported for this environment")

        def call(env: Any) -> Any:
            function = getattr(env, method, None)
            if not callable(function):
                raise NotImplementedError(method)
            found = function(*arguments)
            return found if inspect.isawaitable(found) or inspect.isasyncgen(found) else shape(found)

        try:
            async with self._service.manager.borrow() as session:
                found = await session.run(CALL, call)
                if inspect.isasyncgen(found):
                    return [item async for item in found]
                return shape(await found) if inspect.isawaitable(found) else found
        except NotImplementedError:
            raise unsupported from None
        except IndexError:
            raise HTTPException(400, "Invalid task index") from None
        except (KeyError, ValueError) as exc:  # how environments say that there is no such split
            raise HTTPException(400, f"{method}: {self._service.errors.text(exc)}") from exc


def _split(item: Any) -> Any:
    if isinstance(item, str):
        return {"name": item, "type": item if item in _SPLIT_TYPES else "validation"}
    return item.model_dump() if isinstance(item, BaseModel) else item
