"""Published helpers for streams: a whole chat completion as a stream, and comments while an agent waits.

The capture server has the same in `answer_relay`, event by event; these functions work on values.
"""

#   replay:               one whole completion --> one chunk --> the events of a dialect
#
#   keepalive_response:   the response is ready within PING_S ----------------> returned as it is, with its status
#                         later: status 200 and ": waiting" every PING_S -----> then its events, or an error event
#
# After the first comment the status is sent, so an error can only be an event, in the agent's dialect.

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Iterable

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..answer_relay import PING, PING_S
from ..dialects import AGENT_DIALECTS
from ..dialects.dialect import as_dict, dicts_in
from ..encoding import STREAM_DONE, Json, event_bytes, load_object
from .detection import APIType
from .transformers import BaseTransformer

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
COMMENT = PING.decode()
# An event of these is "event: message_stop\ndata: {...}\n\n", of others only "data: {...}\n\n".
_NAMED = (APIType.ANTHROPIC, APIType.OPENAI_RESPONSES)
"""The dialects with named events."""


def format_events(api_type: APIType, events: Iterable[Json]) -> str:
    """Return events in wire format."""
    is_named = api_type in _NAMED
    return b"".join(
        event_bytes(
            json.dumps(event, default=str).encode(), name=str(event.get("type", "unknown")) if is_named else None
        )
        for event in events
    ).decode()


def format_chunk(
    api_type: APIType, transformer: BaseTransformer, chunk: Json, original_request: Json, *, is_first: bool
) -> str:
    """Return one chunk of a chat completion in wire format, without knowledge of other chunks."""
    events = transformer.transform_stream_chunk(chunk, original_request, is_first)
    return format_events(api_type, events if isinstance(events, list) else [events])


def response_to_chunk(response: Json) -> Json:
    """Return a whole chat completion as a single chunk."""
    choice = (dicts_in(response.get("choices")) or [{}])[0]
    message = as_dict(choice.get("message"))
    delta: Json = {"role": "assistant"}
    if message.get("content") is not None:
        delta["content"] = message["content"]
    thoughts = next((message[key] for key in ("reasoning_content", "reasoning") if message.get(key) is not None), None)
    if thoughts is not None:
        delta["reasoning_content"] = thoughts
    calls = []
    for index, call in enumerate(dicts_in(message.get("tool_calls"))):
        function = as_dict(call.get("function"))
        named = {"name": function.get("name", ""), "arguments": function.get("arguments", "")}
        calls.append({"index": index, "id": call.get("id"), "type": call.get("type", "function"), "function": named})
    if calls:
        delta["tool_calls"] = calls
    return {
        "id": response.get("id"),
        "object": "chat.completion.chunk",
        "created": response.get("created"),
        "model": response.get("model"),
        "choices": [{"index": 0, "delta": delta, "finish_reason": choice.get("finish_reason")}],
        "usage": response.get("usage"),
    }


# An engine that cannot stream IDs answers whole; agents that asked for a stream get it in one piece at the end.
async def replay(
    api_type: APIType, transformer: BaseTransformer, response: Json, original_request: Json
) -> AsyncIterator[str]:
    """Yield a whole chat completion as the stream of an agent's dialect."""
    chunk = response_to_chunk(response)
    state = transformer.create_stream_state(original_request)
    if state is None:
        yield format_chunk(api_type, transformer, chunk, original_request, is_first=True)
    else:
        for events in (state.process_chunk(chunk, is_first=True), state.finalize()):
            if events:
                yield format_events(api_type, events)
    if api_type is APIType.OPENAI_CHAT:
        yield event_bytes(STREAM_DONE).decode()


async def keepalive_response(pending: Awaitable[Response], api_type: APIType) -> Response:
    """Wait for a response, and send comments meanwhile to keep the agent's connection alive.

    Args:
        pending: The response; it is cancelled with this call, or when the agent hangs up.
        api_type: The agent's dialect, for an error after the first comment.
    """
    task = asyncio.ensure_future(pending)
    try:
        done, _ = await asyncio.wait({task}, timeout=PING_S)
    except BaseException:
        await _cancelled(task)
        raise
    return task.result() if done else _WaitingResponse(task, api_type)


class _WaitingResponse(StreamingResponse):
    """Comments until the response arrives, then its stream."""

    def __init__(self, task: asyncio.Future[Response], api_type: APIType) -> None:
        super().__init__(self._body(task, api_type), media_type="text/event-stream", headers=HEADERS)
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _cancelled(self._task)

    @staticmethod
    async def _body(task: asyncio.Future[Response], api_type: APIType) -> AsyncIterator[str | bytes | memoryview]:
        while not task.done():
            yield COMMENT
            await asyncio.wait({task}, timeout=PING_S)
        response = task.result()
        if isinstance(response, StreamingResponse) and response.status_code < 400:
            async for piece in response.body_iterator:
                yield piece
            return
        payload = load_object(bytes(response.body)) or {}
        message = as_dict(payload.get("error")).get("message") or "the endpoint did not answer"
        yield AGENT_DIALECTS[api_type.value].error_event(response.status_code, str(message))


async def _cancelled(task: asyncio.Future[Response]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
