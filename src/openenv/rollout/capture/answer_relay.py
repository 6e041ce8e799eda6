"""The agent's side of a model call: `AnswerRelay` records an answer and hands it on, as a stream or as a whole.

Knows the agent's connection and both dialects. Knows nothing of attempts: it gets one response without an error.
"""

# A response of the endpoint, and the agent's answer:
#
#   endpoint streams, agent wants a stream     _relay_stream   event by event, each recorded before it is passed on
#   endpoint answers whole, agent wants a      _relay_whole    the agent's stream is made from the whole answer; until
#   stream                                                     then `ping` sends comments
#   both whole                                 _relay_whole    the endpoint's own bytes, unless something was removed

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from .call_parts import CallParts
from .captured_rollout import EXHAUSTED
from .dialects.dialect import TOKEN_IDS, AgentDialect
from .encoding import Json, dumps, load_object
from .inbound import JSON_TYPE, AgentReply
from .outbound import EndpointError, EndpointResponse
from .records import Call, JournalFull
from .stream_tap import StreamTap, missing_answer, plausible_tokens, tokens_read
from .upstream_errors import ProxiedCallFailed

LAST_WRITE_S = 2.0
PING_S = 10.0
"""The pause between two comments for an agent that waits for a stream."""
PING = b": waiting\n\n"  # a comment: clients ignore it, and their read timeouts start again
RESPONSE_LIMIT = 256 * 1024 * 1024
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
NO_CACHE = ("cache-control", "no-cache")


class AnswerRelay:
    """Records one answer and passes it on.

    Args:
        call: The call.
        complete: Called when the answer is recorded, before the agent gets its last piece. The argument is the number
            of prompt tokens if their IDs must be asked for.
    """

    def __init__(self, call: CallParts, complete: Callable[[int | None], Awaitable[None]]) -> None:
        self._call = call
        self._complete = complete

    async def relay(self, response: EndpointResponse) -> None:
        """Record a response, and pass it on to the agent.

        Raises:
            ProxiedCallFailed: The response is incomplete, invalid or too long for the budget.
            JournalFull: The response could not be recorded.
        """
        call = self._call
        policy = response.headers.get(call.services.policy_header)
        call.ledger.policy = None if policy is None else call.redacted(policy)
        facts: Json = {"policy": call.ledger.policy} if call.ledger.policy else {}
        if call.prepared.token_call is not None:
            facts["reused_ids"] = call.prepared.token_call.reused
        call.ledger.recorder.head(response.status, facts)
        try:
            if "text/event-stream" in response.headers.get("content-type", ""):
                await self._relay_stream(response)
            else:
                await self._relay_whole(response)
        except EndpointError as exc:
            how, message = "timeout" if exc.kind == "timeout" else "broken", call.redacted(str(exc))
            call.rollout.endpoint_failed(status=response.status, kind=how, message=message)
            raise ProxiedCallFailed(how, 504 if how == "timeout" else 502, message) from None

    async def _relay_stream(self, response: EndpointResponse) -> None:
        call, request, reply = self._call, self._call.request, self._call.reply
        translator = request.bridge.translator(request.body) if request.bridge is not None else None
        tap = StreamTap(call.ledger.recorder, request.endpoint, call.prepared.forced, translator, call.rollout.redactor)
        if call.rollout.tokens is not None:
            tap.assembler = request.endpoint.assembler()
        await reply.start(200, [EVENT_STREAM, NO_CACHE, *call.passed_headers(response)])
        try:
            async with contextlib.aclosing(response.pieces()) as pieces:
                async for piece in pieces:
                    visible = tap.feed(piece)
                    call.ledger.count(tap.tokens)
                    # The request's limit was within the budget, so this endpoint ignores limits.
                    if not tap.finished and call.rollout.spending.is_overdrawn():
                        raise ProxiedCallFailed("budget", 429, EXHAUSTED)
                    await reply.write(visible)
        finally:
            with contextlib.suppress(JournalFull):
                tap.flush()
        # HTTP does not show it: the last chunk of a response may come without the last event of the model.
        if not tap.finished:
            raise EndpointError("the stream ended before the model did", kind="broken")
        if tap.failure is not None:  # the agent has seen the error, in the stream itself
            message = call.redacted(tap.failure)
            call.rollout.endpoint_failed(status=response.status, kind="broken", message=message)
            call.ledger.settle("broken", {"message": message})
        else:
            call.ledger.prompt_ids = tap.prompt_ids
            call.ledger.answer = None if tap.assembler is None else tap.assembler.response()
            await self._complete(None if tap.prompt_ids is not None else tap.prompt_tokens)
        # Only after the end is on disk: an agent that has its answer may end, and its rollout be read, at once.
        await reply.write(tap.end())
        await reply.end()

    async def relay_recorded(self, recorded: Call) -> None:
        """Give the agent a recorded answer again, as a stream if it asks for one.

        Raises:
            ProxiedCallFailed: The answer cannot be read.
            JournalFull: The answer could not be recorded.
        """
        answer = recorded.response or {}
        try:
            await self._pass_on(answer, dumps(answer), [], JSON_TYPE, tokens=recorded.tokens)
        except EndpointError as exc:
            raise ProxiedCallFailed("broken", 502, str(exc)) from None

    async def _relay_whole(self, response: EndpointResponse) -> None:
        call, recorder = self._call, self._call.ledger.recorder
        raw = call.rollout.redactor.data(await response.read(RESPONSE_LIMIT))
        answer = load_object(raw)
        if answer is None:
            recorder.body(raw)
            raise self._not_an_object(response, raw)
        if call.prepared.token_call is not None:
            try:
                answer = call.prepared.token_call.completion(answer)
            except ValueError as exc:
                recorder.body(raw)
                raise EndpointError(call.redacted(str(exc)), kind="garbage") from None
            raw = dumps(answer)
        content_type = ("content-type", response.headers.get("content-type", "application/json"))
        await self._pass_on(answer, raw, call.passed_headers(response), content_type)

    async def _pass_on(
        self,
        answer: Json,
        raw: bytes,
        headers: list[tuple[str, str]],
        content_type: tuple[str, str],
        *,
        tokens: int | None = None,
    ) -> None:
        """Record a whole answer and pass it on; `tokens` is the cost of an answer that was recorded before."""
        call, request, forced = self._call, self._call.request, self._call.prepared.forced
        endpoint, recorder = request.endpoint, self._call.ledger.recorder
        ids = endpoint.take_prompt_ids(answer) if b"token_ids" in raw else None
        if ids:
            recorder.prompt(ids)
        recorder.body(dumps(answer) if ids else raw, answer)  # the endpoint's own bytes if they stay as they are
        completion = endpoint.completion(answer)
        recorder.completed(completion)
        reported = max(len(completion.sampled), endpoint.completion_tokens(answer))
        call.ledger.count(plausible_tokens(reported, endpoint.text_size(answer)) if tokens is None else tokens)
        if (problem := missing_answer(completion, answer)) is not None:
            raise EndpointError(call.redacted(problem), kind="garbage")
        if ids and TOKEN_IDS not in forced:  # the agent asked for them
            answer = load_object(raw) or answer
        visible = endpoint.strip_response(answer, forced)
        is_unchanged = visible is answer and not (ids and TOKEN_IDS in forced)
        if request.bridge is not None:
            visible, is_unchanged = request.bridge.translator(request.body).translate(visible), False
        call.ledger.prompt_ids, call.ledger.answer = ids, load_object(raw) if call.rollout.tokens is not None else None
        await self._complete(None if ids or tokens is not None else tokens_read(answer))
        if request.wants_stream:
            if not call.reply.started:
                await call.reply.start(200, [EVENT_STREAM, *headers])
            await call.reply.write(b"".join(request.dialect.stream(request.body, visible)))
            await call.reply.end()
        else:
            await call.reply.send(200, raw if is_unchanged else dumps(visible), [content_type, *headers])

    def _not_an_object(self, response: EndpointResponse, raw: bytes) -> ProxiedCallFailed:
        call = self._call
        message = "the endpoint's answer is not a JSON object"
        call.rollout.endpoint_failed(status=response.status, kind="garbage", message=message)
        text = call.redacted(raw.decode("utf-8", "replace"))[:2000]
        error: Json = {"message": message, "status": response.status, "text": text}
        return ProxiedCallFailed("broken", 502, message, error=error)

    async def ping(self) -> None:
        """Send comments to an agent that waits for a stream, while the endpoint makes the whole answer.

        Agents and their HTTP clients give up on a connection that stays silent.
        """
        call = self._call
        while True:
            await asyncio.sleep(PING_S)
            if not call.prepared.is_streamed:
                if not call.reply.started:
                    await call.reply.start(200, [EVENT_STREAM, NO_CACHE])
                await call.reply.write(PING)

    async def send_error(self, failure: ProxiedCallFailed, *, is_stopped: bool) -> None:
        """Tell the agent why its call failed.

        Args:
            failure: The failure.
            is_stopped: The call was stopped from outside, for example because its rollout ends. Its end is waited for,
                so it must not wait long for an agent that does not read.
        """
        reply, dialect = self._call.reply, self._call.request.dialect
        if reply.gone or reply.ended:
            return
        message = self._call.redacted(str(failure))
        if reply.started:
            reply.abort(dialect.error_event(failure.status, message))
            return
        body = failure.native_body or dumps(dialect.error(failure.status, message))
        sending = reply.send(failure.status, body, [JSON_TYPE, *failure.headers])
        if not is_stopped:
            await sending
            return
        try:
            await asyncio.wait_for(sending, LAST_WRITE_S)
        except (asyncio.TimeoutError, TimeoutError):
            reply.abort()


# The final answer is in the agent's dialect and has no tool calls, so an agent's loop ends. It is not a turn of
# the rollout: the records have a `stop` instead of a call.
async def send_final_answer(reply: AgentReply, dialect: AgentDialect, body: Json) -> None:
    """Answer like a model that ends its turn: agents stop then, but would repeat a call that fails."""
    answer = dialect.final_answer(body, EXHAUSTED)
    if body.get("stream") is True:
        await reply.start(200, [EVENT_STREAM])
        await reply.write(b"".join(dialect.stream(body, answer)))
        await reply.end()
    else:
        await reply.send_json(answer)
