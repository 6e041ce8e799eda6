"""The opening handshake of a WebSocket client (RFC 6455, section 4.1), sans IO.

Knows HTTP heads; must not know sockets.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AccessDenied, ConnectFailed, Forbidden
from ..protocol.json_values import decode
from .url import Address

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_HEAD_LIMIT = 65_536
_NOT_NOW = frozenset({"502", "503", "504"})  # what proxies say of a server that is not there yet
_NOT_LOADED = "NOT_LOADED"  # it is there, but its sources have a mistake: waiting does not help


class Handshake:
    """Writes the request and checks the answer.

    Args:
        address: The server's.
        headers: Further headers.
        subprotocols: What is offered, the preferred one first; `subprotocol` is what the server has chosen.
    """

    def __init__(
        self, address: Address, headers: Mapping[str, str] | None = None, subprotocols: Sequence[str] = ()
    ) -> None:
        self.subprotocol: str | None = None
        self._subprotocols = subprotocols
        self._shows_token = any(name.lower() == "authorization" for name in headers or {})
        self._key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {address.target} HTTP/1.1",
            f"Host: {address.authority}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {self._key}",
            "Sec-WebSocket-Version: 13",
        ]
        if subprotocols:
            lines.append(f"Sec-WebSocket-Protocol: {', '.join(subprotocols)}")
        for name, value in (headers or {}).items():
            if any(char in name + value for char in "\r\n"):
                raise ValueError(f"header {name!r} contains a line break")
            lines.append(f"{name}: {value}")
        self.request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._head = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Take in bytes of the answer; return what follows its head once that is whole and good, else None.

        Raises:
            ConnectFailed: The server refused, or does not speak WebSocket.
            AccessDenied: It asks for another token than it got.
        """
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _HEAD_LIMIT:
                raise ConnectFailed("the server's answer has an endless head")
            return None
        head, rest = bytes(self._head[:end]).decode("latin-1"), bytes(self._head[end + 4 :])
        self._check(head, rest)
        return rest

    def _check(self, head: str, rest: bytes) -> None:
        status_line, *lines = head.split("\r\n")
        parts = status_line.split(" ", 2)
        status = parts[1] if len(parts) > 1 else "?"
        if status != "101":
            if (denied := _denied(status, rest, shows_token=self._shows_token)) is not None:
                raise denied
            told = _object(rest)
            detail = told.get("detail") or rest[:200].decode("utf-8", "replace").strip()
            raise ConnectFailed(
                f"the server answered {status_line!r} to the WebSocket handshake. {detail}".strip(),
                is_transient=status in _NOT_NOW and told.get("code") != _NOT_LOADED,
            )
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        expected = base64.b64encode(hashlib.sha1((self._key + _GUID).encode()).digest()).decode()
        if headers.get("sec-websocket-accept") != expected:
            raise ConnectFailed("the server's WebSocket handshake is wrong (Sec-WebSocket-Accept)")
        chosen = headers.get("sec-websocket-protocol")
        if self._subprotocols and chosen is not None and chosen not in self._subprotocols:
            raise ConnectFailed(f"the server chose the subprotocol {chosen!r}, which was not offered")
        self.subprotocol = chosen


def _denied(status: str, body: bytes, *, shows_token: bool) -> AccessDenied | None:
    """Say who may not connect, and what to do about it; None where access is not the matter.

    A server without the route answers 403 as well, but says nothing about it.
    """
    if status not in ("401", "403"):
        return None
    data = _object(body)
    if status == "403" and not data:
        return None
    detail = data.get("detail") or body[:200].decode("utf-8", "replace").strip()
    if isinstance(role := data.get("role"), str):
        return Forbidden(role, f"{detail} Connect with a token of another role: token=, or OPENENV_TOKEN.")
    advice = ""
    if status == "401":
        advice = "Check token= and OPENENV_TOKEN." if shows_token else "Pass token=, or set OPENENV_TOKEN."
    return AccessDenied(f"the server refused the connection with status {status}. {detail} {advice}".strip())


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = decode(body)
    except ValueError:  # cut short, or of a proxy
        return {}
    return found if isinstance(found, dict) else {}
