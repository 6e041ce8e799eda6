"""Chat completions through the proxy: what the endpoint gets, what the agent sees, what is recorded."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import http_calls
from openenv.rollout.capture import CaptureOptions, CaptureServer
from openenv.rollout.tasks.task import Model


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_stream_reaches_the_agent_without_what_was_forced_and_is_captured_with_it(agent: Any, engine: Any) -> None:
    chunks = agent.chat_stream(logprobs=False)
    assert text_of(chunks) == "t11 t12 t13 "
    assert all(
        "logprobs" not in choice and "token_ids" not in choice for chunk in chunks for choice in chunk["choices"]
    )
    assert all("prompt_token_ids" not in chunk and not chunk.get("usage") for chunk in chunks)
    sent = engine.requests[0].body
    assert (sent["logprobs"], sent["top_logprobs"], sent["return_token_ids"]) == (True, 5, True)
    assert sent["model"] == "real-model"
    assert engine.requests[0].headers["authorization"] == "Bearer sk-real-secret"
    (call,) = agent.capture.calls()
    assert call.ended == "complete"
    assert call.completion.sampled.ids == (11, 12, 13)
    assert call.completion.sampled.logprobs == (-0.011, -0.012, -0.013)
    assert call.completion.prompt_ids is not None
    assert call.completion.usage["completion_tokens"] == 3
    assert call.response["choices"][0]["message"]["content"] == "t11 t12 t13 "
    assert call.request["model"] == "any"
    assert call.request["logprobs"] is False
    assert call.sent == sent
    (turn,) = agent.capture.turns()
    assert (turn.completion_token_ids, turn.per_token_logps) == ([11, 12, 13], [-0.011, -0.012, -0.013])
    assert turn.finish_reason == "stop"


def test_a_whole_answer_reaches_the_agent_without_what_was_forced_and_is_captured_with_it(agent: Any) -> None:
    response = agent.chat()
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "t11 t12 t13 "
    assert "logprobs" not in choice
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in response.json()
    (call,) = agent.capture.calls()
    assert call.completion.sampled.ids == (11, 12, 13)
    assert len(call.completion.prompt_ids) == 2


def test_an_agent_that_asks_for_ids_itself_gets_them_byte_for_byte(agent: Any, engine: Any) -> None:
    options = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "stream_options": {"include_usage": True}}
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **options}
    response = agent.post("/chat/completions", body)
    assert response.content == b"".join(piece for _, piece in engine.written)
    (call,) = agent.capture.calls()
    assert call.completion.sampled.ids == (11, 12, 13)
    assert call.completion.prompt_ids is not None
    whole = agent.post("/chat/completions", {**body, "stream": False})
    assert whole.content == engine.written[-1][1]


def test_tool_calls_reasoning_and_odd_fields_survive_a_stream(agent: Any, engine: Any, fake: Any) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {
            "tool_calls": [
                {"index": index, **({"id": f"c{index}"} if "name" in function else {}), "function": function}
            ]
        }

    deltas = [
        {"role": "assistant", "content": None},
        {"reasoning_content": "let me "},
        {"reasoning_content": "see"},
        {"content": "I will"},
        call(0, name="write", arguments=""),
        call(0, arguments='{"a"'),
        call(0, arguments=":1}"),
        call(1, name="run", arguments="{}"),
    ]
    pieces = [fake.event(fake.chat_chunk(delta)) for delta in deltas]
    end = fake.event(fake.chat_chunk({}, finish="tool_calls", stop_reason=151645))
    engine.respond = lambda request: fake.Answer.events(b": keep-alive\n\n", *pieces, end, fake.DONE)
    chunks = agent.chat_stream()
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = agent.capture.calls()[0].response["choices"][0]["message"]
    assert message["content"] == "I will"
    assert message["reasoning_content"] == "let me see"
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("c0", "write", '{"a":1}'),
        ("c1", "run", "{}"),
    ]


def test_a_chunk_that_only_carries_ids_is_captured_and_not_shown(agent: Any, engine: Any, fake: Any) -> None:
    hidden = fake.chat_chunk({}, token_ids=[5, 6], logprobs={"content": [fake.entry(5), fake.entry(6)]})
    text = fake.chat_chunk({"content": "x"}, token_ids=[7], logprobs={"content": [fake.entry(7)]})
    end = fake.chat_chunk({}, finish="stop")
    engine.respond = lambda request: fake.Answer.events(*(fake.event(one) for one in (hidden, text, end)), fake.DONE)
    assert len(agent.chat_stream()) == 2
    assert agent.capture.calls()[0].completion.sampled.ids == (5, 6, 7)


def test_every_chunk_passes_as_it_comes_and_is_on_disk_by_then(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = fake.vllm([1, 2, 3, 4, 5], delay_s=0.2)
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    began, times = time.monotonic(), []
    with agent.client.stream("POST", "/chat/completions", json=request, headers=agent.headers) as response:
        for line in response.iter_lines():
            if '"content":"t' in line:
                times.append(time.monotonic() - began)
                (call,) = agent.capture.calls()
                assert len(call.completion.sampled) == len(times)
                assert call.ended is None
    assert len(times) == 5
    assert times[0] < 0.5
    assert times[-1] - times[0] > 0.5


def test_a_conversation_is_stored_once_however_often_it_is_sent(agent: Any, engine: Any, fake: Any) -> None:
    engine.respond = fake.vllm([1, 2])
    messages = [{"role": "system", "content": "s" * 5000}]
    sizes = []
    for turn in range(30):
        messages.append(
            {"role": "user", "content": f"{turn} " + "x" * 1000, "ids": list(range(turn * 500, turn * 500 + 500))}
        )
        agent.chat_stream(messages=messages, tools=[{"type": "function", "function": {"name": "f" * 3000}}])
        messages.append({"role": "assistant", "content": "t1 t2 "})
        sizes.append((agent.capture.path / "calls.log").stat().st_size)
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(growth) < 2 * min(growth)
    calls = agent.capture.calls()
    assert calls[-1].request["messages"] == messages[:-1]
    assert calls[-1].sent == engine.requests[-1].body
    assert list(calls[-1].completion.prompt_ids) == fake.prompt_ids(engine.requests[-1].body)
    assert calls[0].request["tools"][0]["function"]["name"] == "f" * 3000


def test_connections_to_the_endpoint_are_used_again(agent: Any, engine: Any) -> None:
    for _ in range(5):
        agent.chat()
        agent.chat_stream()
    assert engine.connections == 1


def test_agents_connections_are_used_again_also_for_requests_sent_ahead(server: CaptureServer, agent: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {agent.capture.key}\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(10)
        raw.sendall(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + request * 3)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3 or not data.endswith(b"}"):
            data += raw.recv(65536)
        raw.sendall(head.encode() + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert raw.recv(4096).startswith(b"HTTP/1.1 100")
        raw.sendall(body)
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
    assert len(agent.capture.calls()) == 4


def test_compressed_answers_are_read(agent: Any, engine: Any, fake: Any) -> None:
    whole = fake.vllm([1, 2])

    def respond(request: Any) -> Any:
        answer = whole(request)
        zipped = gzip.compress(b"".join(answer.pieces))
        half = len(zipped) // 2
        return fake.Answer([zipped[:half], 0.01, zipped[half:]], 200, {**answer.headers, "content-encoding": "gzip"})

    engine.respond = respond
    assert text_of(agent.chat_stream()) == "t1 t2 "
    assert agent.capture.calls()[0].completion.sampled.ids == (1, 2)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_endpoints_are_reached_over_tls_and_their_certificates_are_checked(
    tmp_path: Path, fake: Any, certificate: Path
) -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate / "cert", certificate / "key")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert"))
    body = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with fake.FakeEngine(tls=serving) as engine:
        for name, tls, status in (("trusted", trusting, 200), ("unknown", None, 502)):
            with CaptureServer(tmp_path / name, CaptureOptions(tls=tls, backoff_s=0.01)) as server:
                capture = server.open(name, Model(base_url=engine.url, name="m"))
                url = f"{server.url}/v1/chat/completions"
                response = http_calls.post(url, json=body, headers={"x-api-key": capture.key}, trust_env=False)
                assert response.status_code == status, response.text
                if status == 200:
                    assert capture.calls()[0].completion.sampled.ids == (11, 12, 13)


def test_an_agent_of_many_streams_at_once_is_held_back(open_agent: Callable[..., Any], engine: Any, fake: Any) -> None:
    agent = open_agent()
    engine.respond = fake.vllm([1], delay_s=5)
    sockets = []
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {agent.capture.key}\r\n"
    try:
        for _ in range(65):
            raw = socket.create_connection(("127.0.0.1", agent.client.base_url.port))
            sockets.append(raw)
            raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        sockets[-1].settimeout(10)
        first = [one.recv(15) for one in sockets]
        assert sorted({line[:12] for line in first}) == [b"HTTP/1.1 200", b"HTTP/1.1 429"]
        assert sum(line.startswith(b"HTTP/1.1 429") for line in first) == 1
    finally:
        for raw in sockets:
            raw.close()


class Tunnel(threading.Thread):
    """A proxy that takes one CONNECT and leads it to a port."""

    def __init__(self, target: int) -> None:
        super().__init__(daemon=True)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.head = b""

    def run(self) -> None:
        """Lead bytes to and fro until either side ends."""
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            while b"\r\n\r\n" not in self.head:
                self.head += near.recv(4096)
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            with contextlib.suppress(OSError):
                while True:
                    for one in select.select([near, far], [], [], 10)[0]:
                        data = one.recv(65536)
                        if not data:
                            return
                        (far if one is near else near).sendall(data)


def test_endpoints_elsewhere_are_reached_through_the_proxy_of_the_environment(
    open_agent: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnel = Tunnel(engine.port)
    tunnel.start()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{tunnel.port}")
    agent = open_agent(base_url="http://engine.test/v1")
    assert text_of(agent.chat_stream()) == "t11 t12 t13 "
    assert tunnel.head.startswith(b"CONNECT engine.test:80 ")
    assert engine.requests[0].headers["host"] == "engine.test"
