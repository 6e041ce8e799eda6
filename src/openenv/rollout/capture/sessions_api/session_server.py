"""`SessionServer`: the capture server with the sessions of the published capture API.

A session is an ID, which is the agent's key, and settings; its rollout is one of the capture server's. Its calls are
proxied and recorded like any other. This module knows how a session becomes a rollout and how long it lives;
`session_routes` has the admin routes, `session_app` the published constructors and the command.
"""

# A session and its rollout:
#
#   registry.create ----> session without a rollout
#                           |                     |
#        first call with the ID as its key        | `reserve`, then `open` by the engine of a Harbor rollout,
#                           |                     | with a key of the rollout for the agent
#                           v                     v
#                       LiveSession: the rollout's records become nodes of the graph
#                           |
#   registry.delete, or the server stops ----> finished: calls end, the graph is read to its end
#                                              (a temporary folder of records is removed)

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tasks.task import Budget, Model
from ..agent_routes import AgentRoutes
from ..call_parts import Services
from ..capture_server import Capture, CaptureOptions, CaptureServer
from ..captured_rollout import CapturedRollout, EndpointTraits, RolloutRegistry
from ..control_routes import is_admin_path
from ..dialects import AGENT_DIALECTS, Route
from ..encoding import Json
from ..inbound import AgentReply, AgentRequest, RequestRefused
from ..upstream_errors import UpstreamError
from .capture_sessions import CaptureSession, SessionRegistry
from .detection import detect
from .engine_client import CAPTURE_LEVELS, InferenceClient
from .live_session import LiveSession, SessionEndpoint
from .session_routes import CaptureSessionRoutes, read_object
from .upstream_pool import UpstreamPool

MAX_OUTPUT_TOKENS = 8192
SESSION_TTL_S = 24 * 3600.0
SWEEP_S = 60.0
_UNKNOWN_KEY = "unknown API key; register a session via POST /sessions"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The endpoint of sessions that name none, and the limits of sessions; see `session_app.create_app`."""

    llm_url: str = ""
    model: str | None = None
    engine: str = ""
    max_output_tokens: int | None = MAX_OUTPUT_TOKENS
    api_key: str | None = None
    auth_header: str = "Authorization"
    provider: str = "openai"
    capture_level: str = "tokens"
    admin_key: str | None = None
    max_model_calls: int = 0
    session_ttl_s: float | None = SESSION_TTL_S
    require_registered: bool = True

    @property
    def level(self) -> str:
        """Return the capture level of the endpoint; Anthropic's has text only."""
        return "text" if self.provider == "anthropic" else self.capture_level

    def client(self) -> InferenceClient | None:
        """Return a client of the endpoint; None if every session must name its own."""
        if not self.llm_url:
            return None
        return InferenceClient(
            self.llm_url,
            served_model=self.model,
            api_key=self.api_key,
            auth_header=self.auth_header,
            capture_level=self.level,
            provider=self.provider,
        )


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A session, and the endpoint for the rollout that an engine is about to open for it."""

    session: CaptureSession
    endpoint: SessionEndpoint


class SessionServer(CaptureServer):
    """A capture server with sessions.

    Args:
        options: The endpoint of sessions that name none, and the limits of sessions.
        listen: Where to listen; an ASGI server that calls `answer` needs none.
        root: The folder of the records; None for a temporary one.

    Raises:
        ValueError: The capture level is unknown.
    """

    def __init__(
        self, options: SessionOptions, listen: CaptureOptions | None = None, *, root: Path | None = None
    ) -> None:
        if options.capture_level not in CAPTURE_LEVELS:
            raise ValueError(f"capture_level must be one of {', '.join(CAPTURE_LEVELS)}, not {options.capture_level!r}")
        super().__init__(root, listen)
        self.session_options = options
        self.capture_level = options.level
        self.registry = SessionRegistry(require_registered=options.require_registered)
        self.registry.on_delete = self._deleted
        self.registry.server = self
        self.inference = options.client()
        self.upstreams = UpstreamPool(default_client=self.inference, default_level=self.capture_level)
        self.instance_id = uuid.uuid4().hex
        self._session_routes = CaptureSessionRoutes(self)
        self._admin_routes = self._session_routes
        self._agent_routes = SessionAgentRoutes(self, self._registry, self._services)
        self._live: dict[str, LiveSession] = {}  # by the session's ID
        self._live_by_rollout: dict[CapturedRollout, LiveSession] = {}
        self._reserved: dict[str, _Reservation] = {}  # by the ID of the rollout that is to be opened
        self._swept_at = time.monotonic()

    # from a session to its rollout

    async def live_session(self, session: CaptureSession) -> LiveSession:
        """Return a session with its rollout; the first call of a session opens it.

        Raises:
            RequestRefused: The session has no endpoint, or its endpoint cannot train as it asks.
            CaptureError: The records cannot be made.
        """
        live = self._live.get(session.session_id)
        if live is not None:
            return live
        endpoint = await self._endpoint_of(session)
        # The probe of an endpoint takes seconds, and agents make their first calls at the same time.
        live = self._live.get(session.session_id)
        if live is not None:
            return live
        name = session.session_id
        if self.find(name) is not None or (self.root / name).exists():  # a deleted session of the same ID
            name = f"{name[:100]}-{secrets.token_hex(4)}"
        capture = super().open(
            name,
            endpoint.model(session, self._cap(session)),
            budget=Budget(max_calls=session.max_model_calls or None),
            traits=endpoint.traits(session),
            key=session.session_id,
        )
        return self._attach(session, endpoint, capture)

    # How a Harbor rollout uses one proxy:
    #
    #   adapter    session = registry.create(...)
    #              model = await server.reserve(session, "oe-sum-1a2b")
    #   engine     capture = server.open("oe-sum-1a2b", model)         -> a LiveSession, with capture.key for the agent
    #   agent      calls with capture.key; the session's ID never enters the sandbox
    #   engine     capture.close()                                     -> `finish`: the session reads the rest
    #   adapter    export_session(session), then registry.delete(...)
    async def reserve(self, session: CaptureSession, rollout_id: str) -> Model:
        """Return a session's model, and let the rollout that is opened as `rollout_id` next be the session's.

        For an engine that opens its rollouts itself: its agent's calls are proxied once, and one set of records
        serves the rollout and the session. May be called on any event loop.

        Raises:
            RequestRefused: The session has no endpoint, or its endpoint cannot train as it asks.
        """
        endpoint = await self._endpoint_of(session)
        self._reserved[rollout_id] = _Reservation(session, endpoint)
        return endpoint.model(session, self._cap(session))

    def open(
        self,
        rollout_id: str | None,
        model: Model,
        *,
        budget: Budget | None = None,
        metadata: Mapping[str, Any] | None = None,
        traits: EndpointTraits | None = None,
        key: str | None = None,
    ) -> Capture:
        """Open a rollout, and attach it to the session that reserved it, if any; see `CaptureServer.open`."""
        reserved = self._reserved.pop(rollout_id or "", None)
        if reserved is not None:
            traits = reserved.endpoint.traits(reserved.session)
        capture = super().open(rollout_id, model, budget=budget, metadata=metadata, traits=traits, key=key)
        if reserved is not None:
            self._attach(reserved.session, reserved.endpoint, capture)
        return capture

    def _attach(self, session: CaptureSession, endpoint: SessionEndpoint, capture: Capture) -> LiveSession:
        live = LiveSession(session, capture.rollout, capture.path, endpoint.level)
        self._live[session.session_id] = self._live_by_rollout[capture.rollout] = live
        return live

    async def _endpoint_of(self, session: CaptureSession) -> SessionEndpoint:
        if session.upstream is None:
            client, level = self.upstreams.default
        else:
            client, level = await self.upstreams.resolve(session.upstream)
        if client is None:
            text = "name one as `llm_url` when the session is made, or give the server one"
            raise RequestRefused(503, f"no inference engine for this session: {text}")
        session.capture_level = session.capture_level or level
        if session.capture_level != "tokens" and (session.sampling or session.purpose == "train"):
            raise RequestRefused(400, "training sampling requires an endpoint with token capture")
        return SessionEndpoint(client, session.capture_level)

    # `max_output_tokens` is metadata of a session, as published clients set it.
    def _cap(self, session: CaptureSession) -> int | None:
        """Return the token limit of an answer: the smaller limit of session and server."""
        limit = session.metadata.get("max_output_tokens")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise RequestRefused(400, "session max_output_tokens must be a positive integer")
        caps = [cap for cap in (limit, self.session_options.max_output_tokens) if cap]
        return min(caps) if caps else None

    # calls

    def is_known(self, key: str) -> bool:
        """Return whether a rollout or a session has this key, or any key may start a session."""
        return super().is_known(key) or self.registry.get(key) is not None or not self.registry.require_registered

    def call_begins(self, rollout: CapturedRollout) -> None:
        """Note that a session is in use."""
        live = self._live_by_rollout.get(rollout)
        if live is not None:
            live.used_at = time.monotonic()

    def call_ended(self, rollout: CapturedRollout) -> None:
        """Let other sessions leave out the parameters that the endpoint refused in this one.

        A session with its own endpoint keeps them to itself: it does not share its client.
        """
        live = self._live_by_rollout.get(rollout)
        if live is None or live.session.upstream is not None or self.inference is None:
            return
        if rollout.endings.get("complete"):
            self.inference.note_refused(live.refused())

    def health(self, request: AgentRequest) -> Json:
        """Return the answer to a health check; endpoints of sessions are listed for the holder of the admin key."""
        options, client = self.session_options, self.inference
        return {
            "status": "ok",
            "instance": self.instance_id,
            "upstream": options.llm_url,
            "engine": options.engine or "unknown",
            "model": options.model,
            "sessions": len(self.registry.list_ids()),
            "require_registered": self.registry.require_registered,
            "capture_level": self.capture_level,
            "rollout_type": "train" if self.capture_level == "tokens" else "eval",
            "upstreams": self.upstreams.known() if self._session_routes.is_admin(request) else [],
            "upstream_auth": client is not None and client.api_key is not None,
            "param_fixes": [str(fix) for fix in client.param_fixes] if client is not None else [],
        }

    # the end of sessions

    def sweep(self) -> None:
        """Delete sessions that were not used for long, and forget the keys of endpoints without a session."""
        super().sweep()
        now, ttl_s = time.monotonic(), self.session_options.session_ttl_s
        if ttl_s is None or now - self._swept_at < min(SWEEP_S, ttl_s):
            return
        self._swept_at = now
        for session_id in self.registry.list_ids():
            session, live = self.registry.get(session_id), self._live.get(session_id)
            if session is None or (live is not None and (live.rollout.active or live.rollout.waiting)):
                continue
            idle_s = now - live.used_at if live is not None else time.time() - session.created_at
            if idle_s > ttl_s:
                self.registry.delete(session_id)
        sessions = [self.registry.get(session_id) for session_id in self.registry.list_ids()]
        self.upstreams.keep({session.upstream for session in sessions if session is not None and session.upstream})

    def _deleted(self, session: CaptureSession) -> None:
        """End a session that was deleted, from any thread; its records go with a temporary folder."""
        self._reserved = {name: entry for name, entry in self._reserved.items() if entry.session is not session}
        live = self._live.pop(session.session_id, None)
        if live is not None:
            live.rollout.revoked = True  # at once: the loop may take a moment to end the calls under way
            self.schedule(self._remove(live))

    # `finish` first: it reads the records to their end, for callers that still hold the session.
    async def _remove(self, live: LiveSession) -> None:
        await self.finish(live.rollout)
        if self.has_temporary_root:
            await asyncio.to_thread(shutil.rmtree, live.path, ignore_errors=True)

    async def finish(self, rollout: CapturedRollout) -> None:
        """Revoke a rollout's key and release memory; the session keeps its graph, even if its records are removed."""
        await super().finish(rollout)
        live = self._live_by_rollout.pop(rollout, None)
        if live is not None:
            await asyncio.to_thread(live.detach)

    async def on_stop(self) -> None:
        """End all calls; the sessions keep their graphs."""
        await super().on_stop()
        self._live.clear()
        self.upstreams.close()
        if self.inference is not None:
            await self.inference.aclose()


class SessionAgentRoutes(AgentRoutes):
    """Answers agents with the ID of a session, or the key of a rollout, as their key."""

    def __init__(self, server: SessionServer, registry: RolloutRegistry, services: Services) -> None:
        super().__init__(registry, services)
        self._server = server

    def target_of(self, request: AgentRequest) -> Route | None:
        """Return the dialect of a request. POST to an unknown path is a model call, too: its body shows the dialect."""
        path = request.route_path
        if is_admin_path(path):  # on the socket of sandboxes; on TCP it does not get here
            raise RequestRefused(404, f"there is no {request.method} {path} here")
        target = super().target_of(request)
        if target is not None or request.method != "POST":
            return target
        return Route(AGENT_DIALECTS[detect(path, request.headers, read_object(request.body)).value])

    def health(self, request: AgentRequest) -> Json:
        """Return the answer to a health check."""
        return self._server.health(request)

    async def answer(self, request: AgentRequest, reply: AgentReply, target: Route | None) -> None:
        """Answer a model call or a question for models; see `AgentRoutes.answer`."""
        path = request.route_path
        if request.method == "GET" and path.rstrip("/").endswith("/models"):
            await reply.send_json(await self._models(request))
        elif target is None or request.method != "POST":
            raise RequestRefused(404, f"there is no {request.method} {path} here")
        elif target.kind == "count":  # costs nothing, so it needs no key
            await reply.send_json(target.dialect.count_tokens(read_object(request.body)))
        else:
            await self.post(request, reply, await self._rollout_of(request), target)

    async def post(self, request: AgentRequest, reply: AgentReply, rollout: CapturedRollout, target: Route) -> None:
        """Proxy a model call; see `AgentRoutes.post`."""
        self._server.call_begins(rollout)
        await super().post(request, reply, rollout, target)
        self._server.call_ended(rollout)

    async def _rollout_of(self, request: AgentRequest) -> CapturedRollout:
        rollout = self._registry.by_key(request.key)
        if rollout is None:
            session = self._server.registry.resolve({"authorization": f"Bearer {request.key}"}, {})
            if session is None:
                raise RequestRefused(401, _UNKNOWN_KEY)
            rollout = (await self._server.live_session(session)).rollout
        if rollout.revoked:
            raise RequestRefused(401, _UNKNOWN_KEY)
        return rollout

    async def _models(self, request: AgentRequest) -> Json:
        session = self._server.registry.get(request.key)
        upstream = session.upstream if session is not None else None
        if upstream is not None:
            return {"object": "list", "data": [{"id": upstream.model, "object": "model", "owned_by": "openenv"}]}
        if self._server.inference is None:
            return {"object": "list", "data": []}
        try:
            return await self._server.inference.list_models()
        except UpstreamError as exc:
            raise RequestRefused(502, str(exc)) from None
