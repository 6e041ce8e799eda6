"""How a client connects: limits, headers, the token, and which protocols it offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from ..protocol.client_sessions import SUBPROTOCOL_JSON
from ..settings import client_token

ProtocolChoice = Literal["auto", "v1", "v2"]
PROTOCOLS: Final[tuple[str, ...]] = get_args(ProtocolChoice)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Limits and headers of a connection; times in seconds."""

    connect_timeout_s: float = 10.0
    retry_refused_s: float = 2.0
    message_timeout_s: float | None = 60.0
    max_message_bytes: int = 100 * 1024 * 1024
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a token may be among them
    protocol: ProtocolChoice = "v1"

    @property
    def subprotocols(self) -> tuple[str, ...]:
        """The subprotocols that the handshake offers."""
        return () if self.protocol == "v1" else (SUBPROTOCOL_JSON,)


def with_token(headers: Mapping[str, str] | None, token: str | None) -> dict[str, str]:
    """Return headers with a bearer token: the argument, else the header that is there, else `OPENENV_TOKEN`."""
    merged = dict(headers or {})
    present = next((name for name in merged if name.lower() == "authorization"), None)
    if token is None and present is None:
        token = client_token()
    if token is not None:
        merged.pop(present or "", None)
        merged["Authorization"] = f"Bearer {token}"
    return merged
