"""Transformers and replays: what other programs build on. `test_scenarios` compares them with the published ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from openenv.core.harness.capture import sse
from openenv.core.harness.capture.detection import APIType
from openenv.core.harness.capture.dialects import BaseTransformer, TransformManager
from openenv.core.harness.capture.upstream import UpstreamRequestError
from openenv.rollout.capture.sessions_api import replay

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGE = {"role": "assistant", "content": "hi", "reasoning_content": "so", "tool_calls": [CALL]}
COMPLETION = {"id": "c1", "choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}], "usage": USAGE}


def test_thoughts_are_kept_both_ways() -> None:
    transformer = TransformManager().get(APIType.ANTHROPIC)
    answer = transformer.transform_response(COMPLETION, {"model": "claude"})
    thinking, text, call = answer["content"]
    assert (thinking["thinking"], bool(thinking["signature"]), text["text"]) == ("so", True, "hi")
    assert (call["input"], answer["stop_reason"], answer["model"]) == ({"a": 1}, "tool_use", "claude")
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": answer["content"]}]
    sent = transformer.transform_request({"model": "m", "max_tokens": 5, "messages": turns})
    assert sent["messages"][1]["reasoning_content"] == "so"
    assert sent["messages"][1]["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize("kind", [APIType.ANTHROPIC, APIType.OPENAI_RESPONSES])
def test_a_request_that_cannot_be_read_is_one_error(kind: APIType) -> None:
    body = {"messages": [5], "input": [5]}
    with pytest.raises(UpstreamRequestError, match="cannot be read"):
        TransformManager().get(kind).transform_request(body)


@pytest.mark.anyio
async def test_a_response_that_comes_soon_is_passed_on() -> None:
    async def quick() -> Response:
        return JSONResponse({"ok": True}, 418)

    assert (await sse.keepalive_response(quick(), APIType.OPENAI_CHAT)).status_code == 418


async def sent_by(response: Response, *, seen: asyncio.Event | None = None, until: int = 1000) -> bytes:
    """What a response sends to an agent, which hangs up after some messages.

    Args:
        seen: Set once the agent has seen something.
        until: After how many messages it hangs up.
    """
    gone = asyncio.Event()
    pieces: list[bytes] = []

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pieces.append(message.get("body", b""))
        if seen is not None and any(pieces):
            seen.set()
        if len(pieces) >= until:
            gone.set()

    await response({"type": "http", "method": "POST", "headers": []}, receive, send)
    return b"".join(pieces)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (APIType.OPENAI_CHAT, b'data: {"error":{"message":"down"'),
        (APIType.ANTHROPIC, b"event: error"),
        (APIType.GOOGLE, b'"message":"down"'),
    ],
)
async def test_an_agent_that_waits_gets_comments_and_then_the_end(
    monkeypatch: pytest.MonkeyPatch, kind: APIType, last: bytes
) -> None:
    monkeypatch.setattr(replay, "PING_S", 0.01)

    seen = asyncio.Event()

    async def slow(response: Response) -> Response:
        await seen.wait()
        return response

    async def body() -> Any:
        yield "data: it\n\n"

    streamed = await sse.keepalive_response(slow(StreamingResponse(body())), kind)
    text = await sent_by(streamed, seen=seen)
    assert text.startswith(b": waiting\n\n")
    assert text.endswith(b"data: it\n\n")
    seen.clear()
    failed = await sse.keepalive_response(slow(JSONResponse({"error": {"message": "down"}}, 502)), kind)
    assert last in await sent_by(failed, seen=seen)


@pytest.mark.anyio
async def test_an_agent_that_hangs_up_ends_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PING_S", 0.01)
    ended = asyncio.Event()

    async def endless() -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    response = await sse.keepalive_response(endless(), APIType.OPENAI_CHAT)
    await asyncio.wait_for(sent_by(response, until=3), 10)
    assert ended.is_set()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", list(APIType))
async def test_a_whole_answer_is_replayed_in_each_dialect(kind: APIType) -> None:
    transformer: BaseTransformer = TransformManager().get(kind)
    pieces = [piece async for piece in sse.replay(kind, transformer, COMPLETION, {"model": "m"})]
    lines = [line for line in "".join(pieces).splitlines() if line.startswith("data: ")]
    assert "hi" in "".join(lines)
    assert all(json.loads(line[6:]) for line in lines if line != "data: [DONE]")
    assert (lines[-1] == "data: [DONE]") == (kind is APIType.OPENAI_CHAT)
