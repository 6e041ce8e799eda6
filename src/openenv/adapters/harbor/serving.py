"""Serve Harbor's tasks: the Task API, the tool that runs rollouts, and the web UI.

client ── HarborEnvironment (a session each) ── run_rollout ──┐
                                                            ├── HarborService (one capture server) ── model
client ── HarborEnvironment ── run_rollout ─────────────────┘
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from openenv import settings
from openenv.protocol.addresses import is_loopback
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as _SessionCaptureServer

from .capabilities import check_setup, load_env_file
from .environment import HarborEnvironment
from .models import HarborState
from .options import HarborPermissions, HarborServing, takes_fields
from .runner import default_trials_dir
from .service import HarborService

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

CaptureServer = _SessionCaptureServer
ENV_NAME = "harbor_env"
# Rollouts are long, and each needs a sandbox: a handful at once is plenty for one machine.
SESSIONS = 4
"""The session limit if `OPENENV_MAX_SESSIONS` is not set."""


def space_public_url() -> str:
    """Return the address of this process's Hugging Face Space; empty outside of Spaces."""
    host = settings.space_host()
    if host:
        return "https://" + host.rstrip("/").removeprefix("https://").removeprefix("http://")
    name = settings.space_id() or ""
    if "/" not in name:
        return ""
    # owner/my_space.x -> https://owner-my-space-x.hf.space
    return f"https://{name.replace('/', '-').replace('_', '-').replace('.', '-').lower()}.hf.space"


class SameOrigin:
    """Middleware that refuses cross-site requests below a path.

    A page of another site can make a visitor's browser send a form here. Without this check it could start
    rollouts on a server that listens on the visitor's machine only.

    Args:
        app: The next application.
        prefix: The path.
    """

    def __init__(self, app: ASGIApp, prefix: str = "/web") -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to a cross-site request; pass on every other request."""
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(self._prefix) and _is_foreign(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Cross-site requests are refused."})
            return
        await self._app(scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    if scope.get("method") in ("GET", "HEAD", "OPTIONS"):  # they change nothing
        return False
    if headers.get(b"sec-fetch-site") == "cross-site":
        return True
    # Older browsers send no `Sec-Fetch-Site`, but all send `Origin` with a cross-site POST.
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin).netloc != headers.get(b"host", "")


def build_app(
    *,
    datasets: Sequence[str],
    llm_url: str = "",
    model: str = "",
    llm: Mapping[str, Any] | None = None,
    options: HarborPermissions | None = None,
    trials_dir: Path | None = None,
) -> FastAPI:
    """Return the application: Task API, tools, and the web UI at `/web`.

    Args:
        datasets: The served datasets; each is a split.
        llm_url: The default endpoint of rollouts.
        model: The model at the default endpoint.
        llm: The probed endpoint, for the tool `capabilities`.
        options: The callers' permissions.
        trials_dir: The folder of stored rollouts.
    """
    from openenv.server.app import create_app

    options = options or HarborPermissions()
    trials = trials_dir or default_trials_dir()
    # Sessions are made by the server without arguments, so options go to the class.
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


def serve_tasks(serving: HarborServing) -> None:
    """Start the capture server, and serve Harbor's tasks until Ctrl-C.

    Raises:
        RuntimeError: The endpoint does not answer, or a port is taken.
    """
    from openenv.server.run import ServeOptions, check_port, run_app

    # Everything that can fail quickly comes first: port, variables, endpoint.
    where, permissions = ServeOptions(serving.host, serving.port), serving.options or HarborPermissions()
    check_port(where)  # before the probe of the endpoint, which takes seconds
    load_env_file(serving.env_file)
    ready = check_setup(serving, datasets=serving.datasets, require_llm=bool(serving.llm_url), report=serving.report)
    # The same options, with the model that the endpoint really serves.
    capture = replace(
        serving,
        model=str(ready.llm.get("model") or serving.model or ""),
        api_key=serving.api_key or settings.llm_api_key(),
    )
    service = HarborService(capture, capture_level=str(ready.llm.get("capture_level") or "text"))
    with ExitStack() as stack:
        serving.report(f"capture   {service.start()}")
        stack.callback(service.stop)
        HarborService.set_current(service)
        trials = default_trials_dir()
        # The folder disappears with the server.
        if not permissions.keeps_rollouts:
            trials = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openenv-trials-")))
        # The web UI is part of this server; a user's setting stays if there is one.
        settings.export({"ENABLE_WEB_INTERFACE": "true"})
        app = build_app(
            datasets=serving.datasets,
            llm_url=service.llm_url,
            model=service.model,
            llm=ready.llm,
            options=permissions,
            trials_dir=trials,
        )
        token = _required_token(app, serving.host)
        if token is not None:
            serving.report(f"token     {token}")
        # The actual port is known only after the server listens.
        address = f"http://{serving.host}"
        run_app(app, where, lambda _, port: serving.report(f"server    {address}:{port}   (page: /web)"))


serve_harbor = takes_fields(HarborServing, serve_tasks, name="serve_harbor")


def _required_token(app: FastAPI, host: str) -> str | None:
    """Require a random token if other machines reach the server; return it, or None if the settings name tokens."""
    from openenv.server.access import AccessPolicy
    from openenv.server.run import environment_server

    server = environment_server(app)
    # On loopback other machines cannot connect, so no token is necessary.
    if server is None or not server.access.is_open or is_loopback(host):
        return None
    token = secrets.token_urlsafe(24)
    server.reconfigure(access=AccessPolicy(orchestrator=token))
    return token
