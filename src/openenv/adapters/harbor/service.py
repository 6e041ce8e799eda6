"""The capture server that a process which serves Harbor's tasks keeps for all rollouts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from openenv import settings
from openenv.rollout.capture.sessions_api.capture_sessions import UpstreamAddress
from openenv.rollout.capture.sessions_api.engine_client import InferenceClient
from openenv.rollout.capture.sessions_api.forwarding import make_forwarder
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer, UpstreamPool


@dataclass(frozen=True, slots=True)
class HarborEngine:
    """The endpoint of a rollout, and what it names of what it samples."""

    model: str
    capture_level: str
    client: InferenceClient | None
    upstream: UpstreamAddress | None = None


class HarborService:
    """The capture server of a process, and the address under which sandboxes elsewhere reach it.

    Args:
        llm_url: The endpoint of rollouts that name none; empty where all do.
        model: The model there.
        datasets: What is served.
        capture_port: Where the capture server listens on this machine; 0 for a free port.
        expose: `direct`, or `gradio` or `cloudflare` for an address that other machines reach.
        api_key: The endpoint's key.
        auth_header: The header that has it.
        provider: `openai` or `anthropic`.
        capture_level: What the endpoint names.
        max_output_tokens: The most tokens of an answer.
    """

    _instance: ClassVar[HarborService | None] = None

    def __init__(
        self,
        *,
        llm_url: str = "",
        model: str = "",
        datasets: Sequence[str],
        capture_port: int = 8100,
        expose: str = "direct",
        api_key: str | None = None,
        auth_header: str = "Authorization",
        provider: str = "openai",
        capture_level: str = "tokens",
        max_output_tokens: int | None = 8192,
    ) -> None:
        self.admin_key = settings.capture_admin_key() or secrets.token_urlsafe(24)
        self.llm_url, self.model, self.datasets, self.provider = llm_url, model, list(datasets), provider
        self.capture_level = "text" if provider == "anthropic" or not llm_url else capture_level
        self.capture = SessionCaptureServer(
            llm_url=llm_url,
            model=model,
            port=capture_port,
            max_output_tokens=max_output_tokens or _NO_CAP,
            api_key=api_key,
            auth_header=auth_header,
            provider=provider,
            capture_level=self.capture_level,
            admin_key=self.admin_key,
        )
        self.public_url = ""
        self._expose = expose
        self._stack = ExitStack()

    def start(self) -> str:
        """Start the capture server, and return its address as sandboxes elsewhere see it.

        Raises:
            RuntimeError: the port is taken, or the address cannot be had; nothing is left running.
        """
        with ExitStack() as stack:
            self.capture.start()
            stack.callback(self.capture.stop)
            forwarder = make_forwarder(self._expose)
            self.public_url = forwarder.start(self.capture.port)
            stack.callback(forwarder.stop)
            self._stack = stack.pop_all()
        return self.public_url

    def stop(self) -> None:
        """Stop both; the second also where the first fails."""
        if type(self)._instance is self:
            HarborService._instance = None
        self._stack.close()

    async def engine(self, upstream: UpstreamAddress | None) -> HarborEngine:
        """Return the endpoint of a rollout: the named one, which is asked once what it names, or the server's.

        Raises:
            ValueError: none is named, and the server has none.
        """
        if upstream is None:
            return HarborEngine(self.model, self.capture_level, self.capture.inference)
        pool: UpstreamPool = self.capture.app.state.upstreams
        client, level = await pool.resolve(upstream)
        return HarborEngine(client.served_model or upstream.model, level, client, upstream)

    @classmethod
    def current(cls) -> HarborService | None:
        """Return the service of this process."""
        return HarborService._instance

    @classmethod
    def set_current(cls, service: HarborService) -> None:
        """Make a service the one of this process."""
        HarborService._instance = service


_NO_CAP = 1_000_000
