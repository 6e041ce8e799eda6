"""Record the planned episode of a served package: the plan, every message, and the deadlines of the connection.

    RuntimePlan ── collect_runtime_evidence ── RuntimeEvidence ── graders

The server under test is untrusted: it may send endless or malformed replies, or none. This module records, and must not
judge.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from openenv.client.network import with_token
from openenv.env.manifest import ExecutionDeclaration, NetworkPolicy, ResourceDeclaration
from openenv.errors import message_of
from openenv.types import WSErrorCode

# Plans come from packages under test, which are untrusted: every size has a limit.
MAX_PLAN_BYTES = 65536
MAX_PLAN_ACTIONS = 100
MAX_JSON_DEPTH = 32
MAX_JSON_NODES = 10000
# These have fields of their own in the plan. A second value in the options could contradict them.
_RESERVED_OPTIONS = ("episode_id", "seed")


class RuntimePlanError(ValueError):
    """The plan of a package cannot be read, or is none."""


class RuntimeReset(BaseModel):
    """The arguments of the measured episode's reset."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    episode_id: str = Field(min_length=1, max_length=128)
    seed: int = Field(ge=0, le=2**32 - 1)
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("options")
    @classmethod
    def _leaves_the_others_alone(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in _RESERVED_OPTIONS if name in options]:
            raise ValueError(f"{' and '.join(taken)} must stand beside options, not in them")
        return options


class RuntimePlan(BaseModel):
    """The measured episode: its reset and its actions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    plan_schema_version: Literal["1"]
    reset: RuntimeReset
    actions: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_PLAN_ACTIONS)


def load_runtime_plan(root: Path, execution: ExecutionDeclaration) -> RuntimePlan:
    """Read the plan that a manifest names.

    Raises:
        RuntimePlanError: It cannot be read, is too long or too deep, or something in it does not fit.
    """
    return read_runtime_plan(root / execution.probe_path)


def read_runtime_plan(path: Path, defaults: Mapping[str, Any] | None = None) -> RuntimePlan:
    """Read a plan from a file; `defaults` are the fields, also of the reset, that it may leave out.

    Raises:
        RuntimePlanError: As for `load_runtime_plan`.
    """
    try:
        with path.open("rb") as file:
            # One byte more than allowed shows that the file is too long, without reading all of it.
            text = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise RuntimePlanError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_PLAN_BYTES:
        raise RuntimePlanError(f"{path.name} is longer than {MAX_PLAN_BYTES} bytes")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        # Before validation: pydantic would walk the whole value first.
        _require_small(data)
        if defaults is not None and isinstance(data, dict):
            data = {**defaults, **data}
            if isinstance(data["reset"], dict):
                # The reset has defaults too, field by field.
                data["reset"] = {**defaults["reset"], **data["reset"]}
        return RuntimePlan.model_validate(data)
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, one['loc'])) or path.name}: {one['msg']}" for one in error.errors()[:3])
        raise RuntimePlanError(f"{path.name} is not a valid plan: {where}") from error
    except (ValueError, RecursionError) as error:
        raise RuntimePlanError(f"{path.name} is not a valid plan: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a key twice: which value counts depends on the reader."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed in JSON")


def _require_small(data: Any) -> None:
    # A loop instead of recursion, because the depth is what has to be limited.
    nodes, todo = 0, [(data, 1)]
    while todo:
        value, depth = todo.pop()
        nodes += 1
        if nodes > MAX_JSON_NODES or depth > MAX_JSON_DEPTH:
            raise ValueError(f"more than {MAX_JSON_NODES} values, or more than {MAX_JSON_DEPTH} levels of them")
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            todo += [(child, depth + 1) for child in value]


class LaunchSpec(BaseModel):
    """How an image is run for the checks of its package."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # Only a digest identifies an image; a tag could be moved between build and run.
    image_ref: str = Field(pattern=r"^(?:[^@\s]+@)?sha256:[0-9a-f]{64}$")
    resources: ResourceDeclaration
    network: NetworkPolicy
    # Becomes part of a container's name.
    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    startup_timeout_s: float = Field(default=30.0, gt=0, le=300)
    env_vars: dict[str, str] = Field(default_factory=dict, max_length=64)


@dataclass(frozen=True)
class WireExchange:
    """A request to the environment and its reply, as they were on the wire."""

    operation: Literal["reset", "step", "state"]
    request_json: str
    response_json: str


@dataclass(frozen=True)
class RuntimeEvidence:
    """The record of an episode; with a `failure_phase` it ended early."""

    exchanges: tuple[WireExchange, ...] = ()
    observation_schema_json: str | None = None
    failure_phase: str | None = None
    failure_reason: str | None = None
    reset_observation_schema_json: str | None = None


# reachable: the probe connected. denied: no route. inconclusive: anything else, which proves nothing.
class ProbeOutcome(BaseModel):
    """The result of one connection attempt."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    result: Literal["reachable", "denied", "inconclusive"]
    errno: int | None = None


class NetworkProbe(BaseModel):
    """The same attempt from a container with a network (`control`) and from the package's namespace (`subject`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["tcp", "udp", "icmp"]
    control: ProbeOutcome
    subject: ProbeOutcome


class NamespaceEvidence(BaseModel):
    """The interfaces and routes of a network namespace."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    interfaces: list[str]
    default_route: bool
    ipv6_non_loopback: int = Field(ge=0)
    listening_ports: list[int] = Field(default_factory=list)


class NetworkEvidence(BaseModel):
    """The reach of a package, measured from its network namespace."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    requested_mode: Literal["public", "no-network"]
    subject_network_mode: str
    namespace: NamespaceEvidence
    probes: list[NetworkProbe]


def abort_socket(transport_socket: socket.socket | None) -> None:
    """Wake every thread that reads or writes a socket, and close it. Safe to call twice."""
    if transport_socket is None:
        return
    with contextlib.suppress(OSError):
        transport_socket.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        transport_socket.close()


@contextlib.contextmanager
def http_deadline(timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield `extensions` for one HTTPX request. Its connection is aborted when the time is over.

    A timeout of HTTPX begins again with every byte; this one is for the whole reply. The request must open a connection
    for itself, so that its socket is seen.

    Raises:
        TimeoutError: The time was over before the request had ended.
    """
    # `settimeout` limits one read. A server that sends a byte per second would never exceed it.
    sockets: list[socket.socket] = []
    is_over = threading.Event()

    def trace(event: str, info: dict[str, Any]) -> None:
        if event.endswith("connect_tcp.complete"):
            opened = info["return_value"].get_extra_info("socket")
            sockets.append(opened)
            # The time may be over while the connection is still being made.
            if is_over.is_set():
                abort_socket(opened)

    def end() -> None:
        is_over.set()
        for opened in sockets:
            abort_socket(opened)

    timer = threading.Timer(timeout_s, end)
    # A forgotten timer must not keep the program alive.
    timer.daemon = True
    timer.start()
    try:
        yield {"trace": trace}
    except Exception as error:
        if is_over.is_set():
            raise TimeoutError(f"no complete reply within {timeout_s:g} s") from error
        raise
    finally:
        timer.cancel()


# Enough for pictures as observations, and small enough to keep in memory.
MAX_MESSAGE_BYTES = 1 << 20
MAX_TRACE_BYTES = 8 << 20
_CLOSE_S = 2.0


class RuntimeCollectionInterrupted(KeyboardInterrupt):
    """Ctrl-C during the episode; `evidence` is the record so far."""

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

    Failures do not raise: the evidence has the phase, the reason and the record so far.

    Args:
        base_url: The server's address.
        plan: The reset and the actions; the state is read after each of them.
        episode_timeout_s: How long the whole may take.
        request_timeout_s: How long one reply may take; by default as long as the whole.
        token: The token that the server requires.

    Raises:
        RuntimeCollectionInterrupted: Ctrl-C came meanwhile.
    """
    episode = _RecordedEpisode(base_url, plan, time.monotonic() + episode_timeout_s, request_timeout_s, token)
    reason: str | None = None
    try:
        episode.record()
    # The user stops the run; the record so far still goes into the bundle.
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
        # schema -> connect -> reset -> state -> (step -> state)... -> close: the phase of a failure.
        self._phase = "schema"
        self._exchanges: list[WireExchange] = []
        self._schemas: dict[str, str | None] = {}
        self._bytes = 0

    def evidence(self, reason: str | None) -> RuntimeEvidence:
        """Return the record so far; `reason` explains a failure in the current phase."""
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
        # http://host/prefix -> ws://host/prefix/ws
        address = urlunsplit(("wss" if scheme == "https" else "ws", host, f"{path}/ws", "", ""))
        with connect(
            address,
            # No proxy, no compression: the record shows the bytes between us and the server.
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
        # Read in chunks, so that an endless reply stops at the limit.
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
        # The schema of observations is required; the reset may have the same one.
        schemas = json.loads(bytes(text))
        if not isinstance(schemas, dict) or not isinstance(schemas.get("observation"), dict):
            raise _CollectionFailed("GET /schema answered without the schema of observations")
        for name in ("observation", "reset_observation"):
            if isinstance(schemas.get(name), dict):
                self._schemas[name] = json.dumps(schemas[name], sort_keys=True)

    def _play(self, socket: ClientConnection) -> None:
        # The fields win over options of the same name, which the plan refuses anyway.
        reset = {**self._plan.reset.options, "seed": self._plan.reset.seed, "episode_id": self._plan.reset.episode_id}
        done = self._exchange(socket, "reset", reset)
        # The state after every call is part of the contract that graders check.
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
        # Limits a single reply and the whole episode.
        self._bytes += len(request) + len(text)
        if self._bytes > MAX_TRACE_BYTES:
            raise _CollectionFailed(f"the messages of the episode are longer than {MAX_TRACE_BYTES} bytes")
        # Recorded before it is judged, so that a malformed reply is in the record.
        self._exchanges.append(WireExchange(operation, request, text))
        message = json.loads(text)
        expected = "state" if operation == "state" else "observation"
        if not isinstance(message, dict) or not isinstance(message.get("data"), dict):
            raise _CollectionFailed(f"{operation} was answered with no message")
        if message.get("type") == "error":
            # The environment's message may contain secrets; the code names the kind of failure.
            raise _CollectionFailed(f"{operation} was refused ({_code_of(message['data'])})")
        if message.get("type") != expected:
            raise _CollectionFailed(f"{operation} was answered with {message.get('type')!r} instead of {expected!r}")
        # `done` may be missing in replies of state.
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
