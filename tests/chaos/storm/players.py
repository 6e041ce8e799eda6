"""Who plays: a client for each way of reaching a server, with the methods that an episode needs."""

from __future__ import annotations

from typing import Any

from .episode import client_of

AWAITING = frozenset({"tools"})
"""Those whose methods are coroutines."""

LATE = frozenset({"http", "keys", "mcp"})
"""Those whose requests may also come once more, later: they go over HTTP, where each is whole by itself."""


def player_of(use: str, url: str, seed: int) -> Any:
    """Return a client; what the published package does not have is imported only for who asks for it."""
    if use == "http":
        from .web import web_client

        return web_client(url)
    if use == "tools":
        from .tools import tool_client

        return tool_client(url)
    if use == "keys" or (use == "workers" and seed % 4 == 3):
        from .keyed import KeyedPlayer

        return KeyedPlayer(url, seed)
    if use == "mcp":
        from .mcp_http import McpPlayer

        return McpPlayer(url, seed)
    if use == "server-workers":
        from .server_workers import worker_player

        return worker_player(url, seed)
    if use == "gateway":
        from .gateways import gateway_player

        return gateway_player(url, seed)
    if use == "restarts":
        from .restarts import patient_client

        return patient_client(url, seed)
    client = client_of(url)
    return client if use == "async" else client.sync()
