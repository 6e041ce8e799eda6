"""Failures between agent, proxy and endpoint: every call is recorded, and the agent gets a proper error."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from openenv.rollout.capture import CaptureServer
from waiting import holds_for, wait_until


def hang_up_after(agent: Any, chunks: int, **body: Any) -> list[str]:
    """Read some lines of a stream, and hang up."""
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True, **body}
    lines: list[str] = []
    with agent.client.stream("POST", "/chat/completions", json=request, headers=agent.headers) as response:
        for line in response.iter_lines():
            if line:
                lines.append(line)
            if len(lines) >= chunks:
                break
    return lines


def test_an_agent_that_hangs_up_ends_the_call_at_the_endpoint_and_what_was_sampled_stays(
    agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    engine.respond = fake.vllm(list(range(1, 500)), delay_s=0.01)
    hang_up_after(agent, 5)
    wait_for(lambda: engine.hung_up == [1])
    wait_for(lambda: agent.capture.stats().active == 0)
    (call,) = agent.capture.calls()
    assert call.ended == "agent_gone"
    assert len(call.completion.sampled) >= 4
    assert call.completion.sampled.ids == tuple(range(1, len(call.completion.sampled) + 1))
    assert len(call.completion.sampled) < 200
    assert call.status == 200


def test_an_unreachable_endpoint_is_recorded_and_is_an_error_in_the_agents_dialect(
    open_agent: Callable[..., Any],
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        agent = open_agent(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
        response = agent.chat()
    assert response.status_code == 502
    assert "no connection" in response.json()["error"]["message"]
    (call,) = agent.capture.calls()
    assert (call.ended, call.status, call.attempts) == ("unreachable", None, 3)
    stats = agent.capture.stats()
    assert stats.failures_in_a_row == 3
    assert stats.last_error["kind"] == "unreachable"
    assert agent.post("/messages", {"model": "m", "messages": [], "max_tokens": 5}).json()["type"] == "error"


def test_an_endpoint_that_was_gone_when_a_call_failed_is_remembered_until_a_good_answer(
    open_agent: Callable[..., Any], engine: Any
) -> None:
    with socket.socket() as gone:  # bound and not listening: connections are refused
        gone.bind(("127.0.0.1", 0))
        agent = open_agent(base_url=f"http://127.0.0.1:{gone.getsockname()[1]}/v1")
        assert agent.chat().status_code == 502
        assert "nothing listened there when a call failed" in agent.capture.stats().outage
        gone.listen()
        accepted = threading.Thread(target=_answer_once, args=(gone,))
        accepted.start()
        assert agent.chat().status_code == 200
        accepted.join(10)
    assert agent.capture.stats().outage is None


def _answer_once(listening: socket.socket) -> None:
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]})
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())


@pytest.mark.parametrize("listens", [True, False])
def test_a_stream_that_breaks_is_an_outage_only_if_nothing_listens_any_more(
    open_agent: Callable[..., Any], listens: bool
) -> None:
    def begin_and_end(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\ndata: "
            )
            if not listens:
                listening.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        agent = open_agent(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        serving = threading.Thread(target=begin_and_end, args=(listening,))
        serving.start()
        with pytest.raises(httpx2.RemoteProtocolError):
            agent.chat_stream()
        serving.join(10)
    assert (agent.capture.stats().outage is None) == listens


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_endpoint_is_tried_again(agent: Any, engine: Any, fake: Any, status: int) -> None:
    good = fake.vllm([7, 8])

    def respond(request: Any) -> Any:
        if len(engine.requests) < 3:
            return fake.Answer.json({"error": {"message": "busy"}}, status, retry_after="0")
        return good(request)

    engine.respond = respond
    assert agent.chat().status_code == 200
    (call,) = agent.capture.calls()
    assert (call.ended, call.attempts, call.status, call.error) == ("complete", 3, 200, None)
    assert call.completion.sampled.ids == (7, 8)


def test_an_error_that_lasts_is_passed_on_with_its_status(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "on fire"}}, 503)
    response = agent.chat(stream=True)
    assert (response.status_code, response.json()) == (503, {"error": {"message": "on fire"}})
    assert len(engine.requests) == 3
    (call,) = agent.capture.calls()
    assert (call.ended, call.status, call.error["message"]) == ("failed", 503, "on fire")
    (turn,) = agent.capture.turns()
    assert (turn.upstream_status, turn.upstream_error["message"]) == (503, "on fire")


def test_an_endpoint_that_asks_for_a_long_wait_is_not_waited_for(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "later"}}, 429, retry_after="3600")
    response = agent.chat()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3600"
    assert len(engine.requests) == 1


def test_a_request_that_the_endpoint_rejects_is_not_repeated(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "messages: too short"}}, 400)
    assert agent.chat().status_code == 400
    assert len(engine.requests) == 1


def test_an_answer_that_is_not_json_is_recorded_and_becomes_an_error(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = lambda request: fake.Answer(
        [b"<html>no</html>"], 200, {"content-type": "text/html"}, chunked=False
    )
    response = agent.chat()
    assert response.status_code == 502
    assert "not a JSON object" in response.json()["error"]["message"]
    (call,) = agent.capture.calls()
    assert (call.ended, call.status) == ("broken", 200)
    assert "<html>" in call.error["text"]


def test_a_stream_that_breaks_keeps_its_tokens_and_is_incomplete_for_the_agent(
    agent: Any, engine: Any, fake: Any
) -> None:
    whole = fake.vllm([1, 2, 3, 4])
    engine.respond = lambda request: fake.Answer.events(*whole(request).pieces[:3], 0.05, None)
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with pytest.raises(httpx2.RemoteProtocolError):
        agent.post("/chat/completions", request)
    (call,) = agent.capture.calls()
    assert (call.ended, call.completion.sampled.ids, call.completion.finish_reason) == ("broken", (1, 2), None)


def test_a_stream_that_ends_without_a_reason_is_not_taken_for_a_whole_one(agent: Any, engine: Any, fake: Any) -> None:
    whole = fake.vllm([1, 2, 3, 4])
    engine.respond = lambda request: fake.Answer.events(*whole(request).pieces[:4])
    with pytest.raises(httpx2.RemoteProtocolError):
        agent.chat(stream=True)
    (call,) = agent.capture.calls()
    assert (call.ended, call.completion.sampled.ids) == ("broken", (1, 2, 3))


def test_a_silent_endpoint_times_out(open_agent: Callable[..., Any], engine: Any, fake: Any) -> None:
    agent = open_agent(request_timeout_s=0.2)
    engine.respond = lambda request: fake.Answer.events(fake.event(fake.chat_chunk({"content": "a"})), 5.0)
    with pytest.raises(httpx2.RemoteProtocolError):
        agent.chat(stream=True)
    (call,) = agent.capture.calls()
    assert call.ended == "timeout"
    assert agent.capture.stats().last_error["kind"] == "timeout"


def test_the_real_key_is_in_nothing_that_the_agent_gets(agent: Any, engine: Any, fake: Any) -> None:
    secret = "sk-real-secret"
    engine.respond = lambda request: fake.Answer.json(
        {"error": {"message": f"bad key {secret}", "body": request.headers["authorization"]}}, 400, x_debug=secret
    )
    response = agent.chat()
    assert response.status_code == 400
    assert secret not in response.text + str(response.headers)
    engine.respond = lambda request: fake.Answer.json({"error": {"message": f"incorrect key {secret[:6]}"}}, 401)
    response = agent.chat()
    assert response.status_code == 401
    assert "does not accept the key" in response.json()["error"]["message"]
    assert secret.encode() not in (agent.capture.path / "calls.log").read_bytes()


def test_headers_of_the_endpoint_are_kept_from_the_agent_but_for_a_few(agent: Any, engine: Any, fake: Any) -> None:
    good = fake.vllm([1])

    def respond(request: Any) -> Any:
        answer = good(request)
        answer.headers.update({"set-cookie": "a=b", "server": "x", "x-request-id": "r1"})
        return answer

    engine.respond = respond
    response = agent.chat()
    assert response.headers["x-request-id"] == "r1"
    assert "set-cookie" not in response.headers
    assert "server" not in response.headers


def test_revoking_ends_calls_under_way_and_lets_none_through(
    agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    engine.respond = fake.vllm(list(range(1, 500)), delay_s=0.01)
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with agent.client.stream("POST", "/chat/completions", json=request, headers=agent.headers) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"t2 "' in line)
        agent.capture.revoke()
        assert agent.capture.stats().active == 0
        with pytest.raises(httpx2.RemoteProtocolError):
            list(lines)
    before = len(engine.requests)
    assert agent.chat().status_code == 401
    assert len(engine.requests) == before
    wait_for(lambda: engine.hung_up == [1])
    (call,) = agent.capture.calls()
    assert call.ended == "revoked"
    assert len(call.completion.sampled) > 0
    agent.capture.revoke()
    agent.capture.close()
    assert agent.capture.calls()[0].ended == "revoked"


def test_a_full_disk_fails_the_call_and_marks_the_rollout(
    agent: Any, engine: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    room = {"bytes": 2500}

    def write(fd: int, data: Any) -> int:
        if room["bytes"] < len(data):
            taken = real(fd, bytes(data)[: room["bytes"]]) if room["bytes"] else 0
            room["bytes"] -= taken
            if not taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            return taken
        room["bytes"] -= len(data)
        return real(fd, data)

    engine.respond = fake.vllm(list(range(1, 100)), delay_s=0.001)
    monkeypatch.setattr("openenv.rollout.capture.records.os.write", write)
    with pytest.raises(httpx2.RemoteProtocolError):
        agent.chat(stream=True)
    response = agent.chat()
    assert response.status_code == 507
    assert "could not be recorded" in response.json()["error"]["message"]
    monkeypatch.undo()
    stats = agent.capture.stats()
    assert "No space left" in stats.record_failure
    assert stats.endings["record_failed"] == 2
    assert agent.chat_stream()  # there is room again: calls go on, the mark stays
    recording = agent.capture.recording()
    assert recording.torn_bytes == 0
    assert [note["what"] for note in recording.notes] == ["failed"]
    assert [call.ended for call in recording.calls] == [None, "complete"]


def test_bodies_that_are_too_large_or_no_json_are_refused(server: Any, agent: Any, engine: Any) -> None:
    assert agent.client.post("/chat/completions", content=b"[1]", headers=agent.headers).status_code == 400
    assert agent.client.post("/chat/completions", content=b"{", headers=agent.headers).status_code == 400
    assert agent.chat(n=2).status_code == 400
    response = agent.client.post("/nothing", json={}, headers=agent.headers)
    assert response.status_code == 404
    assert engine.requests == []
    assert agent.capture.calls() == []
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        raw.settimeout(5)
        assert b"413" in raw.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        raw.settimeout(5)
        assert b"400" in raw.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 70000 + b"\r\n\r\n")
        raw.settimeout(5)
        assert b"431" in raw.recv(4096)


def test_a_slow_agent_does_not_make_the_proxy_hold_the_whole_stream(
    agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    text = "x" * 60_000
    pieces = [fake.event(fake.chat_chunk({"content": text})) for _ in range(300)]
    engine.respond = lambda request: fake.Answer.events(
        *pieces, fake.event(fake.chat_chunk({}, finish="stop")), fake.DONE
    )
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with agent.client.stream("POST", "/chat/completions", json=request, headers=agent.headers) as response:
        holds_for(0.3, lambda: len(engine.written) < 250)
        assert sum(len(chunk) for chunk in response.iter_bytes()) > 15_000_000
    wait_for(lambda: agent.capture.stats().active == 0)
    assert agent.capture.calls()[0].ended == "complete"


def test_an_agent_cannot_make_the_proxy_stop_capturing(open_agent: Callable[..., Any], engine: Any, fake: Any) -> None:
    good = fake.vllm([1, 2])

    def respond(request: Any) -> Any:
        if request.body.get("tool_choice") == "logprobs return_token_ids":
            complaint = f"tool_choice: not a choice: {request.body['tool_choice']}"
            return fake.Answer.json({"error": {"message": complaint}}, 400)
        return good(request)

    engine.respond = respond
    cheat, other = open_agent(), open_agent()
    assert cheat.chat(tool_choice="logprobs return_token_ids").status_code == 400
    for agent in (cheat, other):
        assert agent.chat().status_code == 200
        assert agent.capture.calls()[-1].completion.sampled.ids == (1, 2)
        assert agent.capture.calls()[-1].completion.sampled.has_logprobs
    assert cheat.capture.stats().failures_in_a_row == 0


def test_revoking_ends_a_call_whose_agent_does_not_read(
    server: Any, agent: Any, engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    pieces = [fake.event(fake.chat_chunk({"content": "x" * 60_000})) for _ in range(2000)]
    engine.respond = lambda request: fake.Answer.events(*pieces)
    body = b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {agent.capture.key}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        written = -1

        def is_blocked() -> bool:
            nonlocal written
            before, written = written, len(engine.written)
            return 0 < before == written

        wait_until(is_blocked, every_s=0.1)
        agent.capture.revoke()
        assert agent.capture.stats().active == 0
    assert agent.capture.calls()[0].ended == "revoked"


def test_a_request_that_takes_too_long_to_arrive_is_cut_off(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.rollout.capture.inbound.RECEIVE_S", 0.2)
    for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost", b"GET / HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(start)
            raw.settimeout(10)
            assert raw.recv(4096) == b""


def test_the_end_of_a_rollout_does_not_wait_for_an_agent_that_does_not_read(
    server: CaptureServer, open_agent: Callable[..., Any], engine: Any, fake: Any, wait_for: Callable[..., None]
) -> None:
    def respond(request: Any) -> Any:
        if request.body["messages"][0]["content"] == "large":
            return fake.Answer.json({"choices": [{"index": 0, "message": {"content": "x" * (8 << 20)}}]})
        return fake.Answer([60.0, b"{}"])

    engine.respond = respond
    capture = open_agent().capture

    def request(text: str) -> bytes:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {capture.key}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.socket))
        connection.sendall(request("large") + request("small"))  # pipelined: the second waits behind the first's answer
        wait_for(lambda: len(engine.requests) == 2)
        ended = threading.Thread(target=capture.revoke, daemon=True)
        ended.start()
        ended.join(20)
        assert not ended.is_alive()
    assert [call.ended for call in capture.calls()] == ["complete", "revoked"]


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic"])
def test_an_endpoint_is_asked_with_a_request_that_no_agent_wrote(
    open_agent: Callable[..., Any], engine: Any, fake: Any, dialect: str
) -> None:
    agent = open_agent(dialect=dialect, api_key="the-real-key")
    answers = {
        "openai_chat": {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]},
        "openai_responses": {"status": "completed", "output": [{"type": "message", "content": []}]},
        "anthropic": {"content": [{"type": "text", "text": "yes"}], "stop_reason": "end_turn"},
    }
    engine.respond = lambda request: fake.Answer.json(answers[dialect])
    assert agent.capture.ask_endpoint().result(20) is None
    (request,) = engine.requests
    assert "the-real-key" in str(request.headers)
    assert request.body["model"] == agent.capture.recording().model["name"]
    assert agent.capture.calls() == []
    assert agent.capture.stats().calls == 0


def test_an_endpoint_that_turns_the_limit_of_tokens_down_is_asked_without_it(
    agent: Any, engine: Any, fake: Any
) -> None:
    def respond(request: Any) -> Any:
        for name in ("max_tokens", "max_completion_tokens"):
            if name in request.body:
                return fake.Answer.json({"error": {"message": f"unknown parameter {name}"}}, 400)
        return fake.Answer.json({"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]})

    engine.respond = respond
    assert agent.capture.ask_endpoint().result(20) is None
    assert len(engine.requests) == 3


def test_an_endpoint_that_does_not_answer_is_asked_a_few_times(
    open_agent: Callable[..., Any], engine: Any, fake: Any
) -> None:
    agent = open_agent(api_key="the-real-key")
    engine.respond = lambda request: fake.Answer.json({"error": {"message": "no the-real-key here"}}, 503)
    assert agent.capture.ask_endpoint().result(20) == "status 503: no *** here"
    assert len(engine.requests) == 3


def test_an_endpoint_whose_limit_is_used_up_is_waited_for(agent: Any, engine: Any, fake: Any) -> None:
    answers = iter([fake.Answer.json({}, 429, retry_after="0.5")] * 2)
    healthy = fake.Answer.json({"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]})
    engine.respond = lambda request: next(answers, healthy)
    began = time.monotonic()
    assert agent.capture.ask_endpoint().result(20) is None
    assert time.monotonic() - began >= 1.0
