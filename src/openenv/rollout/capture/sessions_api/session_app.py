"""The capture server of the published interface: one port, any number of sessions, each known by its key.

    GET  /health                         POST   /sessions                       the holder of the admin key,
    GET  /v1/models                      GET    /sessions                       or any caller where there is none
    POST any path: a model call          GET    /sessions/{id}
         of the session whose id         GET    /sessions/{id}/rollout
         is the request's key            GET    /sessions/{id}/trace_entries
                                         DELETE /sessions/{id}

Calls are carried and recorded as everywhere in `openenv.rollout.capture`: streamed as they come, on disk first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import secrets
import shutil
import signal
import sys
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, unquote

from fastapi import FastAPI
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from openenv import settings
from openenv.errors import CaptureError
from openenv.protocol.addresses import is_loopback

from ...scratch import scratch
from ..capture_server import AgentRoutes
from ..captured_rollout import RolloutRegistry
from ..dialects import AGENT_DIALECTS, Route, route
from ..encoding import Json, load_object
from ..inbound import AgentReply, AgentRequest, InboundLimits, RequestRefused
from ..listener import ProxyListener
from ..model_call import Services
from ..outbound import Endpoints
from ..records import JournalFull
from ..upstream_errors import UpstreamError
from .capture_sessions import (
    CaptureSession,
    SessionRegistry,
    UpstreamAddress,
    extract_api_key,
    rollout_type_for,
)
from .detection import detect
from .documents import export_session, to_trace_entries
from .engine_client import CAPTURE_LEVELS, InferenceClient
from .engine_probe import list_models, validate_llm
from .live_session import LiveSession, open_rollout

log = logging.getLogger("openenv.rollout.capture")

PORT = 8100
MAX_OUTPUT_TOKENS = 8192
SESSION_TTL_S = 24 * 3600.0
SWEEP_S = 60.0
RESERVED = ("session_id", "upstream", "capture_level", "max_model_calls", "sampling", "purpose", "eval_sampling")
"""What a session's metadata cannot have: parameters of its own."""


class UpstreamPool:
    """The endpoints of sessions: each is asked once what it names, by the first session that has it.

    Args:
        default_client: The server's own endpoint.
        default_level: What that names.
    """

    def __init__(self, *, default_client: InferenceClient | None, default_level: str) -> None:
        self._default = (default_client, default_level)
        self._known: dict[tuple[str, ...], tuple[InferenceClient, str]] = {}
        self._pending: dict[tuple[str, ...], Future[tuple[InferenceClient, str]]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="openenv-capture-probe")

    @property
    def default(self) -> tuple[InferenceClient | None, str]:
        """Return the server's own endpoint, and what it names."""
        return self._default

    def known(self) -> list[Json]:
        """Return the endpoints that were asked, without their keys."""
        with self._lock:
            clients = {id(client): (key[0], client, level) for key, (client, level) in self._known.items()}
        return [
            {"llm_url": url, "model": client.served_model or "", "capture_level": level}
            for url, client, level in clients.values()
        ]

    def forget(self, upstream: UpstreamAddress) -> None:
        """Forget an endpoint and its key; the next session that has it asks again."""
        with self._lock:
            known = self._known.get(upstream.cache_key)
            self._known = {key: value for key, value in self._known.items() if value is not known}

    def keep(self, upstreams: Collection[UpstreamAddress]) -> None:
        """Forget all endpoints but these."""
        keys = {upstream.cache_key for upstream in upstreams}
        with self._lock:
            used = [known for key, known in self._known.items() if key in keys]
            self._known = {key: known for key, known in self._known.items() if known in used}

    async def resolve(self, upstream: UpstreamAddress) -> tuple[InferenceClient, str]:
        """Return a client of an endpoint, and what it names; one that cannot be asked counts as `text`."""
        key = upstream.cache_key
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                return known
            pending = self._pending.get(key)
            if pending is None:
                pending = self._pending[key] = self._threads.submit(self._ask, upstream)
        # Other sessions wait for the same answer: one that is cancelled must not take it from them.
        return await asyncio.shield(asyncio.wrap_future(pending))

    def _ask(self, upstream: UpstreamAddress) -> tuple[InferenceClient, str]:
        key = upstream.cache_key
        try:
            model, level = _probed(upstream)
            client = InferenceClient(
                upstream.llm_url,
                served_model=model,
                api_key=upstream.api_key,
                auth_header=upstream.auth_header,
                capture_level=level,
                provider=upstream.provider,
            )
            with self._lock:
                # Under both names: a session that named no model goes on with the one that was found.
                self._known[key] = self._known[replace(upstream, model=model).cache_key] = (client, level)
            return client, level
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown(wait=False)


def _probed(upstream: UpstreamAddress) -> tuple[str, str]:
    """Return an endpoint's model, and what it names."""
    model = upstream.model
    if not model:
        served = list_models(upstream.llm_url, api_key=upstream.api_key, auth_header=upstream.auth_header)
        model = served[0] if len(served) == 1 else ""
    if not model:
        log.warning("%s does not serve exactly one model, and none was named", upstream.llm_url)
        return "", "text"
    report = validate_llm(
        upstream.llm_url,
        model,
        provider=upstream.provider,
        api_key=upstream.api_key,
        auth_header=upstream.auth_header,
    )
    level = report.capture_level or "text"
    log.info("%s (%s) names %s", upstream.llm_url, model, level)
    return model, level


@dataclass(frozen=True)
class AppOptions:
    """What a capture server is made of; see `create_app`."""

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


class CaptureSessionRoutes:
    """Answers agents, and the holder of the admin key.

    Args:
        options: The server's options.
        registry: Its sessions.
        root: Where records go, a folder per session; None for a temporary folder that is removed in the end.
    """

    def __init__(self, options: AppOptions, registry: SessionRegistry, root: Path | None = None) -> None:
        if options.capture_level not in CAPTURE_LEVELS:
            raise ValueError(f"capture_level must be one of {', '.join(CAPTURE_LEVELS)}, not {options.capture_level!r}")
        self.options = options
        self.level = "text" if options.provider == "anthropic" else options.capture_level
        self.registry = registry
        self.instance_id = uuid.uuid4().hex
        self.inference = self._default_client()
        self.upstreams = UpstreamPool(default_client=self.inference, default_level=self.level)
        self._services = Services(Endpoints(), "x-policy-version")
        self._agent_routes = AgentRoutes(RolloutRegistry(0.0), self._services)
        self._live: dict[str, LiveSession] = {}
        self._is_temporary = root is None
        self._scratch = contextlib.ExitStack()
        weakref.finalize(self, self._scratch.close)  # for an application whose server has no lifespan
        self._swept_at = time.monotonic()
        self._root = root
        self._loop: asyncio.AbstractEventLoop | None = None
        registry.on_delete = self._deleted

    def _default_client(self) -> InferenceClient | None:
        options = self.options
        if not options.llm_url:
            return None
        return InferenceClient(
            options.llm_url,
            served_model=options.model,
            api_key=options.api_key,
            auth_header=options.auth_header,
            capture_level=self.level,
            provider=options.provider,
        )

    def is_known(self, key: str) -> bool:
        """Say whether requests with a key may be large."""
        return self.registry.get(key) is not None or not self.registry.require_registered

    async def handle(self, request: AgentRequest, reply: AgentReply, *, is_sandbox: bool = False) -> None:
        """Answer one request.

        Args:
            request: The request.
            reply: Its answer.
            is_sandbox: Whether it comes from a sandbox: then there are no routes for the holder of the admin key.
        """
        self._loop = asyncio.get_running_loop()
        self._sweep()
        path = request.path.partition("?")[0]
        dialect = AGENT_DIALECTS["openai_chat"]
        try:
            if path == "/sessions" or path.startswith("/sessions/"):
                if is_sandbox:
                    raise RequestRefused(404, f"there is no {request.method} {path} here")
                await self._handle_session(request, reply)
            elif request.method == "GET" and path in ("/health", "/healthz"):
                await reply.send_json(self._health(request))
            elif request.method == "GET" and path.rstrip("/").endswith("/models"):
                await reply.send_json(await self._models(request))
            elif request.method != "POST":
                raise RequestRefused(404, f"there is no {request.method} {path} here")
            else:
                target = route(path)
                if target is None:
                    api_type = detect(path, request.headers, _object(request.body))
                    target = Route(AGENT_DIALECTS[api_type.value])
                dialect = target.dialect
                await self._call(request, reply, target)
        except RequestRefused as exc:
            await reply.send_json(dialect.error(exc.status, str(exc)), exc.status)
        except (JournalFull, CaptureError) as exc:
            await reply.send_json(dialect.error(507, f"this call could not be recorded: {exc}"), 507)

    # agents

    async def _call(self, request: AgentRequest, reply: AgentReply, target: Route) -> None:
        if target.kind == "count":
            await reply.send_json(target.dialect.count_tokens(_object(request.body)))
            return
        session = self.registry.resolve({**request.headers, "authorization": f"Bearer {request.key}"}, {})
        if session is None:
            raise RequestRefused(401, "unknown API key; register a session via POST /sessions")
        live = await self._live_session(session)
        live.used_at = time.monotonic()
        await self._agent_routes.post(request, reply, live.rollout, target)
        self._keep_fixes(session, live)

    async def _live_session(self, session: CaptureSession) -> LiveSession:
        """Return a session's rollout; the first call of a session begins it.

        Raises:
            RequestRefused: the session has no endpoint that fits.
            CaptureError: the records cannot be made.
        """
        live = self._live.get(session.session_id)
        if live is not None:
            return live
        client, level = await self._endpoint_of(session)
        if client is None:
            text = "name one as `llm_url` when the session is made, or give the server one"
            raise RequestRefused(503, f"no inference engine for this session: {text}")
        session.capture_level = session.capture_level or level
        if session.capture_level != "tokens" and (session.sampling or session.purpose == "train"):
            raise RequestRefused(400, "training sampling requires an endpoint with token capture")
        live = self._live.get(session.session_id)  # another call may have begun it meanwhile
        if live is None:
            folder = self._folder() / session.session_id
            if folder.exists():  # of a session that was deleted
                folder = folder.with_name(f"{session.session_id}-{secrets.token_hex(4)}")
            live = open_rollout(session, client, level=session.capture_level, cap=self._cap(session), folder=folder)
            self._live[session.session_id] = live
        return live

    async def _endpoint_of(self, session: CaptureSession) -> tuple[InferenceClient | None, str]:
        if session.upstream is None:
            return self.upstreams.default
        return await self.upstreams.resolve(session.upstream)

    def _cap(self, session: CaptureSession) -> int | None:
        own = session.metadata.get("max_output_tokens")
        if own is not None and (isinstance(own, bool) or not isinstance(own, int) or own < 1):
            raise RequestRefused(400, "session max_output_tokens must be a positive integer")
        caps = [cap for cap in (own, self.options.max_output_tokens) if cap]
        return min(caps) if caps else None

    def _folder(self) -> Path:
        if self._root is None:
            self._root = self._scratch.enter_context(scratch())
        return self._root

    def _keep_fixes(self, session: CaptureSession, live: LiveSession) -> None:
        """Have other sessions of an endpoint leave out what it turned down in this one."""
        if session.upstream is None and self.inference is not None and live.rollout.endings.get("complete"):
            self.inference.note_refused(live.refused())

    async def _models(self, request: AgentRequest) -> Json:
        session = self.registry.get(extract_api_key(request.headers))
        upstream = session.upstream if session is not None else None
        if upstream is not None:
            return {"object": "list", "data": [{"id": upstream.model, "object": "model", "owned_by": "openenv"}]}
        if self.inference is None:
            return {"object": "list", "data": []}
        try:
            return await self.inference.list_models()
        except UpstreamError as exc:
            raise RequestRefused(502, str(exc)) from None

    def _health(self, request: AgentRequest) -> Json:
        options, client = self.options, self.inference
        return {
            "status": "ok",
            "instance": self.instance_id,
            "upstream": options.llm_url,
            "engine": options.engine or "unknown",
            "model": options.model,
            "sessions": len(self.registry.list_ids()),
            "require_registered": self.registry.require_registered,
            "capture_level": self.level,
            "rollout_type": "train" if self.level == "tokens" else "eval",
            "upstreams": self.upstreams.known() if self._is_admin(request) else [],
            "upstream_auth": client is not None and client.api_key is not None,
            "param_fixes": [str(fix) for fix in client.param_fixes] if client is not None else [],
        }

    # the holder of the admin key

    def _is_admin(self, request: AgentRequest) -> bool:
        expected = self.options.admin_key
        if not expected:
            return True
        key = extract_api_key(request.headers) or ""
        return hmac.compare_digest(key.encode("utf-8", "replace"), expected.encode())

    async def _handle_session(self, request: AgentRequest, reply: AgentReply) -> None:
        if not self._is_admin(request):
            raise RequestRefused(401, "this route requires the capture admin key")
        path, _, query = request.path.partition("?")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if len(parts) == 1 and request.method == "POST":
            await reply.send_json(await self._create(request))
        elif len(parts) == 1 and request.method == "GET":
            await reply.send_json({"sessions": await asyncio.to_thread(self.registry.summary)})
        elif len(parts) == 2 and request.method == "DELETE":
            await reply.send_json({"deleted": self.registry.delete(parts[1])})
        elif request.method == "GET" and len(parts) in (2, 3):
            session = self.registry.get(parts[1])
            if session is None:
                await reply.send_json({"error": "unknown session"}, 404)
                return
            views = {"rollout": self._rollout_view, "trace_entries": self._trace_view}
            view = self._status_view if len(parts) == 2 else views.get(parts[2])
            if view is None:
                raise RequestRefused(404, "there is no such route")
            try:
                await reply.send_json(await asyncio.to_thread(view, session, parse_qs(query)))
            except ValueError as exc:
                text = f"{type(exc).__name__}: {exc}"
                await reply.send_json({"error": text, "session_id": session.session_id}, 409)
        else:
            raise RequestRefused(405 if len(parts) < 3 else 404, "there is no such route")

    async def _create(self, request: AgentRequest) -> Json:
        payload = _object(request.body) if request.body else {}
        metadata = payload.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise RequestRefused(400, "metadata must be a JSON object")
        taken = sorted(set(RESERVED).intersection(metadata or {}))
        if taken:
            raise RequestRefused(400, f"metadata cannot include reserved keys: {', '.join(taken)}")
        upstream, level = await self._named_endpoint(payload)
        purpose, session_id = payload.get("purpose", "auto"), payload.get("session_id")
        if isinstance(session_id, str) and self.registry.get(session_id.strip()) is not None:
            raise RequestRefused(409, f"there is a session {session_id.strip()!r} already")
        try:
            kind = rollout_type_for(purpose, level or self.level)
            session = self.registry.create(
                session_id,
                upstream=upstream,
                capture_level=level,
                purpose=purpose,
                eval_sampling=payload.get("eval_sampling"),
                max_model_calls=payload.get("max_model_calls", self.options.max_model_calls),
                sampling=payload.get("sampling"),
                **(metadata or {}),
            )
        except (ValueError, TypeError) as exc:
            raise RequestRefused(400, str(exc)) from None
        return {
            "session_id": session.session_id,
            "capture_level": session.capture_level or self.level,
            "rollout_type": kind,
            "max_model_calls": session.max_model_calls,
            "llm_url": upstream.llm_url if upstream is not None else self.options.llm_url,
            "model": upstream.model if upstream is not None else self.options.model,
        }

    async def _named_endpoint(self, payload: Json) -> tuple[UpstreamAddress | None, str]:
        """Return the endpoint that a new session names, after it was asked what it names; None for the server's own."""
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
            client, level = await self.upstreams.resolve(upstream)
        except ValueError as exc:  # no such provider
            raise RequestRefused(400, str(exc)) from None
        return replace(upstream, model=client.served_model or upstream.model), level

    def _status_view(self, session: CaptureSession, query: dict[str, list[str]]) -> Json:
        return {
            "session_id": session.session_id,
            "idle_s": round(session.idle_seconds, 1),
            "upstream_errors": session.upstream_errors,
            **session.graph.stats(),
        }

    def _rollout_view(self, session: CaptureSession, query: dict[str, list[str]]) -> Json:
        def flag(name: str) -> bool:
            return query.get(name, ["false"])[-1].lower() in ("1", "true", "yes", "on")

        return export_session(
            session,
            include_discarded=flag("include_discarded"),
            include_messages=flag("include_messages"),
            capture_level=session.capture_level or self.level,
        )

    def _trace_view(self, session: CaptureSession, query: dict[str, list[str]]) -> Json:
        document = export_session(session, capture_level=session.capture_level or self.level)
        return {"session_id": session.session_id, "entries": to_trace_entries(session.graph, document)}

    # the end

    def _sweep(self) -> None:
        """Delete sessions that have not been used for long, and forget the keys of endpoints that none has."""
        now, ttl_s = time.monotonic(), self.options.session_ttl_s
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
        live = self._live.pop(session.session_id, None)
        if live is None:
            return
        live.rollout.revoked = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, live)

    def _end(self, live: LiveSession) -> None:
        live.rollout.changed.set()  # for calls that wait
        for call in list(live.rollout.active):
            call.stop("revoked")
        if live.rollout.closed_at is None:
            live.rollout.close()
        if self._is_temporary:
            live.session.refresh()  # what is not read by now could not be read any more
            live.session.attach(lambda: None)
            shutil.rmtree(live.path, ignore_errors=True)

    async def close(self) -> None:
        """End all calls and connections. What was captured can still be read from the sessions."""
        for live in list(self._live.values()):
            calls = list(live.rollout.active)
            self._end(live)
            for call in calls:
                await call.over.wait()
        self._services.endpoints.close()
        self.upstreams.close()
        self._scratch.close()
        if self._is_temporary:
            self._root = None
        if self.inference is not None:
            await self.inference.aclose()


def _object(body: bytes) -> Json:
    """Read a request's body.

    Raises:
        RequestRefused: it is no JSON object.
    """
    parsed = load_object(body)
    if parsed is None:
        raise RequestRefused(400, "body must be a JSON object")
    return parsed


class AsgiReply(AgentReply):
    """The answer to a request that an ASGI server received."""

    def __init__(self, send: Send) -> None:
        super().__init__(cast("Any", _AsgiCycle(send)))
        self.last_piece = b""

    def abort(self, data: bytes = b"") -> None:
        """Keep a last piece for the end: an ASGI server offers no way to cut an answer."""
        self.ended = True
        self.last_piece = data


@dataclass
class _AsgiCycle:
    send: Send


async def _serve(
    routes: CaptureSessionRoutes, limits: InboundLimits, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer one request of an ASGI server."""
    if scope["type"] != "http":
        return
    reply = AsgiReply(send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    query = scope["query_string"].decode("latin-1")
    request = AgentRequest(scope["method"], f"{path}?{query}" if query else path, headers)
    limit = limits.body if routes.is_known(extract_api_key(headers) or "") else limits.unknown_key_body
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if len(body) > limit:
            await reply.send_json({"error": {"message": f"a body may have {limit} bytes", "code": 413}}, 413)
            return
        if not message.get("more_body"):
            break
    request.body = bytes(body)
    watcher = asyncio.create_task(_watch(receive, reply))
    try:
        await routes.handle(request, reply)
        if reply.last_piece or (reply.started and not reply.ended):
            await send({"type": "http.response.body", "body": reply.last_piece})
    finally:
        watcher.cancel()


async def _watch(receive: Receive, reply: AgentReply) -> None:
    """Notice that the agent hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not reply.ended:
        reply.gone = True
        if reply.on_gone is not None:
            reply.on_gone()


def create_app(
    *,
    llm_url: str = "",
    model: str | None = None,
    engine: str = "",
    require_registered: bool = True,
    max_output_tokens: int | None = MAX_OUTPUT_TOKENS,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    provider: str = "openai",
    capture_level: str = "tokens",
    admin_key: str | None = None,
    max_model_calls: int = 0,
    root: Path | str | None = None,
    session_ttl_s: float | None = SESSION_TTL_S,
) -> FastAPI:
    """Make the capture server as an ASGI application; `app.state.registry` has its sessions.

    Args:
        llm_url: The endpoint of sessions that name none.
        model: The model's name there; without it, the agent's.
        engine: What answers there, for `/health`.
        require_registered: Whether requests whose key is no session are refused.
        max_output_tokens: The most tokens of an answer; None or 0 for no limit.
        api_key: The endpoint's key, which agents never see.
        auth_header: The header that has it.
        provider: As in `InferenceClient`.
        capture_level: What the endpoint names; `validate_llm` finds out.
        admin_key: What `/sessions` asks for; without it, any caller may use these routes.
        max_model_calls: The limit of calls of sessions that name none; 0 for no limit.
        root: Where records go; by default a temporary folder that goes with the application.
        session_ttl_s: How long a session stays that is not used; None for ever.
    """
    options = AppOptions(
        llm_url=llm_url,
        model=model,
        engine=engine,
        max_output_tokens=max_output_tokens,
        api_key=api_key,
        auth_header=auth_header,
        provider=provider,
        capture_level=capture_level,
        admin_key=admin_key or None,
        max_model_calls=max_model_calls,
        session_ttl_s=session_ttl_s,
    )
    registry = SessionRegistry(require_registered=require_registered)
    routes = CaptureSessionRoutes(options, registry, None if root is None else Path(root))
    limits = InboundLimits()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await routes.close()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await _serve(routes, limits, scope, receive, send)

    app = FastAPI(title="openenv-capture", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.router.routes.append(Mount("/", app=serve))
    app.state.routes = routes
    app.state.registry = registry
    app.state.inference = routes.inference
    app.state.upstreams = routes.upstreams
    app.state.instance_id = routes.instance_id
    app.state.model, app.state.llm_url, app.state.capture_level = model, llm_url, routes.level
    app.state.max_output_tokens, app.state.max_model_calls = max_output_tokens, max_model_calls
    app.state.admin_key = admin_key or None
    return app


class _SessionListener(ProxyListener):
    """Serves an application's routes with the limits that agents' connections have."""

    def __init__(self, routes: CaptureSessionRoutes, host: str, port: int) -> None:
        self._routes = routes
        super().__init__(host, port, InboundLimits())

    def is_known(self, key: str) -> bool:
        return self._routes.is_known(key)

    async def answer(self, request: AgentRequest, reply: AgentReply) -> None:
        await self._routes.handle(request, reply)

    async def answer_sandbox(self, request: AgentRequest, reply: AgentReply) -> None:
        await self._routes.handle(request, reply, is_sandbox=True)

    async def on_listening(self) -> None:
        pass

    async def on_stop(self) -> None:
        await self._routes.close()


class SessionCaptureServer:
    """The capture server in a thread: make sessions with `registry.create`, give agents their id as key.

    Args:
        llm_url: The endpoint of sessions that name none.
        model: The model's name there.
        port: Where to listen; 0 for a free one.
        max_output_tokens: The most tokens of an answer.
        api_key: The endpoint's key.
        auth_header: The header that has it.
        capture_level: What the endpoint names; `validate_llm` finds out.
        provider: As in `InferenceClient`.
        admin_key: What `/sessions` asks for; needed to listen on anything but loopback.
        max_model_calls: The limit of calls of sessions that name none; 0 for no limit.
        host: Where to listen; loopback by default.
        root: Where records go; by default a temporary folder that goes with the server.
        session_ttl_s: How long a session stays that is not used; None for ever.

    Raises:
        ValueError: the address is not loopback, and there is no `admin_key`.
    """

    def __init__(
        self,
        *,
        llm_url: str,
        model: str,
        port: int = PORT,
        max_output_tokens: int = MAX_OUTPUT_TOKENS,
        api_key: str | None = None,
        auth_header: str = "Authorization",
        capture_level: str = "tokens",
        provider: str = "openai",
        admin_key: str | None = None,
        max_model_calls: int = 0,
        host: str = "127.0.0.1",
        root: Path | str | None = None,
        session_ttl_s: float | None = SESSION_TTL_S,
    ) -> None:
        _check_host(host, admin_key)
        self.app = create_app(
            llm_url=llm_url,
            model=model,
            max_output_tokens=max_output_tokens,
            api_key=api_key,
            auth_header=auth_header,
            capture_level=capture_level,
            provider=provider,
            admin_key=admin_key,
            max_model_calls=max_model_calls,
            root=root,
            session_ttl_s=session_ttl_s,
        )
        routes: CaptureSessionRoutes = self.app.state.routes
        self.capture_level = routes.level
        self.admin_key = admin_key
        self.port = port
        self._listener = _SessionListener(routes, host, port)

    @property
    def registry(self) -> SessionRegistry:
        """Return the sessions."""
        registry: SessionRegistry = self.app.state.registry
        return registry

    @property
    def inference(self) -> InferenceClient | None:
        """Return the client of the server's own endpoint."""
        client: InferenceClient | None = self.app.state.inference
        return client

    @property
    def url(self) -> str:
        """Return the server's address."""
        return self._listener.url

    @property
    def socket(self) -> Path:
        """Return the unix socket for sandboxes, which has no `/sessions`."""
        return self._listener.socket

    def start(self, timeout_s: float = 30.0) -> None:
        """Listen.

        Args:
            timeout_s: How long that may take.

        Raises:
            RuntimeError: it cannot listen there, or not in time.
        """
        try:
            self._listener.listen(timeout_s)
        except CaptureError as exc:
            raise RuntimeError(str(exc)) from exc
        self.port = self._listener.port

    def stop(self) -> None:
        """End all calls, and stop listening. What was captured can still be read from the sessions."""
        self._listener.stop()

    def __enter__(self) -> SessionCaptureServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _check_host(host: str, admin_key: str | None) -> None:
    if not admin_key and not is_loopback(host):
        raise ValueError(f"an admin key is required to listen on {host}: anyone there could read and make sessions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; the command line of `python -m openenv.core.harness.capture.server`."""
    parser = argparse.ArgumentParser(description="The capture server: agents call it, it calls the model.")
    parser.add_argument("--llm-url", required=True, help="the model endpoint")
    parser.add_argument("--model", default=None, help="the model's name there")
    parser.add_argument("--engine", default="", choices=["", "vllm", "sglang"], help="shown by /health")
    parser.add_argument("--host", default="127.0.0.1", help="anything but loopback needs an admin key")
    parser.add_argument("--port", type=int, default=PORT, help="0 for a free one")
    parser.add_argument("--max-output-tokens", type=int, default=MAX_OUTPUT_TOKENS, help="of an answer; 0 for no limit")
    parser.add_argument("--allow-unregistered", action="store_true", help="serve keys that are no session, too")
    parser.add_argument("--api-key", default=settings.llm_api_key() or "", help="the endpoint's; OPENENV_LLM_API_KEY")
    parser.add_argument("--auth-header", default="Authorization", help="the header that has the endpoint's key")
    parser.add_argument("--capture-level", default="", choices=["", *CAPTURE_LEVELS], help="by default, found out")
    parser.add_argument(
        "--admin-key", default=settings.capture_admin_key() or "", help="for /sessions; OPENENV_CAPTURE_ADMIN_KEY"
    )
    parser.add_argument("--root", default=None, help="where records go; by default a temporary folder")
    options = parser.parse_args(arguments)
    try:
        _check_host(options.host, options.admin_key)
    except ValueError as exc:
        parser.error(f"{exc}; use --admin-key or OPENENV_CAPTURE_ADMIN_KEY")
    level = options.capture_level
    if not level:
        report = validate_llm(
            options.llm_url, options.model or "", api_key=options.api_key or None, auth_header=options.auth_header
        )
        if not report.reachable:
            sys.stderr.write(f"{report.summary()}\n")
            return 1
        level = report.capture_level
        sys.stdout.write(f"capture level: {level} ({report.rollout_type} rollouts)\n")
        sys.stdout.writelines(f"  endpoint: {fix}\n" for fix in report.param_fixes)
    app = create_app(
        llm_url=options.llm_url,
        model=options.model,
        engine=options.engine,
        require_registered=not options.allow_unregistered,
        max_output_tokens=options.max_output_tokens or None,
        api_key=options.api_key or None,
        auth_header=options.auth_header,
        capture_level=level,
        admin_key=options.admin_key or None,
        root=options.root,
    )
    listener = _SessionListener(app.state.routes, options.host, options.port)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        listener.listen()
    except CaptureError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    try:
        sys.stdout.write(f"listening on {listener.url}\n")
        sys.stdout.flush()
        stopped.wait()
    finally:
        listener.stop()
    return 0
