"""A server of Harbor's tasks: the Task API, the tool that runs rollouts, and the page."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from openenv import settings
from openenv.protocol.addresses import is_loopback
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as _SessionCaptureServer

from .environment import HarborEnvironment, HarborServerOptions
from .models import HarborState
from .runner import default_trials_dir
from .service import HarborService as HarborService
from .startup import prepare

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

CaptureServer = _SessionCaptureServer
ENV_NAME = "harbor_env"
SESSIONS = 4
"""How many sessions a server holds where `OPENENV_MAX_SESSIONS` does not say."""


def space_public_url() -> str:
    """Return the address of the Hugging Face Space that this process runs in; empty elsewhere."""
    host = settings.space_host()
    if host:
        return "https://" + host.rstrip("/").removeprefix("https://").removeprefix("http://")
    name = settings.space_id() or ""
    if "/" not in name:
        return ""
    return f"https://{name.replace('/', '-').replace('_', '-').replace('.', '-').lower()}.hf.space"


class SameOrigin:
    """Refuses requests below a path that pages of other sites make a browser send.

    Args:
        app: What answers the others.
        prefix: The path.
    """

    def __init__(self, app: ASGIApp, prefix: str = "/web") -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to a request of another site, and pass on every other."""
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(self._prefix) and _is_foreign(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Requests of other sites are refused."})
            return
        await self._app(scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    if scope.get("method") in ("GET", "HEAD", "OPTIONS"):  # which change nothing
        return False
    if headers.get(b"sec-fetch-site") == "cross-site":
        return True
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin).netloc != headers.get(b"host", "")


def build_app(
    *,
    datasets: Sequence[str],
    llm_url: str = "",
    model: str = "",
    llm: Mapping[str, Any] | None = None,
    options: HarborServerOptions | None = None,
    trials_dir: Path | None = None,
) -> FastAPI:
    """Return the application: Task API, tools, and the page at `/web`.

    Args:
        datasets: What is served; each is a split.
        llm_url: The endpoint of rollouts that name none, as `HarborService` has it.
        model: The model there.
        llm: What is known of them.
        options: What callers may do.
        trials_dir: Where rollouts are stored.
    """
    from openenv.server.app import create_app

    options = options or HarborServerOptions()
    trials = trials_dir or default_trials_dir()
    HarborEnvironment.configure(
        datasets=datasets, llm_url=llm_url, model=model, llm=llm, options=options, trials_dir=trials
    )
    app = create_app(
        HarborEnvironment,
        CallToolAction,
        CallToolObservation,
        env_name=ENV_NAME,
        max_concurrent_envs=settings.max_sessions() or SESSIONS,
        state_cls=HarborState,
        rollout_store=trials if options.shows_rollouts else None,
    )
    app.add_middleware(SameOrigin)
    return app


def serve_harbor(
    *,
    llm_url: str = "",
    datasets: Sequence[str],
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    capture_port: int = 8100,
    expose: str = "direct",
    env_file: str | None = None,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    provider: str = "openai",
    max_output_tokens: int | None = 8192,
    options: HarborServerOptions | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Start the capture server, and serve Harbor's tasks until Ctrl-C.

    Args:
        llm_url: The endpoint of rollouts that name none.
        datasets: What is served; each is a split.
        model: The model there.
        host: Where to listen.
        port: Where to listen.
        capture_port: Where the capture server listens on this machine; 0 for a free port.
        expose: As in `HarborService`.
        env_file: Variables to set first.
        api_key: The endpoint's key; by default `OPENENV_LLM_API_KEY`. No sandbox sees it.
        auth_header: The header that has it.
        provider: `openai` or `anthropic`.
        max_output_tokens: The most tokens of an answer.
        options: What callers may do.
        report: Gets what a user needs to know, line by line.

    Raises:
        RuntimeError: the endpoint does not answer, or a port is taken.
    """
    from openenv.server.run import ServeOptions, check_port, run_app

    where, allowed = ServeOptions(host, port), options or HarborServerOptions()
    check_port(where)
    found = prepare(
        llm_url=llm_url,
        model=model,
        datasets=datasets,
        env_file=env_file,
        require_llm=bool(llm_url),
        api_key=api_key,
        auth_header=auth_header,
        provider=provider,
        report=report,
    )
    service = HarborService(
        llm_url=llm_url,
        model=str(found.llm.get("model") or model or ""),
        datasets=datasets,
        capture_port=capture_port,
        expose=expose,
        api_key=api_key or settings.llm_api_key(),
        auth_header=auth_header,
        provider=provider,
        capture_level=str(found.llm.get("capture_level") or "text"),
        max_output_tokens=max_output_tokens,
    )
    with ExitStack() as stack:
        report(f"capture   {service.start()}")
        stack.callback(service.stop)
        HarborService.set_current(service)
        trials = default_trials_dir()
        if not allowed.keeps_rollouts:
            trials = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openenv-trials-")))
        settings.export({"ENABLE_WEB_INTERFACE": "true"})
        app = build_app(
            datasets=datasets,
            llm_url=llm_url,
            model=service.model,
            llm=found.llm,
            options=allowed,
            trials_dir=trials,
        )
        token = _required_token(app, host)
        if token is not None:
            report(f"token     {token}")
        run_app(app, where, lambda _, actual: report(f"server    http://{host}:{actual}   (page: /web)"))


def _required_token(app: FastAPI, host: str) -> str | None:
    """Let a server that other machines reach ask for a token, and return it; None where the settings have some."""
    from openenv.server.access import AccessPolicy
    from openenv.server.run import environment_server

    server = environment_server(app)
    if server is None or not server.access.is_open or is_loopback(host):
        return None
    token = secrets.token_urlsafe(24)
    server.reconfigure(access=AccessPolicy(orchestrator=token))
    return token
