"""Tools that hang, raise, return what is no JSON or very much, get wrong arguments or are cancelled: over every
transport a typed error, a session that goes on, and no thread left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MEGABYTES = 10

FAILURES = [
    ("boom", {}, "execution_error", "bang"),
    ("thing", {}, "execution_error", "cannot be sent"),
    ("echo", {}, "invalid_args", "message"),
    ("echo", {"message": "a", "times": "many"}, "invalid_args", "times"),
    ("echo", {"message": "a", "volume": 11}, "invalid_args", "volume"),
    ("nothing", {}, "tool_not_found", "nothing"),
    ("spin_briefly", {}, "timeout", "0.3"),
    ("wait_briefly", {}, "timeout", "0.3"),
]


@contextmanager
def no_thread_more(server: Any) -> Iterator[None]:
    """Check that as many threads run as before, soon after the block."""
    before = own_threads()
    yield
    server.wait_for(lambda: own_threads() <= before)


def own_threads() -> int:
    """How many threads there are, but for the one loop that all tools of the process share."""
    return sum(thread.name != "openenv-tools" for thread in threading.enumerate())


class Caller:
    """Calls tools in one session, and tells how a call failed."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def data(self, tool: str, **arguments: Any) -> Any:
        """Call a tool that must succeed."""
        result = self._call(tool, arguments)["result"]
        return result["data"] if "data" in result else result["structuredContent"]["result"]

    def failure(self, tool: str, arguments: Any, **params: Any) -> Any:
        """Call a tool that must fail; a message and, where the protocol has it, the kind of the error."""
        response = self._call(tool, arguments, **params)
        if "error" in response:
            return response["error"]["message"], (response["error"].get("data") or {}).get("error_type")
        assert response["result"]["isError"] is True, response
        return "".join(block["text"] for block in response["result"]["content"]), None


@pytest.fixture(params=["POST /mcp", "WS /mcp", "mcp frames of /ws", "handshake", "modern", "step"])
def caller(
    request: pytest.FixtureRequest, server: Any, wire: Any, open_socket: Any, handshake: Any, modern: Any
) -> Caller:
    """Call tools over each transport."""
    match request.param:
        case "POST /mcp":
            client = wire(server.url)
            name = client.own("openenv/session/create")["result"]["session_id"]

            def post(tool: str, arguments: Any, **params: Any) -> Any:
                return client.own("tools/call", {"name": tool, "arguments": arguments, "session_id": name, **params})

            return Caller(post)
        case "WS /mcp" | "mcp frames of /ws":
            socket = open_socket(server.url, "/mcp" if request.param == "WS /mcp" else "/ws")
            return Caller(
                lambda tool, arguments, **params: socket.own(
                    "tools/call", {"name": tool, "arguments": arguments, **params}
                )
            )
        case "handshake":
            old = handshake(server.url)
            return Caller(lambda tool, arguments, **params: old.call(tool, arguments).message)
        case "modern":
            new = modern(server.url)
            return Caller(lambda tool, arguments, **params: new.call(tool, arguments).message)
    socket = open_socket(server.url, "/ws", plain=True)
    return Caller(lambda tool, arguments, **params: step(socket, tool, arguments, **params))


def step(socket: Any, tool: str, arguments: Any, **params: Any) -> Any:
    """Call a tool as a step, and show the observation as a response."""
    action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
    socket.send(json.dumps({"type": "step", "data": action, **params}))
    observation = json.loads(socket.recv(20))["data"]["observation"]
    if observation["error"] is not None:
        error = observation["error"]
        return {"error": {"message": error["message"], "data": {"error_type": error["error_type"]}}}
    return {"result": observation["result"]}


@pytest.mark.parametrize(("tool", "arguments", "kind", "words"), FAILURES)
def test_a_failure_has_a_kind_and_words_and_the_session_goes_on(
    server: Any, caller: Caller, tool: str, arguments: Any, kind: str, words: str
) -> None:
    assert caller.data("count") == 1
    with no_thread_more(server):
        message, shown = caller.failure(tool, arguments)
        assert words in message
        assert shown in (kind, None)
        assert caller.data("count") == 2
    assert server.manager.active == 1


def test_ten_megabytes_arrive_whole(server: Any, caller: Caller) -> None:
    assert caller.data("count") == 1
    with no_thread_more(server):
        data = caller.data("big", megabytes=MEGABYTES)
        assert len(data) == MEGABYTES * 1024 * 1024
        assert caller.data("count") == 2


@pytest.mark.parametrize("tool", ["spin", "wait"])
@pytest.mark.parametrize("transport", ["POST /mcp", "WS /mcp", "mcp frames of /ws"])
def test_a_call_ends_at_the_limit_that_the_client_asks_for(
    server: Any, wire: Any, open_socket: Any, tool: str, transport: str
) -> None:
    if transport == "POST /mcp":
        client = wire(server.url)
        session = {"session_id": client.own("openenv/session/create")["result"]["session_id"]}
    else:
        client, session = open_socket(server.url, "/mcp" if transport == "WS /mcp" else "/ws"), {}
    assert client.own("tools/call", {"name": "count", **session})["result"]["data"] == 1
    with no_thread_more(server):
        error = client.own("tools/call", {"name": tool, "timeout_s": 0.2, **session})["error"]
        assert (error["code"], error["data"]["error_type"]) == (-32603, "timeout")
        assert server.watch.cancelled.wait(30)
        assert client.own("tools/call", {"name": "count", **session})["result"]["data"] == 2


def test_many_tools_that_hang_leave_no_thread_behind(server: Any, wire: Any) -> None:
    client = wire(server.url)
    name = client.own("openenv/session/create")["result"]["session_id"]
    client.own("tools/call", {"name": "count", "session_id": name})
    with no_thread_more(server):
        for tool in ("spin", "wait") * 10:
            error = client.own("tools/call", {"name": tool, "timeout_s": 0.05, "session_id": name})["error"]
            assert error["data"]["error_type"] == "timeout"
    assert client.own("tools/call", {"name": "count", "session_id": name})["result"]["data"] == 2


def test_a_tool_that_hangs_on_an_environment_of_its_own_ends_with_it(server: Any, wire: Any) -> None:
    client = wire(server.url)
    for tool in ("spin", "wait"):
        error = client.own("tools/call", {"name": tool, "timeout_s": 0.2})["error"]
        assert error["data"]["error_type"] == "timeout"
    server.wait_for(lambda: server.watch.alive == 0)
