"""The routes of agents: model calls, the list of models, token counts.

Must not know how servers listen.
"""

from __future__ import annotations

from .captured_rollout import EXHAUSTED, CapturedRollout, RolloutRegistry
from .dialects import BRIDGES, DIALECTS, Route, openai_chat, route
from .dialects.dialect import DialectModule
from .encoding import Json, dumps, load_object
from .inbound import JSON_TYPE, AgentReply, AgentRequest, RequestRefused
from .model_call import EVENT_STREAM, CallRequest, ProxiedCall, Services
from .records import JournalFull

MAX_ACTIVE_CALLS = 64
"""How many calls of one rollout may be under way."""


class AgentRoutes:
    """Answers the requests of agents."""

    def __init__(self, registry: RolloutRegistry, services: Services) -> None:
        self._registry = registry
        self._services = services

    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        target = route(path)
        # A path that belongs to no dialect has only its headers to tell which errors the agent can read.
        by_headers = DIALECTS["anthropic"] if "anthropic-version" in request.headers else openai_chat
        dialect = target.dialect if target is not None else by_headers
        try:
            if request.method == "GET" and path in ("/health", "/healthz"):
                await _send(reply, {"status": "ok"})
                return
            rollout = self._registry.by_key(request.key)
            if rollout is None or rollout.revoked:
                raise RequestRefused(401, "this key is not known here")
            if request.method == "GET" and path.rstrip("/").endswith("/models"):
                await _send(reply, _models(rollout))
            elif request.method == "GET" and "/models/" in path:
                await _send(reply, _model(rollout))
            elif target is None or request.method != "POST":
                raise RequestRefused(404, f"there is no {request.method} {path} here")
            else:
                await self._post(request, reply, rollout, target)
        except RequestRefused as exc:
            await _send(reply, dialect.error(exc.status, str(exc)), exc.status)
        except JournalFull as exc:
            await _send(reply, dialect.error(507, f"this call could not be recorded: {exc}"), 507)

    async def _post(self, request: AgentRequest, reply: AgentReply, rollout: CapturedRollout, target: Route) -> None:
        dialect = target.dialect
        body = None if request.headers.get("content-encoding") else load_object(request.body)
        if body is None:
            raise RequestRefused(400, "the body must be a JSON object, not compressed")
        if target.kind == "count":
            await _send(reply, dialect.count_tokens(body))
            return
        if body.get("n") not in (None, 1):
            raise RequestRefused(400, "n must be 1: each call is one turn")
        if len(rollout.active) >= MAX_ACTIVE_CALLS:
            raise RequestRefused(429, f"{MAX_ACTIVE_CALLS} calls are under way already")
        endpoint = DIALECTS[rollout.model.dialect]
        bridge = BRIDGES.get((dialect.NAME, endpoint.NAME))
        if endpoint is not dialect and bridge is None:
            raise RequestRefused(400, f"the model speaks {endpoint.NAME}, which cannot be reached by {dialect.NAME}")
        limit = rollout.spending.exhausted()
        if limit is not None:
            await self._answer_for_budget(limit, body, reply, rollout, dialect)
            return
        path, _, query = request.path.partition("?")
        rollout.spending.calls += 1
        try:
            parts = CallRequest(dialect, path, body, request.headers, endpoint, bridge, query)
            call = ProxiedCall(self._services, rollout, parts, reply)
        except JournalFull:
            rollout.call_ended("record_failed")
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            if bridge is None:
                raise
            rollout.spending.calls -= 1
            raise RequestRefused(400, f"this request could not be read: {exc}") from None
        await call.run()

    async def _answer_for_budget(
        self, limit: str, body: Json, reply: AgentReply, rollout: CapturedRollout, dialect: DialectModule
    ) -> None:
        """Answer as a model that ends its turn: agents stop at that, where an error would make them try again."""
        rollout.spending.refused += 1
        rollout.recorder.stopped({"limit": limit, "dialect": dialect.NAME})
        answer = dialect.final_answer(body, EXHAUSTED)
        if body.get("stream") is True:
            await reply.start(200, [EVENT_STREAM])
            await reply.write(b"".join(dialect.stream(body, answer)))
            await reply.end()
        else:
            await _send(reply, answer)


async def _send(reply: AgentReply, value: Json, status: int = 200) -> None:
    await reply.send(status, dumps(value), [JSON_TYPE])


def _models(rollout: CapturedRollout) -> Json:
    model = _model(rollout)
    return {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}


def _model(rollout: CapturedRollout) -> Json:
    name = rollout.model.name
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "openenv"}
