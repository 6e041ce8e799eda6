"""Routes that are documented by FastAPI and answered by a bare ASGI handler.

The document comes from a signature, the hot path pays for none of it. Knows FastAPI's route class only.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from ..errors import SessionCapacityError
from ..types import SessionInfo
from .asgi import Handler, Receive, Scope, Send


class ErrorBody(BaseModel):
    """A refusal: what happened, with a stable code."""

    detail: str
    code: str


class SessionClosed(BaseModel):
    """A session has ended."""

    session_id: str
    closed: bool = True


class EpisodeView(BaseModel):
    """What the tool calls of an agent have led to, since the last reset."""

    steps: int
    reward: float | None
    total_reward: float
    done: bool


class SessionView(SessionInfo):
    """A session, as whoever looks after it sees it."""

    state: str
    episode: EpisodeView


class AdmittingRoute(APIRoute):
    """A route whose handler borrows an environment; a server that lends none answers 503."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI builds."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except SessionCapacityError as exc:
                body = {"detail": str(exc), "code": exc.code, **exc.details}
                return JSONResponse(body, 503, headers={"retry-after": "1"})

        return handle


@dataclass(frozen=True)
class GetEndpointConfig:
    """A GET route: where it is, what it calls, what it returns."""

    path: str
    handler: Callable[[], Any]
    response_model: type[Any]
    tag: str
    summary: str
    description: str


def register_get_endpoints(app: FastAPI, configs: Sequence[GetEndpointConfig]) -> None:
    """Add several GET routes to an application."""
    for config in configs:
        app.router.add_api_route(
            config.path,
            config.handler,
            methods=["GET"],
            response_model=config.response_model,
            tags=[config.tag],
            summary=config.summary,
            description=config.description,
            route_class_override=AdmittingRoute,
        )


class DocumentedRoute(APIRoute):
    """A route whose `signature` is for the OpenAPI document and whose requests go straight to `handler`.

    It is named after what it does, which names the operation in the document and in clients made from that.
    """

    def __init__(self, path: str, signature: Callable[..., Any], handler: Handler, **kwargs: Any) -> None:
        kwargs.setdefault("name", signature.__name__.lstrip("_").removesuffix("_signature"))
        super().__init__(path, signature, **kwargs)
        self.app = handler
        self._methods = frozenset(self.methods or ())

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as any route; the common exact path needs no regular expression."""
        if scope["type"] == "http" and scope["path"] == self.path and not scope.get("root_path"):
            match = Match.FULL if scope["method"] in self._methods else Match.PARTIAL
            return match, {"endpoint": self.endpoint, "path_params": {}, "route": self}
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["method"] in self._methods:
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)
