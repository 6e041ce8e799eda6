"""The capture proxy as a server in a thread of its own: `CaptureServer` opens rollouts, agents call it.

Knows rollouts and folders, and which requests agents may make; `control_routes` has those of the admin key.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import secrets
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from openenv.errors import CaptureError
from openenv.protocol.addresses import is_loopback

from ..tasks.model_parameters import asked_limit
from ..tasks.task import Budget, Model
from . import export
from .captured_rollout import CapturedRollout, RolloutRegistry, Spending, Stats, key_digest
from .control_routes import ControlRoutes
from .dialects import BRIDGES, DIALECTS, Route, route
from .dialects.dialect import MALFORMED, AgentDialect
from .encoding import Json, loads
from .inbound import AgentReply, AgentRequest, InboundLimits, RequestRefused
from .listener import ProxyListener
from .model_call import CallRequest, ProxiedCall, Services, ask_endpoint, send_final_answer
from .outbound import Endpoints
from .records import FILE, ITEM_LISTS, Call, JournalFull, Recorder, Recording, RecordsTooLarge, read
from .training_trace import RolloutTurn, Sequence

MAX_ACTIVE_CALLS = 64
"""How many calls of one rollout may be under way."""
# The proxy is shared: a request that takes seconds to read and record holds up the calls of all rollouts
# (`InboundLimits.values`, too).
MAX_ITEMS = 10_000
"""How many messages, and how many tools, one request may have."""
SWEEP_S = 5.0
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Capture:
    """One rollout's place at the proxy: its key, and what was captured. Usable from any thread."""

    def __init__(self, server: CaptureServer, rollout: CapturedRollout, key: str, path: Path) -> None:
        self._server = server
        self._rollout = rollout
        self.key = key
        """The agent's API key; it opens nothing but this proxy."""
        self.rollout_id = rollout.rollout_id
        self.path = path
        """The folder of the records."""

    def recording(self) -> Recording:
        """Return what is on disk until now."""
        return read(self.path)

    def calls(self) -> list[Call]:
        """Return the calls until now, those under way included as far as they got."""
        return self.recording().calls

    def turns(self) -> list[RolloutTurn]:
        """Return the calls as trainers read them."""
        return export.turns(self.recording())

    def sequences(self) -> list[Sequence]:
        """Return the training sequences."""
        return export.sequences(self.recording())

    def stats(self) -> Stats:
        """Return where the rollout stands: budget, failures of the endpoint, whether records are missing."""
        return self._rollout.stats()

    def ask_endpoint(self) -> concurrent.futures.Future[str | None]:
        """Ask the rollout's endpoint for a few tokens; the result is why it does not answer, None where it does.

        The request is the proxy's own: it is not recorded and spends nothing of the budget.

        Raises:
            CaptureError: the capture server does not run.
        """
        return self._server.ask_endpoint(self._rollout)

    def revoke(self) -> None:
        """Make the key worthless: once this returns no call gets through; those under way are ended and recorded."""
        self._server.end(self._rollout, self._server.revoke)

    def close(self) -> None:
        """Revoke the key and release memory; the records stay on disk and can be read."""
        self._server.end(self._rollout, self._server.finish)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AgentRoutes:
    """Answers the requests of agents."""

    def __init__(self, registry: RolloutRegistry, services: Services) -> None:
        self._registry = registry
        self._services = services
        self.is_paused = False
        """Whether new calls wait."""

    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        target = route(path)
        # A path that belongs to no dialect has only its headers to show which errors the agent can read.
        by_headers = DIALECTS["anthropic"] if "anthropic-version" in request.headers else DIALECTS["openai_chat"]
        dialect: AgentDialect = target.dialect if target is not None else by_headers
        try:
            if request.method == "GET" and path in ("/health", "/healthz"):
                await reply.send_json({"status": "ok"})
                return
            rollout = self._registry.by_key(request.key)
            if rollout is None or rollout.revoked:
                raise RequestRefused(401, "this key is not known here")
            if request.method == "GET" and path.rstrip("/").endswith("/models"):
                await reply.send_json(_models(rollout))
            elif request.method == "GET" and "/models/" in path:
                await reply.send_json(_model(rollout))
            elif target is None or request.method != "POST":
                raise RequestRefused(404, f"there is no {request.method} {path} here")
            else:
                await self.post(request, reply, rollout, target)
        except RequestRefused as exc:
            await reply.send_json(dialect.error(exc.status, str(exc)), exc.status)
        except JournalFull as exc:
            await reply.send_json(dialect.error(507, f"this call could not be recorded: {exc}"), 507)

    async def post(self, request: AgentRequest, reply: AgentReply, rollout: CapturedRollout, target: Route) -> None:
        """Answer a model call, or count the tokens of one.

        Raises:
            RequestRefused: it cannot be answered.
            JournalFull: it cannot be recorded.
        """
        dialect = target.dialect
        body = dialect.read(request.path.partition("?")[0], _parsed(request))
        if target.kind == "count":
            await reply.send_json(dialect.count_tokens(body))
            return
        if body.get("n") not in (None, 1):
            raise RequestRefused(400, "n must be 1: each call is one turn")
        if len(rollout.active) + rollout.waiting >= MAX_ACTIVE_CALLS:
            raise RequestRefused(429, f"{MAX_ACTIVE_CALLS} calls are under way already")
        endpoint = DIALECTS[rollout.model.dialect]
        bridge = BRIDGES.get((dialect.name, endpoint.name))
        if endpoint is not dialect and bridge is None:
            raise RequestRefused(400, f"the model speaks {endpoint.name}, which cannot be reached by {dialect.name}")
        await self._wait_for_tokens(body, reply, rollout)
        if reply.gone:
            return
        limit = rollout.spending.exhausted()
        if limit is not None:
            rollout.budget_ended(limit, dialect.name)
            await send_final_answer(reply, dialect, body)
            return
        path, _, query = request.path.partition("?")
        rollout.spending.calls += 1
        try:
            parts = CallRequest(dialect, path, body, request.headers, endpoint, bridge, query)
            call = ProxiedCall(self._services, rollout, parts, reply)
        except JournalFull:
            rollout.call_ended("record_failed")
            raise
        except RecordsTooLarge as exc:
            rollout.spending.calls -= 1
            raise RequestRefused(413, str(exc)) from None
        except (*MALFORMED, RecursionError) as exc:
            rollout.spending.calls -= 1
            raise RequestRefused(400, f"this request could not be read: {exc}") from None
        await call.run()

    async def _wait_for_tokens(self, body: Json, reply: AgentReply, rollout: CapturedRollout) -> None:
        """Wait while the proxy is paused, or the calls under way may sample all tokens that are left.

        Raises:
            RequestRefused: the key was revoked meanwhile.
        """
        asked = asked_limit(body)
        rollout.waiting += 1
        reply.on_gone = rollout.changed.set
        try:
            while self._must_wait(rollout, asked) and not reply.gone:
                rollout.changed.clear()
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    await asyncio.wait_for(rollout.changed.wait(), rollout.spending.seconds_left())
                if rollout.revoked:
                    raise RequestRefused(401, "this key is not known here")
        finally:
            rollout.waiting -= 1

    def _must_wait(self, rollout: CapturedRollout, asked: int | None) -> bool:
        return rollout.spending.exhausted() is None and (self.is_paused or not rollout.has_room_for(asked))


def _parsed(request: AgentRequest) -> Json:
    """Read a request's body.

    Raises:
        RequestRefused: it is no JSON object, or one that takes too long to handle.
    """
    if request.headers.get("content-encoding"):
        raise RequestRefused(400, "the body must be a JSON object, not compressed")
    try:
        body = loads(request.body, deep=False)
    except (ValueError, RecursionError) as exc:
        raise RequestRefused(400, f"the body cannot be read as JSON: {str(exc)[:200]}") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    for name in ITEM_LISTS:
        if isinstance(body.get(name), list) and len(body[name]) > MAX_ITEMS:
            raise RequestRefused(413, f"{name!r} may have {MAX_ITEMS} items")
    return body


def _models(rollout: CapturedRollout) -> Json:
    model = _model(rollout)
    ends: Json = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
    googles = {"name": f"models/{model['id']}", "displayName": model["id"]}
    googles["supportedGenerationMethods"] = ["generateContent", "countTokens"]
    return {"object": "list", "data": [model], **ends, "models": [googles]}


def _model(rollout: CapturedRollout) -> Json:
    name = rollout.model.name
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "openenv"}


class CaptureServer(ProxyListener):
    """The proxy between agents and model endpoints.

    Args:
        root: Where records go, a folder per rollout.
        host: Where to listen; anything but loopback needs an `admin_key`.
        port: 0 for a free one.
        admin_key: Opens the control routes on TCP; without it there are none.
        policy_header: The response header in which an endpoint names the version of its policy.
        tls: How to check the endpoints' certificates, where the system's way will not do.
        backoff_s: How long to wait before the second attempt at an endpoint, about.
        closed_ttl_s: How long a closed rollout is still listed.
        max_body: The largest request in bytes.
        sockets: Where the folder of the unix socket is made; by default the system's place for temporary files.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        admin_key: str | None = None,
        policy_header: str = "x-policy-version",
        tls: ssl.SSLContext | None = None,
        backoff_s: float = 0.5,
        closed_ttl_s: float = 3600.0,
        max_body: int = 64 * 1024 * 1024,
        sockets: Path | None = None,
    ) -> None:
        if not admin_key and not is_loopback(host):
            raise CaptureError(f"{host} is not a loopback address: give an admin_key to listen there.")
        self.root = Path(root)
        self._registry = RolloutRegistry(closed_ttl_s)
        self._endpoints = Endpoints(tls)
        self._services = Services(self._endpoints, policy_header.lower(), backoff_s)
        self._agent_routes = AgentRoutes(self._registry, self._services)
        self._control_routes = ControlRoutes(self, admin_key) if admin_key else None
        self._sweeper: asyncio.Task[None] | None = None
        super().__init__(host, port, InboundLimits(body=max_body), sockets)

    # life

    def start(self) -> CaptureServer:
        """Listen.

        Raises:
            CaptureError: it cannot.
        """
        self.listen()
        return self

    def __enter__(self) -> CaptureServer:
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
        policy_url: str | None = None,
    ) -> Capture:
        """Open a rollout: a key, a budget, and a file of records.

        Args:
            rollout_id: Its id, also the name of its folder; None for a random one.
            model: The endpoint that its calls go to.
            budget: What it may spend.
            metadata: Written into its records.
            policy_url: In place of the model's.

        Raises:
            CaptureError: the id is taken or cannot be a folder's name, or the records cannot be made.
        """
        rollout_id = rollout_id or secrets.token_hex(16)
        if not _ID.fullmatch(rollout_id):
            raise CaptureError(f"{rollout_id!r} cannot be the id of a rollout: letters, digits, '.', '_', '-' can.")
        key = f"oe-{secrets.token_urlsafe(32)}"
        path = self.root / rollout_id
        recorder = Recorder(path / FILE)
        budget = budget or Budget()
        policy_url = policy_url or model.policy_url
        rollout = CapturedRollout(
            rollout_id, key_digest(key), model, Spending(budget), recorder, dict(metadata or {}), policy_url
        )
        self._registry.add(rollout)
        try:
            about = {"rollout_id": rollout_id, "metadata": rollout.metadata, "budget": budget.model_dump(mode="json")}
            described = model.model_dump(mode="json", exclude={"api_key", "extra_headers"})
            recorder.create({**about, "model": rollout.redactor.value(described)})
        except BaseException:
            self._registry.discard(rollout)
            raise
        return Capture(self, rollout, key, path)

    def rollouts(self) -> list[CapturedRollout]:
        """Return every rollout that is still known."""
        return self._registry.all()

    def find(self, rollout_id: str) -> CapturedRollout | None:
        """Return a rollout by its id."""
        return self._registry.by_id(rollout_id)

    def ask_endpoint(self, rollout: CapturedRollout) -> concurrent.futures.Future[str | None]:
        """Ask a rollout's endpoint for a few tokens; see `Capture.ask_endpoint`."""
        model = rollout.model.model_copy(update={"base_url": rollout.base_url})
        return self._submit(ask_endpoint(self._services, model, refused=rollout.refused))

    def pause(self) -> None:
        """Hold new calls of all rollouts back until `resume`; returns when those under way have ended.

        For an update of the policy's weights: no answer is sampled from two versions. Agents only wait, within their
        own timeouts and budgets.

        Raises:
            CaptureError: the capture server does not run.
        """
        self.run(self._pause())

    def hold(self) -> None:
        """Hold new calls back until `resume`, and do not wait for those under way."""
        self._agent_routes.is_paused = True

    def resume(self) -> None:
        """Let the calls go that `pause` or `hold` held back."""
        self.run(self._resume())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause for as long as a `with` block lasts."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    async def _pause(self) -> None:
        self._agent_routes.is_paused = True
        for rollout in self._registry.all():
            for call in list(rollout.active):
                await call.over.wait()

    async def _resume(self) -> None:
        self._agent_routes.is_paused = False
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

    # what the listener asks for

    def is_known(self, key: str) -> bool:
        """Say whether a rollout has this key."""
        return self._registry.by_key(key) is not None

    async def answer(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer an agent, or the holder of the admin key."""
        if self._control_routes is not None and self._control_routes.owns(request):
            await self._control_routes.handle(request, reply)
        else:
            await self._agent_routes.handle(request, reply)

    async def answer_sandbox(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer an agent."""
        await self._agent_routes.handle(request, reply)

    async def on_listening(self) -> None:
        """Begin to sweep."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._endpoints.sweep()
            self._registry.sweep()

    async def on_stop(self) -> None:
        """End all rollouts."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for rollout in self._registry.all():
            await self.finish(rollout)
        self._endpoints.close()
