"""The published constructors of the capture server: `create_app`, `SessionCaptureServer`, and the command.

    GET  /health                         POST   /sessions                       the holder of the admin key,
    GET  /v1/models                      GET    /sessions                       or any caller if there is no such key
    POST any path: a model call          GET    /sessions/{id}
         of the session with the         GET    /sessions/{id}/rollout
         request's key as its ID         GET    /sessions/{id}/trace_entries
                                         DELETE /sessions/{id}

Knows the published signatures and ASGI. `session_server.SessionServer` does the work behind both constructors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send
from typing_extensions import Self

from openenv import settings
from openenv.errors import CaptureError
from openenv.protocol.addresses import is_loopback

from ..capture_server import CaptureOptions
from ..inbound import AgentReply, AgentRequest, InboundLimits
from .engine_client import CAPTURE_LEVELS
from .engine_probe import validate_llm
from .session_server import MAX_OUTPUT_TOKENS, SESSION_TTL_S, SessionOptions, SessionServer

# Three ways to run one class:
#
#   create_app(...)                 SessionServer behind any ASGI server; `_serve` translates requests
#   SessionCaptureServer(...)       SessionServer in a thread, with its listeners; published as `CaptureServer`
#   main()                          SessionServer in a thread, until a signal comes
PORT = 8100


# An ASGI server has less than the listener: it cannot cut a connection, so a broken stream ends normally after an error
# event; its limits for heads and connections are its own; and it has no unix socket for sandboxes.


class AsgiReply(AgentReply):
    """The answer to a request that an ASGI server received."""

    def __init__(self, send: Send) -> None:
        super().__init__(cast("Any", _AsgiCycle(send)))
        self.last_piece = b""

    def abort(self, data: bytes = b"") -> None:
        """Keep the last piece for the end of the answer: ASGI has no way to cut a connection."""
        self.ended = True
        self.last_piece = data


@dataclass
class _AsgiCycle:
    send: Send


async def _serve(server: SessionServer, limits: InboundLimits, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request of an ASGI server."""
    if scope["type"] != "http":
        return
    # An ASGI server owns the loop and the lifespan, if it runs one: the server has neither a thread nor a sweeper.
    server.use_loop(asyncio.get_running_loop())
    server.sweep()  # a server that listens does this in a task
    reply = AsgiReply(send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    query = scope["query_string"].decode("latin-1")
    request = AgentRequest(scope["method"], f"{path}?{query}" if query else path, headers)
    limit = limits.body if server.is_known(request.key) else limits.unknown_key_body
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
    # A server that listens sees the agent hang up on its connection. ASGI reports it as a message that must be awaited.
    watcher = asyncio.create_task(_watch(receive, reply))
    try:
        await server.answer(request, reply)
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
    """Return the capture server as an ASGI application; `app.state.registry` has its sessions.

    Args:
        llm_url: The endpoint of sessions that name none.
        model: The model's name there; by default the agent's.
        engine: The engine's name, shown by `/health`.
        require_registered: Refuse requests if their key is not the ID of a session.
        max_output_tokens: The most tokens of an answer; None or 0 for no limit.
        api_key: The endpoint's key, which agents never see.
        auth_header: The header for that key.
        provider: As in `InferenceClient`.
        capture_level: The capture level of the endpoint; `validate_llm` finds out.
        admin_key: The key for `/sessions`; without it, any caller may use these routes.
        max_model_calls: The limit of calls of sessions that set none; 0 for no limit.
        root: The folder of the records; by default a temporary one, removed with the application.
        session_ttl_s: How long an unused session stays; None to keep it.
    """
    options = SessionOptions(
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
        require_registered=require_registered,
    )
    return _application(SessionServer(options, root=None if root is None else Path(root)))


def _application(server: SessionServer) -> FastAPI:
    """Return the ASGI application of a server, with the published names in its state."""
    limits = InboundLimits()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await server.on_stop()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await _serve(server, limits, scope, receive, send)

    # FastAPI is published; all routes are one mounted ASGI function, because calls are streamed with their own limits.
    app = FastAPI(title="openenv-capture", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.router.routes.append(Mount("/", app=serve))
    options = server.session_options
    app.state.server = server
    app.state.registry = server.registry
    app.state.inference = server.inference
    app.state.upstreams = server.upstreams
    app.state.instance_id = server.instance_id
    app.state.model, app.state.llm_url, app.state.capture_level = options.model, options.llm_url, server.capture_level
    app.state.max_output_tokens, app.state.max_model_calls = options.max_output_tokens, options.max_model_calls
    app.state.admin_key = options.admin_key
    return app


class SessionCaptureServer(SessionServer):
    """The capture server in a thread: create sessions with `registry.create`, and give agents their IDs as keys.

    Args:
        llm_url: The endpoint of sessions that name none.
        model: The model's name there.
        port: Where to listen; 0 for a free port.
        max_output_tokens: The most tokens of an answer.
        api_key: The endpoint's key.
        auth_header: The header for that key.
        capture_level: The capture level of the endpoint; `validate_llm` finds out.
        provider: As in `InferenceClient`.
        admin_key: The key for `/sessions`; required to listen on an address that other machines reach.
        max_model_calls: The limit of calls of sessions that set none; 0 for no limit.
        host: Where to listen; loopback by default.
        root: The folder of the records; by default a temporary one, removed when the server stops.
        session_ttl_s: How long an unused session stays; None to keep it.

    Raises:
        ValueError: Other machines reach the address, and there is no `admin_key`.
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
        options = SessionOptions(
            llm_url=llm_url,
            model=model,
            max_output_tokens=max_output_tokens,
            api_key=api_key,
            auth_header=auth_header,
            provider=provider,
            capture_level=capture_level,
            admin_key=admin_key or None,
            max_model_calls=max_model_calls,
            session_ttl_s=session_ttl_s,
        )
        listen = CaptureOptions(host=host, port=port, admin_key=admin_key)
        super().__init__(options, listen, root=None if root is None else Path(root))
        self.admin_key = admin_key
        self.app = _application(self)

    def start(self, timeout_s: float | None = 30.0) -> Self:
        """Listen.

        Args:
            timeout_s: How long that may take; None for no limit.

        Raises:
            RuntimeError: The server cannot listen there, or not in time.
        """
        try:
            return super().start(timeout_s)
        except CaptureError as exc:  # published code expects a RuntimeError
            raise RuntimeError(str(exc)) from exc


def _check_host(host: str, admin_key: str | None) -> None:
    if not admin_key and not is_loopback(host):
        raise ValueError(f"an admin key is required to listen on {host}: anyone there could read and create sessions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; the command line of `python -m openenv.core.harness.capture.server`."""
    parser = argparse.ArgumentParser(description="The capture server: agents call it, it calls the model.")
    parser.add_argument("--llm-url", required=True, help="the model endpoint")
    parser.add_argument("--model", default=None, help="the model's name there")
    parser.add_argument("--engine", default="", choices=["", "vllm", "sglang"], help="shown by /health")
    parser.add_argument("--host", default="127.0.0.1", help="other addresses than loopback need an admin key")
    parser.add_argument("--port", type=int, default=PORT, help="0 for a free port")
    parser.add_argument("--max-output-tokens", type=int, default=MAX_OUTPUT_TOKENS, help="per answer; 0 for no limit")
    parser.add_argument("--allow-unregistered", action="store_true", help="also serve keys without a session")
    parser.add_argument("--api-key", default=settings.llm_api_key() or "", help="the endpoint's; OPENENV_LLM_API_KEY")
    parser.add_argument("--auth-header", default="Authorization", help="the header for the endpoint's key")
    parser.add_argument("--capture-level", default="", choices=["", *CAPTURE_LEVELS], help="by default, probed")
    parser.add_argument(
        "--admin-key", default=settings.capture_admin_key() or "", help="for /sessions; OPENENV_CAPTURE_ADMIN_KEY"
    )
    parser.add_argument("--root", default=None, help="folder of the records; by default a temporary one")
    options = parser.parse_args(arguments)
    try:
        _check_host(options.host, options.admin_key)
    except ValueError as exc:
        parser.error(f"{exc}; use --admin-key or OPENENV_CAPTURE_ADMIN_KEY")
    # Without a level the endpoint is probed, which takes some requests; a wrong URL ends the command here.
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
    sessions = SessionOptions(
        llm_url=options.llm_url,
        model=options.model,
        engine=options.engine,
        max_output_tokens=options.max_output_tokens or None,
        api_key=options.api_key or None,
        auth_header=options.auth_header,
        capture_level=level,
        admin_key=options.admin_key or None,
        require_registered=not options.allow_unregistered,
    )
    listen = CaptureOptions(host=options.host, port=options.port, admin_key=options.admin_key or None)
    server = SessionServer(sessions, listen, root=None if options.root is None else Path(options.root))
    stopped = threading.Event()
    # The handlers only set an event: the server must stop in the main thread, which waits for its thread.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server.start()
    except CaptureError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    try:
        sys.stdout.write(f"listening on {server.url}\n")
        sys.stdout.flush()
        stopped.wait()
    finally:
        server.stop()
    return 0
