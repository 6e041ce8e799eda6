"""`connect`: a client for any server, with models from the server's published schemas."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
from pydantic import TypeAdapter, ValidationError
from typing_extensions import Self

from openenv.errors import AccessDenied, ConnectFailed, ProtocolError, RequestValidationError, message_of
from openenv.protocol.redaction import redacted
from openenv.types import StepResult

from .env_client import EnvClient
from .flows import Flow, RunBlocking
from .hooks import ModelParser, model_parser
from .network import NO_SERVER, ConnectionOptions, http_url, parse_ws_url, socket_url
from .schema_models import ModelTypes, SchemaUnreadable, build_types, read_models

_MOST_BYTES = 16 * 1024 * 1024
_TOTAL_S = 30.0
"""Limits of a reply: its size, and its time if the connection's time limit is shorter."""


def connect(base_url: str, **options: Any) -> SchemaEnvClient:
    """Return a client of the server at an address, with models from its `/schema`.

    Use it as any other client: `with openenv.connect(url).sync() as env`, or `async with openenv.connect(url) as env`.
    Its `Action`, `Observation` and `State` are classes; actions may also be dicts. Arrays come back as NumPy arrays
    if NumPy is installed.

    Args:
        base_url: The server's address.
        options: The options of `EnvClient`.
    """
    return SchemaEnvClient(base_url, **options)


@dataclass(frozen=True, slots=True)
class _LearnedModels:
    types: ModelTypes
    actions: TypeAdapter[Any]
    observation: ModelParser
    state: ModelParser


class SchemaEnvClient(EnvClient[Any, Any, Any]):
    """A client that gets its models from the server when it connects."""

    _learned: _LearnedModels | None = None

    @property
    def Action(self) -> Any:
        """The class of actions."""
        return self._models.types.action

    @property
    def Observation(self) -> Any:
        """The class of observations."""
        return self._models.types.observation

    @property
    def State(self) -> Any:
        """The class of states."""
        return self._models.types.state

    @property
    def _models(self) -> _LearnedModels:
        if self._learned is None:
            raise RuntimeError(
                "The models are known once the client is connected: use it in a with block, or connect()"
            )
        return self._learned

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _step_payload(self, action: Any) -> dict[str, Any]:
        if isinstance(action, Mapping):
            try:
                action = self._models.actions.validate_python(dict(action))
            except ValidationError as exc:
                errors = exc.errors(include_url=False, include_context=False)
                raise RequestValidationError(f"Invalid action: {exc}", details={"errors": errors}) from exc
        return super()._step_payload(action)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        return self._models.observation.parse_result(payload)

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return self._models.state.parse(dict(payload))

    # -- flows ----------------------------------------------------------------------------------------------------

    def _connect_flow(self) -> Flow[Self]:
        yield from super()._connect_flow()
        yield from self._learn()
        return self

    def _reset_flow(self, kwargs: dict[str, Any]) -> Flow[StepResult[Any]]:
        yield from self._learn()
        return (yield from super()._reset_flow(kwargs))

    def _step_flow(self, action: Any, kwargs: dict[str, Any]) -> Flow[StepResult[Any]]:
        yield from self._learn()
        return (yield from super()._step_flow(action, kwargs))

    def _state_flow(self) -> Flow[Any]:
        yield from self._learn()
        return (yield from super()._state_flow())

    def _learn(self) -> Flow[None]:
        if self._learned is not None:
            return
        yield from super()._connect_flow()  # which waits for a server that is just starting
        url, options = str(self.base_url), self._options
        schemas = yield RunBlocking(lambda: read_schemas(url, options))
        types = learn_types(schemas, url)
        adapter: TypeAdapter[Any] = TypeAdapter(types.action)
        self._learned = _LearnedModels(types, adapter, model_parser(types.observation), model_parser(types.state))

    def _clone(self) -> Self:
        clone = super()._clone()
        clone._learned = self._learned
        return clone


def read_schemas(base_url: str, options: ConnectionOptions) -> Mapping[str, Any]:
    """Ask a server for its schemas.

    Raises:
        ConnectFailed: It does not answer.
        AccessDenied: It requires another token.
        ProtocolError: The reply is something else.
    """
    return ask(base_url, "/schema", options)


def ask(base_url: str, path: str, options: ConnectionOptions) -> Mapping[str, Any]:
    """Return the JSON object that a server answers `GET` with; raises as `read_schemas` does."""
    url = http_url(base_url) + path
    shown = redacted(url)
    is_local = parse_ws_url(socket_url(base_url)).is_local
    timeout_s = options.connect_timeout_s
    body = bytearray()
    headers = {**options.headers, "Accept-Encoding": "identity"}
    watch = _Watch(max(_TOTAL_S, timeout_s))
    try:
        with (
            watch,
            httpx2.Client(timeout=timeout_s, trust_env=not is_local) as http,
            http.stream("GET", url, headers=headers, extensions={"trace": watch.trace}) as reply,
        ):
            if "content-encoding" in reply.headers:  # a few bytes could expand to gigabytes
                raise ProtocolError(f"GET {shown}: the reply is compressed, although the request forbids it")
            for piece in reply.iter_raw():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise ProtocolError(f"GET {shown}: the reply is larger than {_MOST_BYTES} bytes")
    except httpx2.HTTPError as exc:
        if not watch.is_over:
            raise ConnectFailed(f"GET {shown}: {type(exc).__name__}: {message_of(exc)}. {NO_SERVER}") from exc
    if watch.is_over:  # a body without a length seems to end there
        raise ProtocolError(f"GET {shown}: the reply took longer than {watch.seconds:g} s")
    if reply.status_code in (401, 403):
        raise AccessDenied(f"GET {shown} requires another token: token=..., or OPENENV_TOKEN")
    try:
        reply.raise_for_status()
        data = json.loads(body)
    except (httpx2.HTTPError, ValueError, RecursionError) as exc:
        raise ProtocolError(
            f"GET {shown} was answered {reply.status_code}, without JSON: is this an environment?"
        ) from exc
    if not isinstance(data, dict):
        raise ProtocolError(f"GET {shown}: the reply is not an object; is this an environment?")
    return data


class _Watch:
    """Ends the connections of a request when its time is over.

    Limits of httpx are for each read, and a server may send a reply byte by byte, its head, too.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._streams: list[Any] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take the streams of connections from the events of httpcore."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._streams.append(info["return_value"])
            if self.is_over:
                self._end()

    def _end(self) -> None:
        self.is_over = True
        for stream in self._streams:
            with contextlib.suppress(OSError):  # the plain socket under TLS is detached
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def learn_types(schemas: Mapping[str, Any], url: str) -> ModelTypes:
    """Make the types of a server's schemas.

    Raises:
        ProtocolError: They are none.
    """
    try:
        return build_types(read_models(schemas))
    except SchemaUnreadable as exc:
        raise ProtocolError(f"The schemas of {redacted(url)} cannot be read: {exc}") from exc
