"""The admin routes of the published capture API: create, list, read and delete sessions.

    POST   /sessions                      GET    /sessions/{id}/rollout
    GET    /sessions                      GET    /sessions/{id}/trace_entries
    GET    /sessions/{id}                 DELETE /sessions/{id}

Knows the fields of these requests and answers, and nothing of calls: the server has the sessions and their endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote

from ..control_routes import AdminRoutes, has_admin_key
from ..dialects import AGENT_DIALECTS
from ..encoding import Json, load_object
from ..inbound import AgentReply, AgentRequest, RequestRefused
from .capture_sessions import CaptureSession, UpstreamAddress, rollout_type_for
from .documents import export_session, to_trace_entries

if TYPE_CHECKING:
    from .session_server import SessionServer

# Answers of errors, as published clients expect them:
#
#   400   a field is wrong, or the endpoint does not support the purpose     {"error": {"message": ...}}
#   401   the admin key is missing or wrong                                     {"error": {"message": ...}}
#   404   the session is unknown                                                {"error": "unknown session"}
#   409   the ID is taken, or the session cannot be trained on                  {"error": "ValueError: ..."}
RESERVED = ("session_id", "upstream", "capture_level", "max_model_calls", "sampling", "purpose", "eval_sampling")
"""Names that a session's metadata cannot have, because they are parameters of the session."""


class CaptureSessionRoutes(AdminRoutes):
    """Answers the holder of the admin key, or any caller if the server has no admin key."""

    def __init__(self, server: SessionServer) -> None:
        self._server = server

    def is_admin(self, request: AgentRequest) -> bool:
        """Return whether a request may use these routes."""
        expected = self._server.session_options.admin_key
        return not expected or has_admin_key(request, expected)

    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request."""
        try:
            if not self.is_admin(request):
                raise RequestRefused(401, "this route requires the capture admin key")
            status, answer = await self._answer(request)
        except RequestRefused as exc:
            status, answer = exc.status, AGENT_DIALECTS["openai_chat"].error(exc.status, str(exc))
        await reply.send_json(answer, status)

    async def _answer(self, request: AgentRequest) -> tuple[int, Json]:
        registry = self._server.registry
        parts = [unquote(part) for part in request.route_path.strip("/").split("/")]
        if len(parts) == 1 and request.method == "POST":
            return 200, await self._create(request)
        if len(parts) == 1 and request.method == "GET":
            # In a thread, as all views: the graphs of sessions are brought up to date from their files.
            return 200, {"sessions": await asyncio.to_thread(registry.summary)}
        if len(parts) == 2 and request.method == "DELETE":
            return 200, {"deleted": registry.delete(parts[1])}
        if request.method != "GET" or len(parts) not in (2, 3):
            raise RequestRefused(405 if len(parts) < 3 else 404, "there is no such route")
        session = registry.get(parts[1])
        if session is None:
            return 404, {"error": "unknown session"}
        view = self._view(parts[2:])
        try:
            return 200, await asyncio.to_thread(view, session, parse_qs(request.path.partition("?")[2]))
        except ValueError as exc:  # for example, an evaluation has no trace entries
            return 409, {"error": f"{type(exc).__name__}: {exc}", "session_id": session.session_id}

    async def _create(self, request: AgentRequest) -> Json:
        payload = read_object(request.body) if request.body else {}
        metadata = payload.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise RequestRefused(400, "metadata must be a JSON object")
        taken = sorted(set(RESERVED).intersection(metadata or {}))
        if taken:
            raise RequestRefused(400, f"metadata cannot include reserved keys: {', '.join(taken)}")
        # The endpoint is probed before the session exists: its level decides whether the purpose is possible, and a
        # session that cannot train should fail here instead of after hours of calls.
        upstream, level = await self._named_endpoint(payload)
        server, options = self._server, self._server.session_options
        purpose, session_id = payload.get("purpose", "auto"), payload.get("session_id")
        # The registry refuses a taken ID as well; here the status is 409.
        if isinstance(session_id, str) and server.registry.get(session_id.strip()) is not None:
            raise RequestRefused(409, f"there is a session {session_id.strip()!r} already")
        try:
            kind = rollout_type_for(purpose, level or server.capture_level)
            session = server.registry.create(
                session_id,
                upstream=upstream,
                capture_level=level,
                purpose=purpose,
                eval_sampling=payload.get("eval_sampling"),
                max_model_calls=payload.get("max_model_calls", options.max_model_calls),
                sampling=payload.get("sampling"),
                **(metadata or {}),
            )
        except (ValueError, TypeError) as exc:
            raise RequestRefused(400, str(exc)) from None
        return {
            "session_id": session.session_id,
            "capture_level": session.capture_level or server.capture_level,
            "rollout_type": kind,
            "max_model_calls": session.max_model_calls,
            "llm_url": upstream.llm_url if upstream is not None else options.llm_url,
            "model": upstream.model if upstream is not None else options.model,
        }

    async def _named_endpoint(self, payload: Json) -> tuple[UpstreamAddress | None, str]:
        """Return the endpoint that a new session names, and its capture level; None for the server's own endpoint."""
        llm_url = str(payload.get("llm_url") or "").strip()
        if not llm_url:
            return None, ""
        upstream = UpstreamAddress(
            llm_url,
            model=str(payload.get("model") or "").strip(),
            api_key=payload.get("api_key") or None,
            auth_header=str(payload.get("auth_header") or "Authorization"),
            provider=str(payload.get("provider") or "openai"),
        )
        try:
            client, level = await self._server.upstreams.resolve(upstream)
        except ValueError as exc:  # the provider is unknown
            raise RequestRefused(400, str(exc)) from None
        return replace(upstream, model=client.served_model or upstream.model), level

    # the views of a session

    # Views read the records of a session, which may be long: `_answer` runs them in a thread.
    def _view(self, parts: list[str]) -> Callable[[CaptureSession, dict[str, list[str]]], Json]:
        if not parts:
            return self._status
        views = {"rollout": self._rollout, "trace_entries": self._trace_entries}
        if parts[0] not in views:
            raise RequestRefused(404, "there is no such route")
        return views[parts[0]]

    def _status(self, session: CaptureSession, query: dict[str, list[str]]) -> Json:
        return {
            "session_id": session.session_id,
            "idle_s": round(session.idle_seconds, 1),
            "upstream_errors": session.upstream_errors,
            **session.graph.stats(),
        }

    def _rollout(self, session: CaptureSession, query: dict[str, list[str]]) -> Json:
        def flag(name: str) -> bool:
            return query.get(name, ["false"])[-1].lower() in ("1", "true", "yes", "on")

        return export_session(
            session,
            include_discarded=flag("include_discarded"),
            include_messages=flag("include_messages"),
            capture_level=session.capture_level or self._server.capture_level,
        )

    def _trace_entries(self, session: CaptureSession, query: dict[str, list[str]]) -> Json:
        document = export_session(session, capture_level=session.capture_level or self._server.capture_level)
        return {"session_id": session.session_id, "entries": to_trace_entries(session.graph, document)}


def read_object(body: bytes) -> Json:
    """Read a request's body.

    Raises:
        RequestRefused: The body is not a JSON object.
    """
    parsed = load_object(body)
    if parsed is None:
        raise RequestRefused(400, "body must be a JSON object")
    return parsed
