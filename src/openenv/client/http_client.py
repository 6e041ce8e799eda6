"""`HTTPEnvClient`: a stateful episode over plain HTTP, for networks that block WebSockets.

Opens a session with `X-OpenEnv-Session: new` on reset and names it on each further call. Knows HTTP and the
payloads; needs no event loop.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

import httpx2
from typing_extensions import Self, TypeVar

from openenv.errors import (
    AccessDenied,
    ConnectFailed,
    ProtocolError,
    RequestTimeout,
    RequestValidationError,
    ServerError,
    SessionLost,
)
from openenv.protocol.backoff import Backoff
from openenv.protocol.client_sessions import error_from_frame, field_errors
from openenv.protocol.json_values import decode, encode
from openenv.protocol.redaction import redacted
from openenv.types import StepResult

from .bootstrap import provide_container, stop_provider, stop_quietly
from .hooks import ClientHooks
from .legacy_errors import also_of_requests
from .network import NO_SERVER, http_url, parse_ws_url, socket_url, with_token

ActT = TypeVar("ActT")
ObsT = TypeVar("ObsT")
StateT = TypeVar("StateT", default=Any)  # the first release had two parameters

SESSION_HEADER = "X-OpenEnv-Session"
KEY_HEADER = "Idempotency-Key"

_NEW = "new"
_ABSENT_S = 2.0  # how long a server that is not there may be just starting


class HTTPEnvClient(ClientHooks[ActT, ObsT, StateT]):
    """A blocking client for one episode over HTTP.

    A subclass names its models, as for `EnvClient`, or overrides the three hooks.

    Args:
        base_url: The server's address.
        request_timeout_s: How long an answer may take; afterwards the episode is lost.
        default_headers: Sent with every request.
        provider: Stopped when the client is closed.
        token: The token that the server requires; by default `OPENENV_TOKEN`.
        reconnect_timeout_s: How long to repeat a request after its connection broke. A server without HTTP sessions
            gets each request only once.

    Raises:
        ValueError: The address is not valid.
    """

    def __init__(
        self,
        base_url: str,
        request_timeout_s: float = 15.0,
        default_headers: Mapping[str, str] | None = None,
        provider: Any = None,
        *,
        token: str | None = None,
        reconnect_timeout_s: float = 5.0,
    ) -> None:
        self._base = http_url(base_url)
        self._provider = provider
        self._timeout = request_timeout_s
        self._headers = {**with_token(default_headers, token), "Content-Type": "application/json"}
        self._trust_env = not parse_ws_url(socket_url(base_url)).is_local
        self._http = self._new_http()
        self._pid = os.getpid()
        self._backoff = Backoff(reconnect_timeout_s)
        self._session_id: str | None = None
        self._echoes = False
        self._lost: str | None = None

    def _new_http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=self._base, timeout=self._timeout, headers=self._headers, trust_env=self._trust_env
        )

    def _settle(self) -> None:
        """In a forked process, leave connections, session and provider to the one that has them."""
        if self._pid != os.getpid():
            if self._session_id is not None:
                self._lost = self._lost or "opened in another process"
            self._http, self._session_id, self._provider = self._new_http(), None, None
            self._pid = os.getpid()

    def __repr__(self) -> str:
        state = f"session {self._session_id}" if self._session_id else "no session"
        if self._lost:
            state = f"lost: {self._lost}"
        return f"<{type(self).__name__} {redacted(self._base)}, {state}>"

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._base

    @property
    def session_id(self) -> str | None:
        """The session's name, once the server has given it one."""
        return self._session_id

    @classmethod
    def from_docker_image(cls, image: str, provider: Any = None, **kwargs: Any) -> Self:
        """Start a container of an image and return a client of it."""
        provided = provide_container(image, provider, kwargs)
        try:
            return cls(base_url=provided.base_url, provider=provided.provider)
        except BaseException:
            stop_quietly(provided.provider)
            raise

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> StepResult[ObsT]:
        """Begin an episode; further keywords go to the environment's `reset`."""
        options = {"seed": seed, "episode_id": episode_id}
        body = {**{key: value for key, value in options.items() if value is not None}, **kwargs}
        self._settle()
        lost, self._lost = self._lost, None
        try:
            try:
                payload = self._call("POST", "/reset", body, session=self._session_id or _NEW)
            except SessionLost:  # the old session is gone: begin in a new one, as a reset may
                self._session_id, self._lost = None, None
                payload = self._call("POST", "/reset", body, session=_NEW)
        except BaseException:
            self._lost = self._lost or lost  # a reset that failed has begun nothing
            raise
        if self._session_id is None:
            warnings.warn(
                f"{redacted(self._base)} keeps no sessions over HTTP: unless it is a one-environment server, each step "
                "runs on a fresh environment. Use a WebSocket client for it.",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._parse_result(payload)

    def step(
        self, action: ActT, *, timeout_s: float | None = None, request_id: str | None = None, **kwargs: Any
    ) -> StepResult[ObsT]:
        """Take an action.

        Args:
            action: The action.
            timeout_s: A time limit for the environment, if its `step` takes one.
            request_id: Your id for this request; reaches environments that accept it.
            kwargs: Passed to the environment's `step` if it accepts them.

        Raises:
            SessionLost: The episode is gone; `reset` begins a new one.
        """
        options = {"timeout_s": timeout_s, "request_id": request_id}
        body = {"action": self._step_payload(action), **kwargs}
        body.update({key: value for key, value in options.items() if value is not None})
        return self._parse_result(self._call("POST", "/step", body))

    def state(self) -> StateT:
        """Ask for the environment's state."""
        return self._parse_state(self._call("GET", "/state", None))

    def close(self) -> None:
        """End the session, hang up, stop the provider. A server out of reach ends the session with its lease."""
        self._settle()
        if self._session_id is not None and self._lost is None:
            with contextlib.suppress(httpx2.HTTPError):
                self._http.delete(f"/sessions/{self._session_id}")
            self._lost = "closed by the client"
        self._http.close()
        provider, self._provider = self._provider, None
        if provider is not None:
            stop_provider(provider)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, *, session: str | None = None
    ) -> dict[str, Any]:
        self._settle()
        with also_of_requests():
            return self._exchange(method, path, body, session or self._session_id)

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None, name: str | None) -> dict[str, Any]:
        if self._lost is not None:
            raise SessionLost(self._lost)
        headers = {SESSION_HEADER: name} if name is not None else {}
        headers[KEY_HEADER] = uuid.uuid4().hex
        response = self._send(method, path, None if body is None else encode(body), headers)
        # Also of a failure: a session exists even if its first reset failed, and the next reset uses it.
        self._session_id = response.headers.get(SESSION_HEADER, self._session_id)
        if response.status_code >= 400:
            raise self._failure(response.status_code, response.content)
        return self._object(response.content)

    def _send(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> httpx2.Response:
        """Send a request, again if the connection breaks: a server that has named a session runs each key once."""
        # Older servers know no keys: a reset that is to open a session does no harm there, anything else might.
        may_repeat = SESSION_HEADER in headers
        is_new = self._session_id is None
        was_sent = False
        began, attempt = time.monotonic(), 0
        while True:
            try:
                response = self._http.request(method, path, content=content, headers=headers)
                if not self._is_anothers(response, headers[KEY_HEADER]):
                    return response
                self._http.close()  # what else comes on that connection would be another's as well
                self._http = self._new_http()
            except httpx2.TimeoutException:
                self._lost = "a request timed out"
                raise RequestTimeout(
                    f"No answer from {redacted(self._base)}{path} in time; the episode is lost"
                ) from None
            except httpx2.TransportError as exc:
                is_absent = isinstance(exc, httpx2.ConnectError)
                was_sent = was_sent or not is_absent
                limit_s = _ABSENT_S if is_absent and is_new else self._backoff.timeout_s
                if not may_repeat or time.monotonic() - began + self._backoff.pause_s(attempt) > limit_s:
                    raise self._broken(exc, was_sent=was_sent) from exc
            time.sleep(self._backoff.pause_s(attempt))
            attempt += 1

    def _is_anothers(self, response: httpx2.Response, key: str) -> bool:
        """Whether a response answers another request: a server that repeats a request's key once repeats it always."""
        repeated = response.headers.get(KEY_HEADER)
        if repeated is None:
            return self._echoes and response.status_code == 200
        self._echoes = self._echoes or repeated == key
        return bool(repeated != key)

    def _broken(self, exc: httpx2.TransportError, *, was_sent: bool) -> Exception:
        if not was_sent:
            return ConnectFailed(f"Failed to connect to {redacted(self._base)}: {exc}. {NO_SERVER}")
        self._lost = f"connection lost: {exc}"
        return SessionLost(self._lost)

    def _failure(self, status: int, content: bytes) -> Exception:
        try:
            data = self._object(content)
        except ProtocolError:
            data = {"detail": content[:500].decode("utf-8", "replace")}
        detail = data.pop("detail", "")
        if status == 422:
            text = field_errors(detail) or detail
            return RequestValidationError(f"Server error: {text} (code: VALIDATION_ERROR)", details={"errors": detail})
        if "code" in data:
            error = error_from_frame({"message": detail, **data})
            if isinstance(error, SessionLost):
                self._lost = error.reason
            return error
        if status == 410:
            self._lost = str(detail) or "gone"
            return SessionLost(self._lost)
        return (AccessDenied if status in (401, 403) else ServerError)(f"Server error: HTTP {status}: {detail}")

    @staticmethod
    def _object(content: bytes) -> dict[str, Any]:
        try:
            data = decode(content)
        except ValueError as exc:
            raise ProtocolError(f"The server's answer is not JSON: {exc}") from None
        if not isinstance(data, dict):
            raise ProtocolError(f"The server's answer is not an object: {str(data)[:200]}")
        return data
