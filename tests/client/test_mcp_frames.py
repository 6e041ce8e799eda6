"""Tool clients and what servers may send them: progress between request and reply, other servers' shapes, and lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_socket

from openenv.client.mcp_client import MCPToolClient
from openenv.errors import (
    OpenEnvError,
    ProtocolError,
    RequestTimeout,
    ServerError,
    SessionLost,
    ToolArgumentsError,
    ToolCallError,
    ToolNotFoundError,
    ToolTimeout,
    ToolTransportError,
)

Frames = list[dict[str, Any]]
Answer = Callable[[dict[str, Any]], Frames]
Script = Callable[[Answer], str]


@pytest.fixture
def scripted() -> Iterator[Script]:
    """Start servers that answer each frame with the frames of a function; an observation answers every reset."""
    with contextlib.ExitStack() as stack:

        def start(answer: Answer) -> str:
            def talk(connection: ServerConnection) -> None:
                with contextlib.suppress(ConnectionClosed):
                    for text in connection:
                        request = json.loads(text)
                        replies = [observation({})] if request["type"] == "reset" else answer(request)
                        for reply in replies:
                            connection.send(json.dumps(reply))

            server = stack.enter_context(serve_socket(talk, "127.0.0.1", 0))
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            stack.callback(thread.join, 5)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.socket.getsockname()[1]}"

        yield start


def observation(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": None, "done": False}}


def result(request: dict[str, Any], value: Any) -> dict[str, Any]:
    return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": request["data"]["id"], "result": value}}


def failure(request: dict[str, Any], code: int, message: str, data: Any = None) -> dict[str, Any]:
    error = {"code": code, "message": message, "data": data}
    return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": request["data"]["id"], "error": error}}


def progress(token: Any, step: Any, **more: Any) -> dict[str, Any]:
    params = {"progressToken": token, "progress": step, **more}
    return {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}}


def counting(request: dict[str, Any]) -> Frames:
    token = request["data"]["params"].get("_meta", {}).get("progressToken")
    news = [progress(token, 1), progress("of another call", 9), progress(token, 2, total=2, message="nearly")]
    log = {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "hm"}}}
    return [*news, log, result(request, "there")]


def test_progress_between_request_and_reply_is_reported_and_the_reply_returned(scripted: Script) -> None:
    reports: list[Any] = []
    with MCPToolClient(base_url=scripted(counting)).sync() as client:
        for _ in range(2):
            assert client.call_tool_with("count", on_progress=lambda *report: reports.append(report)) == "there"
    assert reports == [(1, None, None), (2, 2, "nearly")] * 2


def test_progress_is_reported_to_awaiting_code(scripted: Script) -> None:
    async def main() -> list[Any]:
        reports: list[Any] = []
        async with MCPToolClient(base_url=scripted(counting)) as client:
            for _ in range(2):
                await client.call_tool_with("count", on_progress=lambda *report: reports.append(report))
        return reports

    assert asyncio.run(main()) == [(1, None, None), (2, 2, "nearly")] * 2


def test_unrequested_progress_is_skipped(scripted: Script) -> None:
    with MCPToolClient(base_url=scripted(counting)).sync() as client:
        assert client.call_tool("count") == "there"
        assert client.call_tool("count") == "there"


def test_a_listener_that_raises_is_logged_and_the_call_goes_on(
    scripted: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def listen(*_: Any) -> None:
        raise ValueError("I was not listening")

    with MCPToolClient(base_url=scripted(counting)).sync() as client:
        assert client.call_tool_with("count", on_progress=listen) == "there"
    assert "I was not listening" in caplog.text


def test_an_interrupt_while_progress_is_reported_loses_the_session(scripted: Script) -> None:
    def listen(*_: Any) -> None:
        raise KeyboardInterrupt

    with MCPToolClient(base_url=scripted(counting)).sync() as client:
        with pytest.raises(KeyboardInterrupt):
            client.call_tool_with("count", on_progress=listen)
        with pytest.raises(SessionLost, match="interrupted"):
            client.call_tool("count")
        client.reset()
        assert client.call_tool("count") == "there"


@pytest.fixture
def drip(scripted: Script) -> Iterator[str]:
    """A server that reports progress five times, half a second apart, before it answers; it keeps no limits."""
    pause = threading.Event()

    def answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for step in range(5):
            pause.wait(0.5)
            yield progress(request["data"]["params"].get("_meta", {}).get("progressToken"), step)
        yield result(request, "late")

    yield scripted(answer)  # type: ignore[arg-type]
    pause.set()


def test_progress_keeps_a_call_going_that_has_no_limit_of_its_own(drip: str) -> None:
    with MCPToolClient(base_url=drip, message_timeout_s=2.0).sync() as client:
        assert client.call_tool_with("drip", on_progress=lambda *_: None) == "late"


def test_progress_does_not_stretch_a_limit_and_a_server_that_ignores_it_is_given_up(
    drip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenv.client.mcp_client._GRACE_S", 0.1)
    with MCPToolClient(base_url=drip).sync() as client:
        with pytest.raises(RequestTimeout):
            client.call_tool_with("drip", timeout_s=0.3, on_progress=lambda *_: None)
        with pytest.raises(SessionLost):
            client.call_tool("drip")


def test_the_limit_and_the_request_for_progress_go_to_the_server(scripted: Script) -> None:
    requests: Frames = []

    def answer(request: dict[str, Any]) -> Frames:
        requests.append(request["data"])
        return [result(request, None)]

    with MCPToolClient(base_url=scripted(answer)).sync() as client:
        client.call_tool("a", timeout_s=1, on_progress="yes")
        client.call_tool_with("b", {"x": 1}, timeout_s=2.5, on_progress=lambda *_: None)
    plain, rich = (request["params"] for request in requests)
    assert plain == {"name": "a", "arguments": {"timeout_s": 1, "on_progress": "yes"}}
    assert rich == {"name": "b", "arguments": {"x": 1}, "timeout_s": 2.5, "_meta": {"progressToken": requests[1]["id"]}}


@pytest.mark.parametrize(
    ("error_type", "error"),
    [
        ("execution_error", ToolCallError),
        ("invalid_args", ToolArgumentsError),
        ("transport_error", ToolTransportError),
        ("tool_not_found", ToolNotFoundError),
        ("timeout", ToolTimeout),
        ("of a later release", ToolCallError),
    ],
)
@pytest.mark.parametrize("as_step", [False, True])
def test_the_type_of_an_error_tells_its_class_whatever_its_words(
    scripted: Script, error_type: str, error: type[Exception], as_step: bool
) -> None:
    words = "1 thing of 3 timed out, a validation error, Unknown tool"

    def answer(request: dict[str, Any]) -> Frames:
        if as_step:
            problem = {"error_type": error_type, "message": words}
            return [observation({"tool_name": "t", "result": None, "error": problem})]
        return [failure(request, -32603, words, {"error_type": error_type})]

    client = MCPToolClient(base_url=scripted(answer))
    client.use_production_mode = not as_step
    with client.sync() as tools:
        with pytest.raises(error, match=r"^Tool 't' failed: ") as caught:
            tools.call_tool("t")
        assert type(caught.value) is error
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Unknown tool: 't'", ToolNotFoundError),
        ("Tool 't' not found", ToolNotFoundError),
        ("2 validation errors for call[t]\nx\n  Missing required argument", ToolArgumentsError),
        ("Error calling tool 't': 1 validation error for Config: not found", ToolCallError),
        ("the argument timed out", ToolCallError),
    ],
)
def test_without_a_type_the_words_of_older_servers_tell_it(
    scripted: Script, message: str, error: type[Exception]
) -> None:
    url = scripted(lambda request: [failure(request, -32603, message)])
    with MCPToolClient(base_url=url).sync() as client:
        with pytest.raises(error) as caught:
            client.call_tool("t")
        assert type(caught.value) is error
        if error is ToolNotFoundError:
            assert "not found" in str(caught.value)


def test_a_session_that_the_server_has_closed_is_lost(scripted: Script) -> None:
    data = {"code": "SESSION_CLOSED", "session_id": "s", "reason": "idle"}
    url = scripted(lambda request: [failure(request, -32000, "Session 's' is closed (idle).", data)])
    with MCPToolClient(base_url=url).sync() as client:
        for _ in range(2):
            with pytest.raises(SessionLost, match="idle"):
                client.call_tool("t")


def test_a_list_that_fails_raises_and_is_never_empty(scripted: Script) -> None:
    url = scripted(lambda request: [failure(request, -32603, "the cupboard is locked")])
    with MCPToolClient(base_url=url).sync() as client:
        for method in (client.list_tools, lambda: client.has_tool("t"), lambda: client.get_tool("t")):
            with pytest.raises(ServerError, match="the cupboard is locked"):
                method()
        with pytest.raises(ToolCallError, match="the cupboard is locked"):
            client.call_tool("t")


def test_a_list_that_fails_as_a_step_raises_too(scripted: Script) -> None:
    failed = {"tools": [], "metadata": {"error": "the cupboard is locked", "error_type": "list_tools_failed"}}
    client = MCPToolClient(base_url=scripted(lambda _: [observation(failed)]))
    client.use_production_mode = False
    with client.sync() as tools, pytest.raises(ServerError, match="the cupboard is locked"):
        tools.list_tools()


@pytest.mark.parametrize("listed", [None, {}, {"tools": None}, {"tools": [{"description": "x"}]}, {"tools": ["t"]}])
def test_what_is_no_list_of_tools_is_an_error(scripted: Script, listed: Any) -> None:
    with MCPToolClient(base_url=scripted(lambda request: [result(request, listed)])).sync() as client:
        with pytest.raises(ProtocolError, match="tool"):
            client.list_tools()


def test_tools_may_omit_description_and_schema_and_come_in_pages(scripted: Script) -> None:
    pages: dict[Any, Any] = {
        None: {"tools": [{"name": "a", "description": None, "inputSchema": {"type": "object"}}], "nextCursor": "2"},
        "2": {"tools": [{"name": "b"}, {"name": "c", "description": "C", "input_schema": {"x": 1}}]},
    }
    url = scripted(lambda request: [result(request, pages[request["data"]["params"].get("cursor")])])
    with MCPToolClient(base_url=url).sync() as client:
        tools = client.list_tools()
    assert [(tool.name, tool.description, tool.input_schema) for tool in tools] == [
        ("a", "", {"type": "object"}),
        ("b", "", {}),
        ("c", "C", {"x": 1}),
    ]


def fastmcp_result(**fields: Any) -> dict[str, Any]:
    return {"content": [], "structured_content": None, "meta": None, "data": None, "is_error": False, **fields}


TEXT = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
IMAGE = [*TEXT, {"type": "image", "data": "AA==", "mimeType": "image/png"}]
CALLED = {"done": False, "reward": None, "metadata": {}, "tool_name": "t", "error": None}


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        (fastmcp_result(data=5, structured_content={"result": 5}), 5),
        (fastmcp_result(content=TEXT, structured_content={"result": None}), None),
        (fastmcp_result(content=TEXT), "one\ntwo"),
        (fastmcp_result(content=IMAGE), IMAGE),
        (fastmcp_result(), None),
        ({"data": [1], "mine": True}, {"data": [1], "mine": True}),
        ({**CALLED, "result": fastmcp_result(data=7)}, 7),
        ({**CALLED, "result": "plain"}, "plain"),
        (None, None),
        (3.5, 3.5),
    ],
)
def test_results_of_every_kind_of_server_are_unwrapped(scripted: Script, sent: Any, returned: Any) -> None:
    with MCPToolClient(base_url=scripted(lambda request: [result(request, sent)])).sync() as client:
        assert client.call_tool("t") == returned


@pytest.mark.parametrize(
    "sent",
    [
        fastmcp_result(content=TEXT, is_error=True),
        {**CALLED, "result": None, "error": {"error_type": "execution_error", "message": "one\ntwo"}},
    ],
)
def test_a_result_that_says_it_is_an_error_raises(scripted: Script, sent: Any) -> None:
    with MCPToolClient(base_url=scripted(lambda request: [result(request, sent)])).sync() as client:
        with pytest.raises(ToolCallError, match="Tool 't' failed: one\ntwo"):
            client.call_tool("t")


def old_server(request: dict[str, Any]) -> Frames:
    """One that knows steps about tools and no `mcp` frames."""
    if request["type"] != "step":
        return [
            {"type": "error", "data": {"message": f"Unknown message type: {request['type']}", "code": "UNKNOWN_TYPE"}}
        ]
    if request["data"] == {"type": "list_tools"}:
        return [observation({"tools": [{"name": "t", "description": "T", "input_schema": {}}]})]
    called = {"tool_name": request["data"]["tool_name"], "result": {"x": request["data"]["arguments"]}, "error": None}
    return [observation(called)]


@pytest.mark.parametrize("refusal", ["no frames", "no method", "no tools"])
def test_a_server_that_knows_tools_only_as_steps_is_asked_by_steps(scripted: Script, refusal: str) -> None:
    types: list[str] = []

    def answer(request: dict[str, Any]) -> Frames:
        types.append(request["type"])
        if request["type"] == "mcp" and refusal == "no method":
            return [failure(request, -32601, f"Method not found: {request['data']['method']}")]
        if request["type"] == "mcp" and refusal == "no tools":
            return [failure(request, -32603, "Environment does not support MCP")]
        return old_server(request)

    with MCPToolClient(base_url=scripted(answer)).sync() as client:
        assert [tool.name for tool in client.list_tools()] == ["t"]
        assert client.call_tool("t", a=1) == {"x": {"a": 1}}
        assert client.has_tool("t")
    assert [kind for kind in types if kind != "close"] == ["mcp", "step", "step"], (
        "it is asked once the other way, not each time"
    )


def test_the_first_call_may_find_out_that_the_server_is_old(scripted: Script) -> None:
    with MCPToolClient(base_url=scripted(old_server)).sync() as client:
        assert client.call_tool_with("t", {"a": 1}, timeout_s=5, on_progress=lambda *_: None) == {"x": {"a": 1}}


def test_a_reply_to_another_request_loses_the_session(scripted: Script) -> None:
    def answer(request: dict[str, Any]) -> Frames:
        request["data"]["id"] += 1
        return [result(request, "not yours")]

    with MCPToolClient(base_url=scripted(answer)).sync() as client:
        with pytest.raises(ProtocolError, match="instead of 1"):
            client.call_tool("t")
        with pytest.raises(SessionLost):
            client.call_tool("t")


@pytest.mark.parametrize("reply", [{"type": "observation", "data": {}}, {"type": "mcp", "data": []}, {"type": "mcp"}])
def test_what_is_no_reply_to_a_call_loses_the_session(scripted: Script, reply: dict[str, Any]) -> None:
    with MCPToolClient(base_url=scripted(lambda _: [reply])).sync() as client:
        with pytest.raises(ProtocolError):
            client.call_tool("t")
        with pytest.raises(SessionLost):
            client.call_tool("t")


def test_a_refused_request_may_be_answered_without_its_id(scripted: Script) -> None:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "Invalid Request", "data": None}}
    with MCPToolClient(base_url=scripted(lambda _: [{"type": "mcp", "data": error}])).sync() as client:
        for _ in range(2):
            with pytest.raises(ToolCallError, match="Invalid Request"):
                client.call_tool("t")


def test_an_error_frame_in_place_of_a_reply_is_a_failed_call_and_the_session_lives(scripted: Script) -> None:
    frame = {"type": "error", "data": {"message": "cannot be sent", "code": "EXECUTION_ERROR"}}
    with MCPToolClient(base_url=scripted(lambda _: [frame])).sync() as client:
        for _ in range(2):
            with pytest.raises(ToolCallError, match=r"Tool 't' failed: .*cannot be sent"):
                client.call_tool("t")


def test_a_full_server_is_named_as_such(scripted: Script) -> None:
    data = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}
    with MCPToolClient(base_url=scripted(lambda _: [{"type": "error", "data": data}])).sync() as client:
        with pytest.raises(OpenEnvError, match="full"):
            client.list_tools()
