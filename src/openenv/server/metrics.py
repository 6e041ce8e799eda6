"""`GET /metrics` and `GET /ready`: how a server does, for Prometheus, `openenv top` and load balancers.

Knows ASGI and how the two are documented; what is counted is in `telemetry`.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from .._version import load_package_version
from ..telemetry.calls import CallWatch
from ..telemetry.exposition import CONTENT_TYPE
from ..telemetry.metrics import ServerMetrics
from .asgi import Receive, Scope, Send, respond_json
from .routes import DocumentedRoute
from .service import EnvService

OPENTELEMETRY = "opentelemetry.trace"
_SAMPLE = 'openenv_sessions{state="ready"} 3\nopenenv_steps_total 1200\n'


class Readiness(BaseModel):
    """Whether new sessions are opened here."""

    status: Literal["ready", "draining"]
    active_sessions: int
    max_sessions: int


class MetricsRoutes:
    """The two handlers of one server."""

    def __init__(self, service: EnvService) -> None:
        self._manager = service.manager
        self._service = service
        self._is_tracing = False
        self.watch = CallWatch(service.manager)
        self.metrics = ServerMetrics(service.manager, self.watch, info=self._info)

    def begin(self) -> None:
        """Trace calls from the start of the server on, if the application has set up OpenTelemetry."""
        if not self._is_tracing and OPENTELEMETRY in sys.modules:
            from ..telemetry.tracing import trace_if_set_up  # not needed otherwise

            self._is_tracing = trace_if_set_up(self.watch)

    def _info(self) -> dict[str, str]:
        return {
            "environment": self._service.env_name,
            "version": load_package_version(),
            "runner": self._manager.runner.name,
            "mode": self._service.mode.value,
        }

    def routes(self) -> list[DocumentedRoute]:
        """Return the routes; they are the same in every mode."""
        return [
            DocumentedRoute(
                "/metrics",
                _metrics_signature,
                self.show,
                methods=["GET"],
                response_class=PlainTextResponse,
                tags=["Health"],
                summary="Show metrics",
                description="Sessions, queue, steps, times by phase, errors by code and memory, in Prometheus' text "
                "format. Calls are timed from the first reading on.",
                responses={200: {"content": {"text/plain": {"example": _SAMPLE}}}},
            ),
            DocumentedRoute(
                "/ready",
                _ready_signature,
                self.ready,
                methods=["GET"],
                response_model=Readiness,
                tags=["Health"],
                summary="Say whether new sessions are opened",
                description="Readiness check: unlike `/health`, it fails while the server shuts down.",
                responses={503: {"model": Readiness, "description": "The server is shutting down"}},
            ),
        ]

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /metrics`."""
        body = self.metrics.text()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /ready`."""
        manager = self._manager
        is_ready = not manager.is_draining
        shown: dict[str, Any] = {
            "status": "ready" if is_ready else "draining",
            "active_sessions": manager.active,
            "max_sessions": manager.max_sessions,
        }
        await respond_json(send, 200 if is_ready else 503, shown, [(b"cache-control", b"no-store")])


async def _metrics_signature() -> str:
    """Documents `GET /metrics`."""
    return _SAMPLE


async def _ready_signature() -> None:
    """Documents `GET /ready`."""
