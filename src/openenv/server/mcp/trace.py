"""Where a JSON-RPC request comes from: its id, and the trace that `_meta` names (`traceparent`, as MCP reserves it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...sessions.events import RequestOrigin
from ...sessions.manager import SessionManager


def origin_of_rpc(manager: SessionManager, request_id: Any, params: Mapping[str, Any]) -> RequestOrigin | None:
    """Return the origin of a request, or None while nobody asks for it."""
    if not manager.wants_origins:
        return None
    meta = params.get("_meta")
    parent = meta.get("traceparent") if isinstance(meta, Mapping) else None
    return RequestOrigin(
        request_id if isinstance(request_id, (str, int)) else None, parent if isinstance(parent, str) else None
    )
