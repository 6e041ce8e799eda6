"""Model calls from the proxy's own process: the same records, budgets, redaction and failures as over a connection."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import CaptureError
from openenv.rollout import Model
from openenv.rollout.capture import Capture, CaptureServer
from openenv.rollout.capture.encoding import dumps
from openenv.rollout.tasks.task import Budget

PATH = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello."}], "temperature": 0.5}


def post(capture: Capture, body: Any = BODY, path: str = PATH, **options: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = asyncio.run(capture.post(path, data, **options))
    return reply.status, json.loads(reply.body)


def without_times(capture: Capture) -> list[dict[str, Any]]:
    times = {"started_at", "latency_s", "first_byte_s", "spent_s"}
    return [{name: value for name, value in asdict(call).items() if name not in times} for call in capture.calls()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, BODY),
        ("/v1/messages", {**BODY, "max_tokens": 50}),
        ("/v1/responses", {"model": "m", "input": "Hello."}),
    ],
    ids=["chat", "anthropic", "responses"],
)
def test_a_local_call_is_answered_and_recorded_like_one_over_a_connection(
    open_agent: Any, path: str, body: Any, stream: bool
) -> None:
    local, remote = open_agent(), open_agent()
    body = {**body, "stream": stream}
    there = remote.post(path.removeprefix("/v1"), body)
    reply = asyncio.run(local.capture.post(path, json.dumps(body).encode()))
    assert reply.status == there.status_code == 200
    assert reply.body.count(b"data: ") == there.content.count(b"data: ")
    assert bool(reply.body.count(b"data: ")) is stream
    assert without_times(local.capture) == without_times(remote.capture)
    assert [call.ended for call in local.capture.calls()] == ["complete"]


def test_a_request_that_comes_as_a_value_is_recorded_like_its_json(open_agent: Any) -> None:
    by_value, by_json = open_agent(), open_agent()
    body = {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": [{"type": "text", "text": "ü"}]}]}
    answers = [asyncio.run(by_value.capture.post(PATH, body)), asyncio.run(by_json.capture.post(PATH, dumps(body)))]
    assert [answer.status for answer in answers] == [200, 200]
    assert json.loads(answers[0].body)["choices"] == json.loads(answers[1].body)["choices"]
    assert without_times(by_value.capture) == without_times(by_json.capture)
    assert by_value.capture.calls()[0].request == body
    refused = asyncio.run(by_value.capture.post(PATH, {**BODY, "messages": [{}] * 10_001}))
    assert refused.status == 413


def test_a_refused_local_call_has_the_status_of_one_over_a_connection(open_agent: Any, engine: Any, fake: Any) -> None:
    agent = open_agent()
    large = {**BODY, "messages": [{"role": "user", "content": "," * 1_100_000}]}
    assert post_status(agent.capture, json.dumps(large).encode()) == 413
    assert post_status(agent.capture, b"{not json") == 400
    assert post(agent.capture, path="/v1/unknown")[0] == 404
    assert engine.requests == []
    assert agent.capture.calls() == []
    agent.capture.revoke()
    assert post(agent.capture)[0] == 401


def post_status(capture: Capture, data: bytes) -> int:
    return asyncio.run(capture.post(PATH, data)).status


def test_the_budget_ends_local_calls(open_agent: Any, engine: Any) -> None:
    agent = open_agent(budget=Budget(max_calls=1))
    assert post(agent.capture)[0] == 200
    status, answer = post(agent.capture)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert len(engine.requests) == 1
    assert agent.capture.stats().budget_exhausted == "calls"


def test_an_error_of_the_endpoint_reaches_a_local_caller_without_its_key(
    open_agent: Any, engine: Any, fake: Any
) -> None:
    agent = open_agent(api_key="sk-the-real-key-of-the-endpoint")
    error = {"message": "bad key sk-the-real-key-of-the-endpoint"}
    engine.respond = lambda request: fake.Answer.json({"error": error}, 422)
    status, answer = post(agent.capture)
    assert status == 422
    assert "the-real-key" not in json.dumps(answer)
    assert "bad key" in json.dumps(answer)


def test_a_cancelled_local_call_ends_at_the_endpoint_and_in_the_records(
    open_agent: Any, engine: Any, fake: Any, wait_for: Any
) -> None:
    agent = open_agent()
    engine.respond = lambda request: fake.Answer([30.0])

    async def cancel() -> None:
        call = asyncio.ensure_future(agent.capture.post(PATH, json.dumps(BODY).encode()))
        while not engine.requests:  # noqa: ASYNC110 - the engine runs in another thread
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    wait_for(lambda: [call.ended for call in agent.capture.calls()] == ["agent_gone"])
    assert agent.capture.stats().active == 0


def test_a_local_call_that_takes_too_long_fails_and_is_ended(
    open_agent: Any, engine: Any, fake: Any, wait_for: Any
) -> None:
    agent = open_agent()
    engine.respond = lambda request: fake.Answer([30.0])
    with pytest.raises(CaptureError, match=r"no answer after 0\.2 s"):
        post(agent.capture, timeout_s=0.2)
    wait_for(lambda: [call.ended for call in agent.capture.calls()] == ["agent_gone"])


def test_a_local_call_after_the_server_stopped_fails(engine: Any, tmp_path: Path) -> None:
    with CaptureServer(tmp_path) as server:
        capture = server.open("late", Model(base_url=engine.url, name="m"))
    with pytest.raises(CaptureError, match="does not run"):
        post(capture)


def test_many_local_calls_at_once_are_each_recorded_once(open_agent: Any, engine: Any) -> None:
    agents = [open_agent() for _ in range(64)]

    async def all_of_them() -> list[int]:
        calls = [agent.capture.post(PATH, json.dumps(BODY).encode()) for agent in agents for _ in range(4)]
        return [reply.status for reply in await asyncio.gather(*calls)]

    assert asyncio.run(all_of_them()) == [200] * 256
    assert [len(agent.capture.calls()) for agent in agents] == [4] * 64
    assert len(engine.requests) == 256


# -- a proxy on the caller's loop --------------------------------------------------------------------------------------


def body_for(text: str) -> bytes:
    return json.dumps({**BODY, "messages": [{"role": "user", "content": text}]}).encode()


def test_a_proxy_on_the_callers_loop_needs_no_thread_and_records_each_call(engine: Any, tmp_path: Path) -> None:
    async def play() -> tuple[list[int], list[str], int]:
        threads = threading.active_count()
        async with CaptureServer(tmp_path).on_this_loop() as server:
            capture = server.open("here", Model(base_url=engine.url, name="m"))
            replies = await asyncio.gather(*(capture.post(PATH, body_for(f"{number}")) for number in range(8)))
            more = threading.active_count() - threads
            await capture.aclose()
            await capture.aclose()
            return [reply.status for reply in replies], [str(call.ended) for call in capture.calls()], more

    statuses, ends, threads = asyncio.run(play())
    assert (statuses, ends) == ([200] * 8, ["complete"] * 8)
    assert threads == 0


def test_cancelled_and_late_calls_on_the_same_loop_end_as_if_the_agent_hung_up(
    engine: Any, fake: Any, tmp_path: Path
) -> None:
    engine.respond = lambda request: fake.Answer([30.0])

    async def play() -> list[str]:
        async with CaptureServer(tmp_path).on_this_loop() as server:
            capture = server.open("here", Model(base_url=engine.url, name="m"))
            call = asyncio.ensure_future(capture.post(PATH, body_for("first")))
            while not engine.requests:  # noqa: ASYNC110 - the engine runs in another thread
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(CaptureError, match="no answer after"):
                await capture.post(PATH, body_for("second"), timeout_s=0.05)
            await capture.aclose()
            assert capture.stats().active == 0
            return [str(call.ended) for call in capture.calls()]

    assert asyncio.run(play()) == ["agent_gone", "agent_gone"]


def test_the_end_of_a_proxy_on_the_callers_loop_ends_its_calls(engine: Any, fake: Any, tmp_path: Path) -> None:
    engine.respond = lambda request: fake.Answer([30.0])

    async def play() -> tuple[int, list[str]]:
        server = CaptureServer(tmp_path)
        async with server.on_this_loop():
            capture = server.open("here", Model(base_url=engine.url, name="m"))
            call = asyncio.ensure_future(capture.post(PATH, body_for("first")))
            while not engine.requests:  # noqa: ASYNC110 - the engine runs in another thread
                await asyncio.sleep(0.01)
            with pytest.raises(CaptureError, match="runs already"):
                await asyncio.to_thread(server.start)
        reply = await asyncio.wait_for(call, 10)
        with pytest.raises(CaptureError, match="does not run"):
            await capture.post(PATH, body_for("late"))
        await capture.aclose()  # has been closed by the end
        return reply.status, [str(call.ended) for call in capture.calls()]

    assert asyncio.run(play()) == (403, ["revoked"])


def test_calls_on_the_same_loop_wait_while_the_proxy_is_paused(engine: Any, tmp_path: Path) -> None:
    async def play() -> int:
        async with CaptureServer(tmp_path).on_this_loop() as server:
            capture = server.open("here", Model(base_url=engine.url, name="m"))
            await asyncio.to_thread(server.pause)
            call = asyncio.ensure_future(capture.post(PATH, body_for("held back")))
            server.resume()
            server.hold()  # at once, before the loop runs again
            done, _ = await asyncio.wait({call}, timeout=0.2)
            assert not done
            assert not engine.requests
            server.resume()
            return (await call).status

    assert asyncio.run(play()) == 200


def test_a_loop_that_was_busy_for_longer_than_the_timeout_does_not_lose_the_answer(
    engine: Any, fake: Any, tmp_path: Path
) -> None:
    answer = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}}]}).encode()
    json_type = {"content-type": "application/json"}
    # The rest comes after the loop is free again, and within another timeout.
    engine.respond = lambda request: fake.Answer([answer[:10], 1.0, answer[10:]], 200, json_type)

    async def play() -> int:
        async with CaptureServer(tmp_path).on_this_loop() as server:
            model = Model(base_url=engine.url, name="m", request_timeout_s=0.5)
            capture = server.open("here", model)
            call = asyncio.ensure_future(capture.post(PATH, body_for("first")))
            while not engine.requests:  # noqa: ASYNC110 - the engine runs in another thread
                await asyncio.sleep(0)
            end = time.monotonic() + 0.7
            while time.monotonic() < end:  # a trainer that computes on the loop
                pass
            return (await call).status

    assert asyncio.run(play()) == 200


def test_a_thread_without_a_loop_waits_for_its_call_and_gives_up_in_time(
    open_agent: Any, engine: Any, fake: Any, wait_for: Any
) -> None:
    agent = open_agent()
    assert agent.capture.post_and_wait(PATH, body_for("first"), timeout_s=30).status == 200
    engine.respond = lambda request: fake.Answer([30.0])
    with pytest.raises(CaptureError, match=r"no answer after 0\.2 s"):
        agent.capture.post_and_wait(PATH, body_for("second"), timeout_s=0.2)
    wait_for(lambda: [call.ended for call in agent.capture.calls()] == ["complete", "agent_gone"])
