"""The control routes of the proxy, for holders of the admin key. They are on TCP only, never on the agents' socket.

Knows rollouts and documents, and nothing of how calls are proxied. The published capture API has its own routes below
the same path, in `sessions_api.session_routes`; a server has one or the other.
"""

from __future__ import annotations

import asyncio
import hmac
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from pydantic import Field, ValidationError

from openenv.errors import CaptureError

from ..tasks.task import Budget, Dialect, Model
from . import export
from .captured_rollout import CapturedRollout
from .encoding import Json, load_object
from .inbound import AgentReply, AgentRequest, RequestRefused
from .records import read

if TYPE_CHECKING:
    from .capture_server import CaptureServer


# `NewSession` is a `Model` with a budget: one JSON object has both, and pydantic checks all fields at once. An unknown
# field is an error, because a misspelt limit would be no limit.


class NewSession(Model):
    """The body of `POST /sessions`: an endpoint as in `Model`, with other names for three fields, and its limits."""

    # Aliases of the published API, whose clients create sessions here as well.
    base_url: str = Field(alias="llm_url")
    name: str = Field(alias="model")
    dialect: Dialect = Field(default="openai_chat", alias="provider")
    session_id: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    max_model_calls: int | None = None
    max_completion_tokens: int | None = None
    max_seconds: float | None = Field(default=None, allow_inf_nan=False)

    def as_model(self) -> Model:
        """Return the endpoint of the session."""
        return Model.model_validate(self.model_dump(include=set(Model.model_fields)))

    def as_budget(self) -> Budget:
        """Return the budget of the session."""
        return Budget(
            max_calls=self.max_model_calls,
            max_completion_tokens=self.max_completion_tokens,
            max_seconds=self.max_seconds,
        )


# Which routes a request reaches:
#
#                      TCP                                     the sandboxes' unix socket
#   /sessions...       AdminRoutes, if the server has them     404 or 401, as any unknown path
#   anything else      AgentRoutes                             AgentRoutes


class AdminRoutes(ABC):
    """Answers requests below `/sessions` on TCP."""

    @abstractmethod
    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request; check the admin key first."""


def is_admin_path(path: str) -> bool:
    """Return whether a path is for the holder of the admin key."""
    return path == "/sessions" or path.startswith("/sessions/")


def has_admin_key(request: AgentRequest, admin_key: str) -> bool:
    """Return whether a request has the admin key; the comparison takes the same time for any key."""
    return hmac.compare_digest(request.key.encode("utf-8", "replace"), admin_key.encode())


class ControlRoutes(AdminRoutes):
    """Open, list, export and close rollouts.

    POST   /sessions                       GET  /sessions/{id}/rollout
    GET    /sessions                       GET  /sessions/{id}/trace_entries
    GET    /sessions/{id}                  DELETE /sessions/{id}
    """

    def __init__(self, server: CaptureServer, admin_key: str) -> None:
        self._server = server
        self._key = admin_key

    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request."""
        status = 200
        try:
            if not has_admin_key(request, self._key):
                raise RequestRefused(403 if request.key else 401, "this needs the admin key")
            answer = await self._answer(request)
        except RequestRefused as exc:
            status, answer = exc.status, {"error": {"message": str(exc), "code": exc.status}}
        except CaptureError as exc:
            status, answer = 409, {"error": {"message": str(exc), "code": exc.code}}
        await reply.send_json(answer, status)

    async def _answer(self, request: AgentRequest) -> Json:
        path, _, query = request.path.partition("?")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if len(parts) == 1:
            if request.method == "POST":
                return self._open(request)
            if request.method == "GET":
                return {"sessions": [_about(rollout) for rollout in self._server.rollouts()]}
            raise RequestRefused(405, "GET or POST")
        rollout = self._server.find(parts[1])
        if rollout is None:
            raise RequestRefused(404, f"unknown session '{parts[1]}'")
        if len(parts) == 2:
            if request.method == "GET":
                return _about(rollout)
            if request.method == "DELETE":
                await self._server.finish(rollout)
                return {"session_id": rollout.rollout_id, "closed": True}
            raise RequestRefused(405, "GET or DELETE")
        if len(parts) == 3 and request.method == "GET":
            return await asyncio.to_thread(self._export, rollout, parts[2], parse_qs(query))
        raise RequestRefused(404, "there is no such route")

    def _open(self, request: AgentRequest) -> Json:
        body = load_object(request.body)
        if body is None:
            raise RequestRefused(400, "the body must be a JSON object")
        try:
            session = NewSession.model_validate(body)
        except ValidationError as exc:
            problems = exc.errors(include_url=False, include_input=False, include_context=False)
            raise RequestRefused(422, str(problems)) from None
        capture = self._server.open(
            session.session_id,
            session.as_model(),
            budget=session.as_budget(),
            metadata=session.metadata,
        )
        return {"session_id": capture.rollout_id, "api_key": capture.key, "path": str(capture.path)}

    # In a thread: a recording of a long rollout takes seconds to read, and the loop has all calls.
    def _export(self, rollout: CapturedRollout, what: str, query: dict[str, list[str]]) -> Json:
        recording = read(rollout.recorder.folder)
        if what == "rollout":
            discarded = _flag(query, "include_discarded", default=True)
            messages = _flag(query, "include_messages", default=False)
            return export.document(recording, include_discarded=discarded, include_messages=messages)
        if what == "trace_entries":
            try:
                return {"entries": export.trace_entries(recording)}
            except ValueError as exc:
                raise RequestRefused(409, str(exc)) from None
        raise RequestRefused(404, "there is no such route")


def _about(rollout: CapturedRollout) -> Json:
    return {
        "session_id": rollout.rollout_id,
        "metadata": rollout.metadata,
        "model": rollout.model.name,
        "opened_at": rollout.opened_at,
        "closed_at": rollout.closed_at,
        "stats": asdict(rollout.stats()),
    }


def _flag(query: dict[str, list[str]], name: str, *, default: bool) -> bool:
    values = query.get(name)
    return default if not values else values[-1].lower() in ("1", "true", "yes")
