"""The endpoints of sessions: `UpstreamPool` has a client and the capture level of each.

Knows how to probe an endpoint, and nothing of the sessions that use it.
"""

# An endpoint that a session names:
#
#   resolve ---> known: its client and level, at once
#      |
#      +-------> being probed by another session: wait for the same answer
#      |
#      +-------> new: a thread of the pool asks for its models and for a few tokens (`validate_llm`)

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ..encoding import Json
from .capture_sessions import UpstreamAddress
from .engine_client import InferenceClient
from .engine_probe import only_model, validate_llm

log = logging.getLogger("openenv.rollout.capture")


class UpstreamPool:
    """Caches one client and one capture level per endpoint; the first session of an endpoint probes it.

    Args:
        default_client: The client of the server's default endpoint.
        default_level: The capture level of that endpoint.
    """

    def __init__(self, *, default_client: InferenceClient | None, default_level: str) -> None:
        self._default = (default_client, default_level)
        self._known: dict[tuple[str, ...], tuple[InferenceClient, str]] = {}
        self._pending: dict[tuple[str, ...], Future[tuple[InferenceClient, str]]] = {}
        self._lock = threading.Lock()
        # A probe blocks for as long as an endpoint takes to answer: a minute, for one that loads its model first.
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="openenv-capture-probe")

    @property
    def default(self) -> tuple[InferenceClient | None, str]:
        """Return the client and the capture level of the default endpoint."""
        return self._default

    def known(self) -> list[Json]:
        """Return the probed endpoints, without their keys."""
        with self._lock:
            # An endpoint is known under two names if its session named no model; it is listed once.
            clients = {id(client): (key[0], client, level) for key, (client, level) in self._known.items()}
        return [
            {"llm_url": url, "model": client.served_model or "", "capture_level": level}
            for url, client, level in clients.values()
        ]

    def forget(self, upstream: UpstreamAddress) -> None:
        """Forget an endpoint and its key; the next session that names it probes it again."""
        with self._lock:
            entry = self._known.get(upstream.cache_key)
            self._known = {key: value for key, value in self._known.items() if value is not entry}

    def keep(self, upstreams: Collection[UpstreamAddress]) -> None:
        """Forget all endpoints except these."""
        keys = {upstream.cache_key for upstream in upstreams}
        with self._lock:
            used = [entry for key, entry in self._known.items() if key in keys]
            self._known = {key: entry for key, entry in self._known.items() if entry in used}

    async def resolve(self, upstream: UpstreamAddress) -> tuple[InferenceClient, str]:
        """Return the client and the capture level of an endpoint; the level is `text` if the probe fails.

        Raises:
            ValueError: The provider is unknown.
        """
        key = upstream.cache_key
        with self._lock:
            entry = self._known.get(key)
            if entry is not None:
                return entry
            pending = self._pending.get(key)
            if pending is None:
                pending = self._pending[key] = self._threads.submit(self._probe, upstream)
        # Other sessions wait for the same answer: a cancelled session must not take it from them.
        return await asyncio.shield(asyncio.wrap_future(pending))

    def _probe(self, upstream: UpstreamAddress) -> tuple[InferenceClient, str]:
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
                # Under both names: a session that named no model continues with the only one that is served.
                self._known[key] = self._known[replace(upstream, model=model).cache_key] = (client, level)
            return client, level
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown(wait=False)


def _probed(upstream: UpstreamAddress) -> tuple[str, str]:
    """Return the model and the capture level of an endpoint."""
    key, header = upstream.api_key, upstream.auth_header
    model = upstream.model or only_model(upstream.llm_url, api_key=key, auth_header=header)
    if not model:
        log.warning("%s does not serve exactly one model, and the session names none", upstream.llm_url)
        return "", "text"
    report = validate_llm(
        upstream.llm_url,
        model,
        provider=upstream.provider,
        api_key=key,
        auth_header=header,
    )
    level = report.capture_level or "text"
    log.info("%s (%s): capture level %s", upstream.llm_url, model, level)
    return model, level
