"""Plays the planned episode over HTTP and WebSocket and keeps every message as it was. Must not judge."""

from __future__ import annotations

import json
import time
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx2
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from openenv.client.network import with_token
from openenv.errors import message_of
from openenv.types import WSErrorCode as WSErrorCode

from .contracts import RuntimeEvidence, RuntimePlan, WireExchange
from .transport import abort_socket as abort_socket
from .transport import http_deadline

MAX_MESSAGE_BYTES = 1 << 20
MAX_TRACE_BYTES = 8 << 20
_CLOSE_S = 2.0


class RuntimeCollectionInterrupted(KeyboardInterrupt):
    """Ctrl-C during the episode; `evidence` is what was seen until then."""

    def __init__(self, evidence: RuntimeEvidence) -> None:
        super().__init__("the episode was interrupted")
        self.evidence = evidence


class _CollectionFailed(Exception):
    """The episode cannot go on; the text says why."""


def collect_runtime_evidence(
    base_url: str,
    plan: RuntimePlan,
    *,
    episode_timeout_s: float,
    request_timeout_s: float | None = None,
    token: str | None = None,
) -> RuntimeEvidence:
    """Play the planned episode until it is done, and return all messages with the server's schemas.

    What goes wrong does not raise: the evidence has the phase and the reason, and what was seen until then.

    Args:
        base_url: The server's address.
        plan: The reset and the actions; the state is read after each of them.
        episode_timeout_s: How long the whole may take.
        request_timeout_s: How long one reply may take; by default as long as the whole.
        token: What the server asks for.

    Raises:
        RuntimeCollectionInterrupted: Ctrl-C came meanwhile.
    """
    episode = _RecordedEpisode(base_url, plan, time.monotonic() + episode_timeout_s, request_timeout_s, token)
    reason: str | None = None
    try:
        episode.record()
    except KeyboardInterrupt as error:
        raise RuntimeCollectionInterrupted(episode.evidence("the episode was interrupted")) from error
    except (_CollectionFailed, TimeoutError) as error:
        reason = message_of(error)
    except (httpx2.HTTPError, WebSocketException, OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {message_of(error)}"
    return episode.evidence(reason)


class _RecordedEpisode:
    """An episode while it is recorded."""

    def __init__(
        self, base_url: str, plan: RuntimePlan, deadline: float, request_timeout_s: float | None, token: str | None
    ) -> None:
        self._url = base_url.rstrip("/")
        self._plan = plan
        self._deadline = deadline
        self._request_timeout_s = request_timeout_s
        self._headers = with_token(None, token)
        self._phase = "schema"
        self._exchanges: list[WireExchange] = []
        self._schemas: dict[str, str | None] = {}
        self._bytes = 0

    def evidence(self, reason: str | None) -> RuntimeEvidence:
        """Return what was seen so far; with a reason, the phase it belongs to."""
        return RuntimeEvidence(
            exchanges=tuple(self._exchanges),
            observation_schema_json=self._schemas.get("observation"),
            reset_observation_schema_json=self._schemas.get("reset_observation"),
            failure_phase=None if reason is None else self._phase,
            failure_reason=reason,
        )

    def record(self) -> None:
        """Read the schemas, then play the episode."""
        self._read_schemas()
        self._phase = "connect"
        scheme, host, path, *_ = urlsplit(self._url)
        address = urlunsplit(("wss" if scheme == "https" else "ws", host, f"{path}/ws", "", ""))
        with connect(
            address,
            proxy=None,
            compression=None,
            additional_headers=self._headers,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=self._left_s(),
            close_timeout=_CLOSE_S,
        ) as socket:
            self._play(socket)
            self._phase = "close"

    def _read_schemas(self) -> None:
        timeout_s = self._left_s()
        text = bytearray()
        with (
            http_deadline(timeout_s) as extensions,
            httpx2.Client(trust_env=False, headers=self._headers, timeout=timeout_s) as client,
            client.stream("GET", f"{self._url}/schema", extensions=extensions) as reply,
        ):
            reply.raise_for_status()
            for chunk in reply.iter_bytes():
                text += chunk
                if len(text) > MAX_MESSAGE_BYTES:
                    raise _CollectionFailed(f"the schemas are longer than {MAX_MESSAGE_BYTES} bytes")
        schemas = json.loads(bytes(text))
        if not isinstance(schemas, dict) or not isinstance(schemas.get("observation"), dict):
            raise _CollectionFailed("GET /schema answered without the schema of observations")
        for name in ("observation", "reset_observation"):
            if isinstance(schemas.get(name), dict):
                self._schemas[name] = json.dumps(schemas[name], sort_keys=True)

    def _play(self, socket: ClientConnection) -> None:
        reset = {**self._plan.reset.options, "seed": self._plan.reset.seed, "episode_id": self._plan.reset.episode_id}
        done = self._exchange(socket, "reset", reset)
        self._exchange(socket, "state")
        for action in self._plan.actions:
            if done:
                break
            done = self._exchange(socket, "step", action)
            self._exchange(socket, "state")

    def _exchange(
        self, socket: ClientConnection, operation: Literal["reset", "step", "state"], data: dict[str, Any] | None = None
    ) -> bool:
        """Send a request, keep it with its reply, and return whether the reply ends the episode."""
        self._phase = operation
        request = json.dumps({"type": operation} if data is None else {"type": operation, "data": data})
        socket.send(request)
        reply = socket.recv(timeout=self._left_s())
        text = reply if isinstance(reply, str) else reply.decode("utf-8")
        self._bytes += len(request) + len(text)
        if self._bytes > MAX_TRACE_BYTES:
            raise _CollectionFailed(f"the messages of the episode are longer than {MAX_TRACE_BYTES} bytes")
        self._exchanges.append(WireExchange(operation, request, text))
        message = json.loads(text)
        expected = "state" if operation == "state" else "observation"
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            raise _CollectionFailed(f"{operation} was answered with no message")
        if message.get("type") == "error":
            # What the environment says may hold its secrets; the code names the kind of the failure.
            raise _CollectionFailed(f"{operation} was refused ({_code_of(message['data'])})")
        if message.get("type") != expected:
            raise _CollectionFailed(f"{operation} was answered with {message.get('type')!r} instead of {expected!r}")
        return bool(message["data"].get("done"))

    def _left_s(self) -> float:
        """Return how long the next reply may take."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the episode took longer than declared")
        return left_s if self._request_timeout_s is None else min(left_s, self._request_timeout_s)


def _code_of(data: dict[str, Any]) -> str:
    code = data.get("code")
    return WSErrorCode(code).value if code in {one.value for one in WSErrorCode} else "an unknown code"
