"""The capture proxy as a server in its own thread: `CaptureServer` opens rollouts, and agents call it.

Knows rollouts, their keys and their folders. `agent_routes` answers agents, `control_routes` the holder of the admin
key; `sessions_api.session_server` is this server with the sessions of the published capture API.
"""

# One rollout:
#
#   open ---> has a key, agents call ---> revoked: calls end, no call begins ---> closed: listed for `closed_ttl_s`
#               `Capture.key`               `Capture.revoke`                        `Capture.close`
#
# Threads: the server's thread has the loop of all connections and calls. `open` may be called from any thread, and only
# adds to the registry; `revoke`, `close` and `pause` run on the loop, and the calling thread waits for them.

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import secrets
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from openenv.errors import CaptureError
from openenv.protocol.addresses import is_loopback
from openenv.sandboxes.host import scratch

from ..tasks.task import BranchPoint, Budget, Model
from . import export
from .agent_routes import AgentRoutes
from .call_parts import Services
from .captured_rollout import CapturedRollout, EndpointTraits, RolloutRegistry, Spending, Stats, key_digest
from .control_routes import AdminRoutes, ControlRoutes, is_admin_path
from .encoding import Json
from .endpoint_check import ask_endpoint
from .inbound import AgentReply, AgentRequest, InboundLimits, LocalReply
from .listener import ProxyListener
from .outbound import Endpoints
from .records import (
    FILE,
    Call,
    JournalFull,
    Recorder,
    Recording,
    RecordingReader,
    has_records,
    read,
)
from .replay import Replay
from .training_trace import RolloutTurn, Sequence

SWEEP_S = 5.0
_DISK_THREADS = 4  # file systems write several waiting files at once
ProxyOrder = Literal["hold", "pause", "resume"]
"""The methods of `CaptureServer` that another process may call."""
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Capture:
    """A rollout at the proxy: its key, and its captured calls. Usable from any thread."""

    def __init__(self, server: CaptureServer, rollout: CapturedRollout, key: str) -> None:
        self._server = server
        self._held = rollout.recorder.held  # the recorder forgets it at the end
        self.rollout = rollout
        self.key = key
        """The agent's API key; only this proxy accepts it."""
        self.rollout_id = rollout.rollout_id
        self.path = rollout.recorder.folder
        """The folder of the records."""

    def recording(self) -> Recording:
        """Return the records that are on disk so far."""
        return read(self.path)

    def calls(self) -> list[Call]:
        """Return the calls so far; those under way are included as far as they got."""
        return self.recording().calls

    def trace(self) -> Recording:
        """Return the records for training: their answers may lack token data, which `Call.completion` has.

        Reads the disk only if the server has no `holds_calls`.
        """
        return self.recording() if self._held is None else self._held.whole()

    def turns(self) -> list[RolloutTurn]:
        """Return the calls in the form that trainers read."""
        return export.turns(self.trace())

    def sequences(self) -> list[Sequence]:
        """Return the training sequences."""
        return export.sequences(self.trace())

    def stats(self) -> Stats:
        """Return the current figures: budget, failures of the endpoint, missing records."""
        return self.rollout.stats()

    def ask_endpoint(self, tools: Iterable[Json] = ()) -> concurrent.futures.Future[str | None]:
        """Ask the rollout's endpoint for a few tokens; the result is the reason for its failure, or None if it answers.

        No agent wrote the request: it is not recorded and costs no budget. `tools` are sent with it.

        Raises:
            CaptureError: The capture server does not run.
        """
        return self._server.ask_endpoint(self.rollout, tools)

    async def post(self, path: str, body: bytes | Json, *, timeout_s: float | None = None) -> LocalReply:
        """Make a model call from this process: like an agent's request with this key, but without a connection.

        Args:
            path: The path of the dialect, such as `/v1/chat/completions`.
            body: The request: JSON, or its value, which nobody may change afterwards.
            timeout_s: How long the answer may take; None for no limit.

        Raises:
            CaptureError: The capture server does not run, or the answer took too long.
        """
        reply = LocalReply()
        await self._server.answer_here(self._request(path, body), reply, timeout_s)
        return reply

    def post_and_wait(self, path: str, body: bytes, *, timeout_s: float) -> LocalReply:
        """Do the same as `post` from a thread without an event loop."""
        reply = LocalReply()
        self._server.answer_and_wait(self._request(path, body), reply, timeout_s)
        return reply

    def _request(self, path: str, body: bytes | Json) -> AgentRequest:
        headers = {"authorization": f"Bearer {self.key}"}
        if isinstance(body, bytes):
            return AgentRequest("POST", path, headers, body)
        return AgentRequest("POST", path, headers, parsed=body)

    def revoke(self) -> None:
        """Revoke the key. When this returns, calls under way have ended and are recorded, and no call can begin."""
        self._server.end(self.rollout, self._server.revoke)

    def close(self) -> None:
        """Revoke the key and release memory; the records stay on disk and readable."""
        self._server.end(self.rollout, self._server.finish)

    async def aclose(self) -> None:
        """Do the same as `close` from an event loop, without blocking it."""
        try:
            await self._server.run_here(self._server.finish(self.rollout))
        except CaptureError:
            if self.rollout.closed_at is None:
                raise

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How a capture server listens, and how it calls endpoints."""

    host: str = "127.0.0.1"
    """The address to listen on; one that other machines reach needs an `admin_key`."""
    port: int = 0
    """0 for a free one."""
    admin_key: str | None = None
    """Opens the control routes on TCP; without it the server has none."""
    policy_header: str = "x-policy-version"
    """The response header with the version of the endpoint's policy."""
    tls: ssl.SSLContext | None = None
    """How to check the endpoints' certificates; by default as the system does."""
    backoff_s: float = 0.5
    """The approximate pause before the second attempt at an endpoint."""
    closed_ttl_s: float = 3600.0
    """How long the server lists a closed rollout."""
    max_body: int = 64 * 1024 * 1024
    """The largest request in bytes."""
    sockets: Path | None = None
    """The parent of the unix socket's folder; by default the system's folder for temporary files."""
    holds_calls: bool = False
    """Whether each `Capture` also holds its calls in memory, for a trainer that needs them at once."""
    is_durable: bool = False
    """Whether answers survive a power cut, except for those of the last second (`records.SYNC_S`). For records that
    another process may continue."""


def _new_key() -> str:
    # The prefix tells a leaked key of a proxy, which is worth nothing, from one of a provider.
    return f"oe-{secrets.token_urlsafe(32)}"


def _description(rollout: CapturedRollout) -> Json:
    """Return the facts about a rollout in the first entry of its records."""
    described = rollout.model.model_dump(mode="json", exclude={"api_key", "extra_headers"})
    return {
        "rollout_id": rollout.rollout_id,
        "metadata": rollout.metadata,
        "budget": rollout.spending.budget.model_dump(mode="json"),
        "model": rollout.redactor.value(described),
    }


class CaptureServer(ProxyListener):
    """The proxy between agents and model endpoints.

        with CaptureServer("records") as server:
            capture = server.open("rollout-1", Model(base_url="http://127.0.0.1:8000/v1", name="qwen"))
            ...  # an agent calls server.url with capture.key
            capture.close()

    Args:
        root: The folder of the records, with a folder per rollout; None for a temporary one, which the server removes
            when it stops.
        options: How it listens, and how it calls endpoints.
    """

    def __init__(self, root: Path | str | None, options: CaptureOptions | None = None) -> None:
        options = options or CaptureOptions()
        if not options.admin_key and not is_loopback(options.host):
            raise CaptureError(f"{options.host} is not a loopback address: give an admin_key to listen there.")
        self.has_temporary_root = root is None
        self._root = None if root is None else Path(root)
        self._root_lock = threading.Lock()
        self._scratch = contextlib.ExitStack()
        weakref.finalize(self, self._scratch.close)  # for an ASGI server that runs no lifespan
        self._registry = RolloutRegistry(options.closed_ttl_s)
        self._holds_calls = options.holds_calls
        self._endpoints = Endpoints(options.tls)
        self._is_durable = options.is_durable
        self._disk = ThreadPoolExecutor(_DISK_THREADS, "openenv-journal")
        self._services = Services(self._endpoints, options.policy_header.lower(), options.backoff_s, self._disk)
        self._agent_routes = AgentRoutes(self._registry, self._services)
        self._admin_routes: AdminRoutes | None = None
        if options.admin_key:
            self._admin_routes = ControlRoutes(self, options.admin_key)
        self._sweeper: asyncio.Task[None] | None = None
        super().__init__(options.host, options.port, InboundLimits(body=options.max_body), options.sockets)

    @property
    def root(self) -> Path:
        """The folder of the records; a temporary one is made here, when it is first needed."""
        with self._root_lock:
            if self._root is None:
                self._root = self._scratch.enter_context(scratch())
            return self._root

    # life

    def start(self, timeout_s: float | None = None) -> Self:
        """Listen.

        Args:
            timeout_s: How long that may take; None for no limit.

        Raises:
            CaptureError: The server cannot listen there, or not in time.
        """
        self.listen(timeout_s)
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # rollouts

    def open(
        self,
        rollout_id: str | None,
        model: Model,
        *,
        budget: Budget | None = None,
        metadata: Mapping[str, Any] | None = None,
        traits: EndpointTraits | None = None,
        key: str | None = None,
    ) -> Capture:
        """Open a rollout: a key, a budget, and a file of records.

        Args:
            rollout_id: The rollout's ID, also the name of its folder; None for a random one.
            model: The endpoint that its calls go to.
            budget: Its limits.
            metadata: Written into its records.
            traits: Facts about the endpoint from earlier rollouts.
            key: The agent's key; by default a random one.

        Raises:
            CaptureError: The ID is taken or cannot be the name of a folder, or the records cannot be made.
        """
        rollout = self._new_rollout(rollout_id, model, budget, metadata, traits)
        return self._begin(rollout, key or _new_key(), lambda: rollout.recorder.create(_description(rollout)))

    def reopen(
        self,
        rollout_id: str,
        model: Model,
        *,
        start: BranchPoint | None = None,
        budget: Budget | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Capture:
        """Open a rollout whose agent gets recorded answers first: its own after an interruption, or those of a parent.

        Args:
            rollout_id: The rollout's ID. If it has records, they are continued.
            model: The endpoint that its other calls go to.
            start: The beginning of a rollout without records: a call of its parent, or None.
            budget: Its limits; recorded answers count.
            metadata: Written into its records.

        Raises:
            CaptureError: As in `open`, or the records cannot be read or continued.
        """
        rollout = self._new_rollout(rollout_id, model, budget, metadata)
        recorder = rollout.recorder

        def begin() -> None:
            about = _description(rollout)
            earlier = recorder.reopen() if has_records(recorder.folder) else None
            if earlier is not None and earlier.recording.model:
                recorder.note("resume", **about)
                rollout.replay = Replay(earlier.answers_until(None), earlier.unanswered)
                return
            if start is not None:
                parent = RecordingReader(self.root / start.rollout_id)
                parent.advance()
                items = recorder.continue_from(parent.builder, until=start.call)
                rollout.replay = Replay(parent.builder.answers_until(start.call))
                about["parent"] = {"rollout_id": start.rollout_id, "call": start.call, "items": items}
                if not start.is_branch:
                    about["parent"]["is_branch"] = False
            recorder.create(about)

        return self._begin(rollout, _new_key(), begin)

    def _new_rollout(
        self,
        rollout_id: str | None,
        model: Model,
        budget: Budget | None,
        metadata: Mapping[str, Any] | None,
        traits: EndpointTraits | None = None,
    ) -> CapturedRollout:
        rollout_id = rollout_id or secrets.token_hex(16)
        if not _ID.fullmatch(rollout_id):
            raise CaptureError(f"{rollout_id!r} cannot be the id of a rollout: letters, digits, '.', '_', '-' can.")
        recorder = Recorder(self.root / rollout_id / FILE, is_durable=self._is_durable)
        if self._holds_calls:
            recorder.hold()
        spending, traits = Spending(budget or Budget()), traits or EndpointTraits()
        return CapturedRollout(rollout_id, b"", model, spending, recorder, traits, dict(metadata or {}))

    def _begin(self, rollout: CapturedRollout, key: str, write: Callable[[], None]) -> Capture:
        rollout.key_digest = key_digest(key)
        # Into the registry first: of two callers with one ID, the second must not touch the records of the first.
        self._registry.add(rollout)
        try:
            write()
        except BaseException:
            self._registry.discard(rollout)
            raise
        return Capture(self, rollout, key)

    def rollouts(self) -> list[CapturedRollout]:
        """Return every rollout that the server still lists."""
        return self._registry.all()

    def find(self, rollout_id: str) -> CapturedRollout | None:
        """Return a rollout by its ID."""
        return self._registry.by_id(rollout_id)

    # The replica that the rollout's calls use, not the first of the model: another replica may work.
    def ask_endpoint(
        self, rollout: CapturedRollout, tools: Iterable[Json] = ()
    ) -> concurrent.futures.Future[str | None]:
        """Ask a rollout's endpoint for a few tokens; see `Capture.ask_endpoint`."""
        model = rollout.model.model_copy(update={"base_url": rollout.base_url})
        return self._submit(ask_endpoint(self._services, model, refused=rollout.refused, tools=tools))

    def pause(self) -> None:
        """Hold back new calls of all rollouts until `resume`; return when those under way have ended.

        Use it to update the policy's weights: no answer is then sampled from two versions. Agents only wait, within
        their own timeouts and budgets.

        Raises:
            CaptureError: The capture server does not run.
        """
        self.run(self._pause())

    def hold(self) -> None:
        """Hold back new calls until `resume`, without waiting for those under way."""
        self._agent_routes.is_paused = True

    def resume(self) -> None:
        """Release the calls that `pause` or `hold` held back.

        Raises:
            CaptureError: The capture server does not run.
        """
        self._agent_routes.is_paused = False  # now, because `hold` may follow at once
        self._running_loop().call_soon_threadsafe(self._wake_all)

    def obey(self, order: ProxyOrder) -> None:
        """Carry out an order of another process."""
        {"hold": self.hold, "pause": self.pause, "resume": self.resume}[order]()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause while a `with` block runs."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    # New calls wait in `AgentRoutes`, before they are counted or recorded. Calls under way end by themselves: a policy
    # is replaced between two answers.
    async def _pause(self) -> None:
        self._agent_routes.is_paused = True
        for rollout in self._registry.all():
            for call in list(rollout.active):
                await call.over.wait()

    def _wake_all(self) -> None:
        for rollout in self._registry.all():
            rollout.changed.set()

    def end(self, rollout: CapturedRollout, how: Callable[[CapturedRollout], Coroutine[Any, Any, None]]) -> None:
        """Revoke or finish a rollout from another thread; a server that has stopped has done so already."""
        try:
            self.run(how(rollout))
        except CaptureError:
            if rollout.closed_at is None:
                raise

    async def revoke(self, rollout: CapturedRollout) -> None:
        """Refuse the calls of a rollout from now on, and end those under way."""
        is_first = not rollout.revoked
        rollout.revoked = True
        rollout.changed.set()  # for calls that wait
        self._registry.forget_key(rollout)
        # Stop all of them before waiting for the first: each needs time to write its end into the records.
        for call in list(rollout.active):
            call.stop("revoked")
        for call in list(rollout.active):
            await call.over.wait()
        if is_first:
            with contextlib.suppress(JournalFull):  # the recorder keeps that as `failure`
                rollout.recorder.note("note", what="revoked")

    async def finish(self, rollout: CapturedRollout) -> None:
        """Revoke a rollout's key and release memory."""
        await self.revoke(rollout)
        if rollout.closed_at is None:
            rollout.close()

    # for the listener: these run on the server's loop, or on the loop of an ASGI server

    def is_known(self, key: str) -> bool:
        """Return whether a rollout has this key."""
        return self._registry.by_key(key) is not None

    async def answer(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer an agent, or the holder of the admin key."""
        if self._admin_routes is not None and is_admin_path(request.route_path):
            await self._admin_routes.handle(request, reply)
        else:
            await self._agent_routes.handle(request, reply)

    async def answer_sandbox(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer an agent: nothing on the sandboxes' socket leads to the admin routes."""
        await self._agent_routes.handle(request, reply)

    async def on_listening(self) -> None:
        """Start to sweep."""
        if not self.has_temporary_root:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_again())

    async def _sweep_again(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Close idle connections to endpoints, and forget rollouts that were closed long ago."""
        self._endpoints.sweep()
        self._registry.sweep()

    async def on_stop(self) -> None:
        """End all rollouts, and remove a temporary folder of records."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        # Calls end before the connections to their endpoints do, so that each has its proper end in the records.
        for rollout in self._registry.all():
            await self.finish(rollout)
        self._endpoints.close()
        self._disk.shutdown(wait=False)
        with self._root_lock:
            self._scratch.close()
            if self.has_temporary_root:
                self._root = None
