"""The capture server of a process that serves Harbor's tasks; all its rollouts share it."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from openenv import settings
from openenv.rollout.capture.sessions_api.capture_sessions import UpstreamAddress
from openenv.rollout.capture.sessions_api.engine_client import InferenceClient
from openenv.rollout.capture.sessions_api.forwarding import make_forwarder
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer

from .options import HarborCapture


@dataclass(frozen=True, slots=True)
class HarborEngine:
    """The endpoint of a rollout and its capture level."""

    model: str
    capture_level: str
    client: InferenceClient | None
    upstream: UpstreamAddress | None = None


class HarborService:
    """The capture server of a process, and its address for sandboxes on other machines.

    Args:
        options: Datasets, endpoint and ports.
        capture_level: The endpoint's capture level.
        **published: The fields of `HarborCapture`, which published code passes as keywords.
    """

    _instance: ClassVar[HarborService | None] = None

    def __init__(
        self, options: HarborCapture | None = None, *, capture_level: str = "tokens", **published: Any
    ) -> None:
        options = options or HarborCapture(**published)
        self.admin_key = settings.capture_admin_key() or secrets.token_urlsafe(24)
        self.llm_url, self.model = options.llm_url or "", options.model or ""
        self.datasets, self.provider = list(options.datasets), options.provider
        # Anthropic's API returns no token IDs. Without an endpoint there is nothing to probe.
        self.capture_level = "text" if self.provider == "anthropic" or not self.llm_url else capture_level
        self.capture = SessionCaptureServer(
            llm_url=self.llm_url,
            model=self.model,
            port=options.capture_port,
            max_output_tokens=options.max_output_tokens or _NO_LIMIT,
            api_key=options.api_key,
            auth_header=options.auth_header,
            provider=self.provider,
            capture_level=self.capture_level,
            admin_key=self.admin_key,
        )
        self.public_url = ""
        self._expose = options.expose
        self._stack = ExitStack()

    def start(self) -> str:
        """Start the capture server, and return its address for sandboxes on other machines.

        Raises:
            RuntimeError: The port is taken, or the tunnel failed. Nothing is left running.
        """
        # If the tunnel fails, the capture server stops again. On success both move to `self._stack`.
        with ExitStack() as stack:
            self.capture.start()
            stack.callback(self.capture.stop)
            forwarder = make_forwarder(self._expose)
            self.public_url = forwarder.start(self.capture.port)
            stack.callback(forwarder.stop)
            self._stack = stack.pop_all()
        return self.public_url

    def stop(self) -> None:
        """Stop the tunnel and the capture server, even if one of them fails to stop."""
        # Another service may have replaced this one.
        if type(self)._instance is self:
            HarborService._instance = None
        self._stack.close()

    async def engine(self, upstream: UpstreamAddress | None) -> HarborEngine:
        """Return the endpoint of a rollout: the caller's, which is probed once, or the server's.

        Raises:
            ValueError: Neither the caller nor the server names an endpoint.
        """
        # The server's own endpoint was probed at the start.
        if upstream is None:
            return HarborEngine(self.model, self.capture_level, self.capture.inference)
        client, level = await self.capture.upstreams.resolve(upstream)
        return HarborEngine(client.served_model or upstream.model, level, client, upstream)

    @classmethod
    def current(cls) -> HarborService | None:
        """Return the service of this process."""
        return HarborService._instance

    @classmethod
    def set_current(cls, service: HarborService) -> None:
        """Set the service of this process."""
        HarborService._instance = service


_NO_LIMIT = 1_000_000
