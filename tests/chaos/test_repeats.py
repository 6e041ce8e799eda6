"""Requests that come twice, at once or much later: none runs again, and each answer says which request it is to."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from fastmcp import FastMCP

from environments import Push, Pushed, Tools
from openenv.errors import StaleRequest
from openenv.server.app import create_fastapi_app
from openenv.server.sessions.ledger import KEPT, KEPT_BYTES, REMEMBERED, Ledger
from openenv.types import State
from servers import Serve

KEY = "Idempotency-Key"
HANDSHAKE, MODERN = "2025-06-18", "2026-07-28"
OWN = "OpenEnv's own"  # plain JSON-RPC that names its session


class Button(Tools):
    """Counts pushes, by step and by tool; a push with `wait` waits for the gate."""

    gate: threading.Event
    begun: threading.Event

    def __init__(self) -> None:
        tools = FastMCP("button")
        tools.tool(self._push, name="push")
        super().__init__(tools)
        self._count = 0

    def _push(self, force: int = 1, waits: bool = False) -> int:
        self._count += force
        if waits:
            self.begun.set()
            self.gate.wait(30)
        return self._count

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Pushed:
        self._count = 0
        return Pushed()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Pushed:
        return Pushed(count=self._push(action.force))

    @property
    def state(self) -> State:
        return State(step_count=self._count)


class Caller:
    """A client of one session, over HTTP."""

    def __init__(self, server: Any, env_cls: type[Button]) -> None:
        self.url, self.env_cls = server.url, env_cls
        self.http = httpx2.Client(base_url=server.url, trust_env=False, timeout=30)
        self.session = self.http.post("/sessions").json()["session_id"]
        self.named = {"X-OpenEnv-Session": self.session}
        self._client = ""

    @property
    def count(self) -> int:
        """How often the button was pushed."""
        return int(self.http.get("/state", headers=self.named).json()["step_count"])

    def step(self, key: str, force: int = 1) -> httpx2.Response:
        """Push by a step."""
        return self.http.post("/step", json={"action": {"force": force}}, headers={**self.named, KEY: key})

    def request(self, era: str, **arguments: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """Word a push by a tool call."""
        params: dict[str, Any] = {"name": "push", "arguments": arguments}
        if era == OWN:
            own = {**params, "session_id": self.session}
            return {}, {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": own}
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": era}
        if era == MODERN:
            of = "io.modelcontextprotocol"
            params["_meta"] = {f"{of}/protocolVersion": era, f"{of}/clientCapabilities": {}}
            headers |= {"Mcp-Method": "tools/call", "Mcp-Name": "push", **self.named}
        else:
            headers["Mcp-Session-Id"] = self._client or self._handshake()
        return headers, {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}

    def call(self, era: str, key: str, **arguments: Any) -> httpx2.Response:
        """Push by a tool call."""
        headers, body = self.request(era, **arguments)
        return self.http.post("/mcp", json=body, headers={**headers, KEY: key})

    def _handshake(self) -> str:
        about = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
        self._client = self.http.post("/mcp", json=body, headers=self.named).headers["Mcp-Session-Id"]
        return self._client


@pytest.fixture
def caller(serve: Serve) -> Iterator[Caller]:
    env_cls = type("OwnButton", (Button,), {"gate": threading.Event(), "begun": threading.Event()})
    made = Caller(serve(create_fastapi_app(env_cls, Push, Pushed, max_concurrent_envs=2)), env_cls)
    yield made
    env_cls.gate.set()
    made.http.close()


def pushed(response: httpx2.Response) -> int:
    """What a tool call returned."""
    result = response.json()["result"]
    return int(result["content"][0]["text"] if "content" in result else result["data"])


ERAS = pytest.mark.parametrize("era", [HANDSHAKE, MODERN, OWN])


def test_the_answer_to_an_open_names_its_key(caller: Caller) -> None:
    key = uuid.uuid4().hex
    first, again = (caller.http.post("/sessions", headers={KEY: key}) for _ in range(2))
    assert [first.headers.get(KEY), again.headers.get(KEY)] == [key, key]
    assert first.json() == again.json()


def test_a_step_that_comes_once_more_after_many_others_is_refused(caller: Caller) -> None:
    for number in range(KEPT + 4):
        assert caller.step(f"key {number}").status_code == 200
    late = caller.step("key 0")
    assert (late.status_code, late.json()["code"], late.headers[KEY]) == (409, "STALE_REQUEST", "key 0")
    assert caller.count == KEPT + 4
    assert caller.step(f"key {KEPT + 3}").json()["observation"]["count"] == KEPT + 4  # the last one is still answered


@ERAS
def test_a_tool_call_that_is_repeated_under_its_key_runs_once(caller: Caller, era: str) -> None:
    first, again = (caller.call(era, "k", force=3) for _ in range(2))
    assert pushed(first) == pushed(again) == 3
    assert first.content == again.content
    assert first.headers[KEY] == again.headers[KEY] == "k"
    assert caller.count == 3


@ERAS
def test_tool_calls_with_keys_of_their_own_each_run(caller: Caller, era: str) -> None:
    assert [pushed(caller.call(era, key)) for key in ("a", "b", "c")] == [1, 2, 3]


@ERAS
def test_the_key_of_a_tool_call_is_not_taken_for_another(caller: Caller, era: str) -> None:
    assert pushed(caller.call(era, "k", force=1)) == 1
    refused = caller.call(era, "k", force=5)
    assert (refused.status_code, refused.json()["error"]["data"]) == (422, {"code": "KEY_REUSED"})
    assert caller.step("k").status_code == 422  # nor for a step
    assert caller.count == 1


@ERAS
def test_a_tool_call_that_comes_once_more_after_many_others_is_refused(caller: Caller, era: str) -> None:
    for number in range(KEPT + 4):
        caller.call(era, f"key {number}")
    late = caller.call(era, "key 0")
    assert (late.status_code, late.json()["error"]["data"]) == (409, {"code": "STALE_REQUEST"})
    assert caller.count == KEPT + 4


@ERAS
def test_a_tool_call_that_is_repeated_while_it_runs_waits_for_its_result(caller: Caller, era: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(caller.call, era, "k", waits=True)
        assert caller.env_cls.begun.wait(30)
        again = pool.submit(caller.call, era, "k", waits=True)
        caller.env_cls.gate.set()
        assert pushed(first.result(60)) == pushed(again.result(60)) == 1
    assert caller.count == 1


@ERAS
def test_a_tool_call_with_a_key_goes_on_without_its_client_and_is_answered_later(caller: Caller, era: str) -> None:
    headers, body = caller.request(era, waits=True)
    content = json.dumps(body).encode()
    lines = [f"{name}: {value}" for name, value in {**headers, KEY: "k", "Content-Length": str(len(content))}.items()]
    host, _, port = caller.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as vanishing:
        head = "\r\n".join(["POST /mcp HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *lines, "", ""])
        vanishing.sendall(head.encode() + content)
        assert caller.env_cls.begun.wait(30)
    caller.env_cls.gate.set()
    answer = caller.http.post(
        "/mcp", content=content, headers={**headers, KEY: "k", "Content-Type": "application/json"}
    )
    assert pushed(answer) == 1
    assert caller.count == 1


def test_a_ledger_remembers_keys_for_longer_than_replies() -> None:
    ledger = Ledger()
    for number in range(KEPT + REMEMBERED + 5):
        ledger.finish(ledger.begin(f"key {number}"), "reply", 10)
    with pytest.raises(StaleRequest):
        ledger.find("key 5")
    assert ledger.find("key 4") is None  # what is remembered has an end as well
    assert ledger.find("never") is None


def test_a_ledger_remembers_keys_that_it_drops_behind_a_request_that_runs() -> None:
    ledger = Ledger()
    ledger.begin("runs")
    for number in range(KEPT + 5):
        ledger.finish(ledger.begin(f"key {number}"), "reply", 10)
    with pytest.raises(StaleRequest):
        ledger.find("key 0")


def test_a_ledger_keeps_a_large_reply_to_a_key_in_a_session_that_a_socket_has_used() -> None:
    ledger = Ledger()
    ledger.finish(ledger.begin(1), "over a socket", 10)
    ledger.finish(ledger.begin("key"), "over HTTP", KEPT_BYTES + 1)
    heard: list[str] = []
    for key in (1, "key"):
        entry = ledger.find(key)
        assert entry is not None
        entry.on_reply(heard.append)
    assert heard == ["over a socket", "over HTTP"]
    ledger.finish(ledger.begin("next"), "small", 10)
    with pytest.raises(StaleRequest):
        ledger.find("key")
