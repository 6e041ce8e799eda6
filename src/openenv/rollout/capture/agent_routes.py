"""The requests of agents: which rollout a key belongs to, which dialect a path asks for, whether budget remains.

Knows nothing of sockets, and nothing of a call once it has begun: `model_call` proxies it.
"""

# A request that an agent sends:
#
#   handle --- GET /health, /v1/models -------------------> a JSON object
#      |
#      +------ POST of a known dialect --> rollout_of --> post
#                                                           |
#                   +---------------------------------------+--> refused: unreadable, too many calls, no bridge
#                   |
#              _wait_for_tokens   the proxy is paused, or calls under way may use all remaining tokens
#                   |
#                   +--> the budget is exhausted --> send_final_answer
#                   +--> ProxiedCall.run

from __future__ import annotations

import asyncio
import contextlib

from openenv.errors import CaptureError

from ..tasks.model_parameters import asked_limit
from .answer_relay import send_final_answer
from .call_parts import Services
from .call_request import CallRequest, remote_content
from .captured_rollout import CapturedRollout, RolloutRegistry
from .dialects import BRIDGES, DIALECTS, Route, route
from .dialects.dialect import MALFORMED, AgentDialect
from .encoding import Json, loads
from .inbound import AgentReply, AgentRequest, RequestRefused
from .model_call import ProxiedCall
from .records import ITEM_LISTS, JournalFull, RecordsTooLarge

MAX_ACTIVE_CALLS = 64
"""The number of calls of one rollout that may be under way."""
# The proxy is shared: a request that takes seconds to read and record delays the calls of all rollouts. The limit
# `InboundLimits.values` has the same reason.
MAX_ITEMS = 10_000
"""The number of messages, and of tools, in one request."""


class AgentRoutes:
    """Answers the requests of agents.

    The routes of the published capture API are a subclass, which finds rollouts by session.
    """

    def __init__(self, registry: RolloutRegistry, services: Services) -> None:
        self._registry = registry
        self._services = services
        self.is_paused = False
        """Whether new calls wait."""

    async def handle(self, request: AgentRequest, reply: AgentReply) -> None:
        """Answer one request; errors have the form that the agent's dialect expects."""
        # Until the path has shown the dialect, only a header tells which errors the agent can read.
        dialect: AgentDialect = DIALECTS["anthropic" if "anthropic-version" in request.headers else "openai_chat"]
        try:
            target = self.target_of(request)
            dialect = dialect if target is None else target.dialect
            if request.method == "GET" and request.route_path in ("/health", "/healthz"):
                await reply.send_json(self.health(request))
            else:
                await self.answer(request, reply, target)
        except RequestRefused as exc:
            await reply.send_json(dialect.error(exc.status, str(exc)), exc.status)
        except (JournalFull, CaptureError) as exc:
            await reply.send_json(dialect.error(507, f"this call could not be recorded: {exc}"), 507)

    def target_of(self, request: AgentRequest) -> Route | None:
        """Return the dialect and the kind of call that a request asks for; None for any other request."""
        return route(request.route_path)

    def health(self, request: AgentRequest) -> Json:
        """Return the answer to a health check, which needs no key."""
        return {"status": "ok"}

    async def answer(self, request: AgentRequest, reply: AgentReply, target: Route | None) -> None:
        """Answer a request that needs a key.

        Raises:
            RequestRefused: The key or the path is unknown, or the request cannot be answered.
            JournalFull: The call cannot be recorded.
        """
        path = request.route_path
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

    async def post(self, request: AgentRequest, reply: AgentReply, rollout: CapturedRollout, target: Route) -> None:
        """Proxy a model call, or count the tokens of one.

        Raises:
            RequestRefused: The call cannot be answered.
            JournalFull: The call cannot be recorded.
        """
        dialect = target.dialect
        body = dialect.read(request.route_path, _parsed(request))
        if target.kind == "count":
            await reply.send_json(dialect.count_tokens(body))
            return
        remote = next(remote_content(dialect, body, schemes=rollout.model.content_schemes), None)
        if remote is not None:
            raise RequestRefused(400, f"{remote}; send the content in a data: URL")
        if body.get("n") not in (None, 1):
            raise RequestRefused(400, "n must be 1: each call is one turn")
        if len(rollout.active) + rollout.waiting >= MAX_ACTIVE_CALLS:
            raise RequestRefused(429, f"{MAX_ACTIVE_CALLS} calls are under way already")
        endpoint = DIALECTS[rollout.model.dialect]
        bridge = BRIDGES.get((dialect.name, endpoint.name))
        if endpoint is not dialect and bridge is None:
            raise RequestRefused(400, f"the model speaks {endpoint.name}, which cannot be reached by {dialect.name}")
        recorded = rollout.recorded_answer(dialect.name, body)
        if recorded is None:
            await self._before_sampling(rollout)
            await self._wait_for_tokens(body, reply, rollout)
            if reply.gone:
                return
        limit = rollout.spending.exhausted()
        if limit is not None and recorded is None:
            # Agents stop at a final answer; an error would make them try again.
            rollout.budget_ended(limit, dialect.name)
            await send_final_answer(reply, dialect, body)
            return
        path, _, query = request.path.partition("?")
        # Counted before it is sent: calls at the same time must not pass the limit together. A request that cannot be
        # read or recorded reached no model, so it is taken off again.
        rollout.spending.calls += 1
        try:
            parts = CallRequest(dialect, path, body, request.headers, endpoint, bridge, query)
            call = ProxiedCall(self._services, rollout, parts, reply, recorded)
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

    async def _before_sampling(self, rollout: CapturedRollout) -> None:
        """Record the agent's files, if somebody wants that.

        Raises:
            RequestRefused: The agent has to repeat a recorded call first, or the key was revoked meanwhile.
        """
        if rollout.replay is not None and rollout.replay.must_match:
            raise RequestRefused(400, f"the agent does not repeat its recorded calls: {rollout.replay.divergence}")
        if rollout.before_call is not None and not rollout.active:
            await asyncio.to_thread(rollout.before_call)
            if rollout.revoked:
                raise RequestRefused(401, "this key is not known here")

    async def _wait_for_tokens(self, body: Json, reply: AgentReply, rollout: CapturedRollout) -> None:
        """Wait while the proxy is paused, or while calls under way may sample all remaining tokens.

        Raises:
            RequestRefused: The key was revoked meanwhile.
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

    # A wait ends when pause or reservations change: `rollout.changed` is set at the end of each call, by `resume` and
    # by `revoke`. The seconds of the budget wake a call that nothing else would wake.
    def _must_wait(self, rollout: CapturedRollout, asked: int | None) -> bool:
        return rollout.spending.exhausted() is None and (self.is_paused or not rollout.has_room_for(asked))


def _parsed(request: AgentRequest) -> Json:
    """Read a request's body.

    Raises:
        RequestRefused: The body is not a JSON object, or would take too long to handle.
    """
    if request.headers.get("content-encoding"):
        raise RequestRefused(400, "the body must be a JSON object, not compressed")
    try:
        body = loads(request.body, deep=False) if request.parsed is None else request.parsed
    except (ValueError, RecursionError) as exc:
        raise RequestRefused(400, f"the body cannot be read as JSON: {str(exc)[:200]}") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "the body must be a JSON object")
    for name in ITEM_LISTS:
        if isinstance(body.get(name), list) and len(body[name]) > MAX_ITEMS:
            raise RequestRefused(413, f"{name!r} may have {MAX_ITEMS} items")
    return body


def _models(rollout: CapturedRollout) -> Json:
    # One answer for three clients: `data` is OpenAI's, the ends of the page are Anthropic's, `models` is Google's.
    model = _model(rollout)
    ends: Json = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
    google_entry = {"name": f"models/{model['id']}", "displayName": model["id"]}
    google_entry["supportedGenerationMethods"] = ["generateContent", "countTokens"]
    return {"object": "list", "data": [model], **ends, "models": [google_entry]}


def _model(rollout: CapturedRollout) -> Json:
    name = rollout.model.name
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "openenv"}
