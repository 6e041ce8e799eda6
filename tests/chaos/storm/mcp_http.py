"""Episodes whose steps are tool calls over `POST /mcp`, in a session that an orchestrator has opened over HTTP.

Of both eras of MCP, with `Mcp-Session-Id` after a handshake and with each request on its own, and in OpenEnv's own
JSON-RPC. A call has a key, so that it may be repeated.
"""

from __future__ import annotations

import json
from typing import Any

from openenv.core.client_types import StepResult
from openenv.errors import ProtocolError, ServerError, SessionLost

from .environment import Move
from .keyed import KeyedPlayer

HANDSHAKE, MODERN, OWN = "2025-06-18", "2026-07-28", "own"
_ACCEPT = {"Accept": "application/json, text/event-stream"}


class McpPlayer(KeyedPlayer):
    """Plays with tools over HTTP what others play with steps."""

    def __init__(self, url: str, seed: int, *, keeps_keys: bool = True) -> None:
        super().__init__(url, seed, keeps_keys=keeps_keys)
        self._moves_at = 0
        self._era = (HANDSHAKE, MODERN, OWN)[seed % 3]
        self._client: str | None = None
        self._last_id = 0

    def step(self, action: Move) -> Any:
        """Call the tool."""
        params = {"name": "move", "arguments": action.model_dump(exclude={"metadata"})}
        if self._era == OWN:
            result = self._rpc("tools/call", {**params, **self._session()}, {})
        elif self._era == MODERN:
            meta = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
            headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": "move", **self._named()}
            result = self._rpc("tools/call", {**params, "_meta": meta}, headers)
        else:
            result = self._rpc("tools/call", params, {"Mcp-Session-Id": self._handshake()})
        if result.get("isError"):
            text = result["content"][0]["text"]
            raise SessionLost(text) if "session" in text else ServerError(text)
        content = result.get("structuredContent") or result.get("data") or json.loads(result["content"][0]["text"])
        return StepResult(observation=content, reward=content["reward"], done=False)

    def _session(self) -> dict[str, str]:
        assert self._opened is not None
        return {"session_id": self._opened["session_id"]}

    def _handshake(self) -> str:
        if self._client is None:
            about = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": {"name": "storm", "version": "1"}}
            self._rpc("initialize", about, self._named())
            assert self._client is not None
        return self._client

    def _rpc(self, method: str, params: dict[str, Any], headers: dict[str, str]) -> Any:
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        try:
            # An `initialize` that names a session changes nothing there: it needs no key.
            answer = self._http.ask(
                "POST",
                "/mcp",
                message,
                headers={**_ACCEPT, **headers} if headers else {},
                is_keyed=method == "tools/call",
            )
        except ServerError as exc:
            if "HTTP 404" in str(exc):
                raise SessionLost(str(exc)) from exc
            raise
        self._client = answer.headers.get("mcp-session-id", self._client)
        if answer.body.get("id") != self._last_id:
            raise ProtocolError(f"the answer to {answer.body.get('id')} instead of {self._last_id}")
        if "error" in answer.body:
            error = answer.body["error"]
            reason = (error.get("data") or {}).get("reason")
            raise SessionLost(reason) if reason else ServerError(str(error))
        return answer.body["result"]
