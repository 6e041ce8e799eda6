"""What the proxy answers to agents: model calls, the list of models, token counts; and whose key is whose.

Knows rollouts, dialects and budgets. Must not know how servers listen.
"""

from __future__ import annotations

import hmac
import time

from openenv.errors import CaptureError

from .captured_rollout import EXHAUSTED, CapturedRollout, digest
from .dialects import DIALECTS, Route, bridge, openai_chat, route
from .dialects.dialect import DialectModule
from .encoding import Json, dumps, load_object
from .inbound import JSON_TYPE, AgentReply, AgentRequest
from .model_call import EVENT_STREAM, CallRequest, ProxiedCall, Services
from .records import JournalFull

MAX_ACTIVE_CALLS = 64
"""How many calls of one rollout may be under way."""


class RolloutRegistry:
    """The rollouts that have a key, and for a while those that had one."""

    def __init__(self, closed_ttl_s: float) -> None:
        self._by_key: dict[bytes, CapturedRollout] = {}
        self._by_id: dict[str, CapturedRollout] = {}
        self._closed_ttl_s = closed_ttl_s

    def add(self, rollout: CapturedRollout) -> None:
        """Let a rollout in.

        Raises:
            CaptureError: there is one of that id.
        """
        if self._by_id.setdefault(rollout.rollout_id, rollout) is not rollout:
            raise CaptureError(f"There is a rollout '{rollout.rollout_id}' already.")
        self._by_key[rollout.key_digest] = rollout

    def by_key(self, key: str) -> CapturedRollout | None:
        """Return the rollout that a key belongs to."""
        wanted = digest(key)
        rollout = self._by_key.get(wanted)
        return rollout if rollout is not None and hmac.compare_digest(rollout.key_digest, wanted) else None

    def by_id(self, rollout_id: str) -> CapturedRollout | None:
        """Return a rollout by its id."""
        return self._by_id.get(rollout_id)

    def all(self) -> list[CapturedRollout]:
        """Return every rollout that is still known."""
        return list(self._by_id.values())

    def forget_key(self, rollout: CapturedRollout) -> None:
        """Let no more calls in."""
        self._by_key.pop(rollout.key_digest, None)

    def discard(self, rollout: CapturedRollout) -> None:
        """Forget a rollout altogether; its records stay on disk."""
        self.forget_key(rollout)
        if self._by_id.get(rollout.rollout_id) is rollout:
            del self._by_id[rollout.rollout_id]

    def sweep(self) -> None:
        """Forget rollouts that were closed long ago."""
        limit = time.time() - self._closed_ttl_s
        for rollout in self.all():
            if rollout.closed_at is not None and rollout.closed_at < limit:
                self.discard(rollout)


class AgentRoutes:
    """Answers the requests of agents."""

    def __init__(self, registry: RolloutRegistry, services: Services) -> None:
        self._registry = registry
        self._services = services

    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        if request.method == "GET" and path in ("/health", "/healthz"):
            await reply.send(200, b'{"status":"ok"}', [JSON_TYPE])
            return
        found = route(path)
        dialect = found.dialect if found is not None else _dialect_of(request)
        rollout = self._registry.by_key(request.key)
        if rollout is None or rollout.revoked:
            await _refuse(reply, dialect, 401, "this key is not known here")
        elif request.method == "GET" and path.rstrip("/").endswith("/models"):
            await reply.send(200, dumps(_models(rollout)), [JSON_TYPE])
        elif request.method == "GET" and "/models/" in path:
            await reply.send(200, dumps(_model(rollout)), [JSON_TYPE])
        elif found is None or request.method != "POST":
            await _refuse(reply, dialect, 404, f"there is no {request.method} {path} here")
        else:
            await self._post(request, reply, rollout, found)

    async def _post(self, request: AgentRequest, reply: AgentReply, rollout: CapturedRollout, found: Route) -> None:
        dialect = found.dialect
        body = None if request.headers.get("content-encoding") else load_object(request.body)
        if body is None:
            await _refuse(reply, dialect, 400, "the body must be a JSON object, not compressed")
            return
        if found.kind == "count":
            await reply.send(200, dumps(dialect.count_tokens(body)), [JSON_TYPE])
            return
        if body.get("n") not in (None, 1):
            await _refuse(reply, dialect, 400, "n must be 1: each call is one turn")
            return
        if len(rollout.active) >= MAX_ACTIVE_CALLS:
            await _refuse(reply, dialect, 429, f"{MAX_ACTIVE_CALLS} calls are under way already")
            return
        endpoint = DIALECTS[rollout.model.dialect]
        between = None if endpoint is dialect else bridge(dialect.NAME, endpoint.NAME)
        if endpoint is not dialect and between is None:
            message = f"the model speaks {endpoint.NAME}, which cannot be reached by {dialect.NAME}"
            await _refuse(reply, dialect, 400, message)
            return
        if await self._out_of_budget(reply, rollout, dialect, body):
            return
        path, _, query = request.path.partition("?")
        ask = CallRequest(dialect, path, body, request.headers, endpoint, between, query)
        rollout.spending.calls += 1
        try:
            call = ProxiedCall(self._services, rollout, ask, reply)
        except JournalFull as exc:
            rollout.call_ended("record_failed")
            await _refuse(reply, dialect, 507, f"this call could not be recorded: {exc}")
            return
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            if between is None:
                raise
            rollout.spending.calls -= 1
            await _refuse(reply, dialect, 400, f"this request could not be read: {exc}")
            return
        await call.run()

    async def _out_of_budget(
        self, reply: AgentReply, rollout: CapturedRollout, dialect: DialectModule, body: Json
    ) -> bool:
        limit = rollout.spending.exhausted()
        if limit is None:
            return False
        rollout.spending.refused += 1
        try:
            rollout.recorder.stopped({"limit": limit, "dialect": dialect.NAME})
        except JournalFull as exc:
            await _refuse(reply, dialect, 507, f"this call could not be recorded: {exc}")
            return True
        answer = dialect.final_answer(body, EXHAUSTED)
        if body.get("stream") is True:
            await reply.start(200, [EVENT_STREAM])
            await reply.write(b"".join(dialect.stream(body, answer)))
            await reply.end()
        else:
            await reply.send(200, dumps(answer), [JSON_TYPE])
        return True


async def _refuse(reply: AgentReply, dialect: DialectModule, status: int, message: str) -> None:
    await reply.send(status, dumps(dialect.error(status, message)), [JSON_TYPE])


def _dialect_of(request: AgentRequest) -> DialectModule:
    """Guess the dialect of a request whose path says nothing."""
    return DIALECTS["anthropic"] if "anthropic-version" in request.headers else openai_chat


def _models(rollout: CapturedRollout) -> Json:
    model = _model(rollout)
    return {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}


def _model(rollout: CapturedRollout) -> Json:
    name = rollout.model.name
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "openenv"}
