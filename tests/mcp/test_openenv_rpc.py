"""OpenEnv's own JSON-RPC on `POST /mcp`, `WS /mcp` and in the `mcp` frames of `/ws`: codes, shapes, order of checks,
sessions that clients create and close, and how it lives beside standard MCP on the same path."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from environments import Idle
from openenv.core.env_server.http_server import create_app
from openenv.protocol.tool_messages import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)
from openenv.types import Action, Observation
from servers import Serve

Own = Callable[..., Any]


def request(method: str, **fields: Any) -> dict[str, Any]:
    """A request."""
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}, **fields}


def refused(response: Any, code: int, request_id: Any = 1) -> str:
    """Check the shape of an error and its code; return its message."""
    assert response.keys() == {"jsonrpc", "id", "error"}, response
    assert response["error"].keys() == {"code", "message", "data"}
    assert (response["jsonrpc"], response["id"], response["error"]["code"]) == ("2.0", request_id, code), response
    message: str = response["error"]["message"]
    return message


@pytest.fixture(params=["POST /mcp", "WS /mcp", "mcp frames of /ws"])
def ask(request: pytest.FixtureRequest, wire: Any, open_socket: Any) -> Callable[[str], Callable[[Any], Any]]:
    """Send requests to a server over one of the three transports."""

    def connect(url: str) -> Callable[[Any], Any]:
        if request.param == "POST /mcp":
            client = wire(url)
            return lambda body: client.post(body).message
        socket = open_socket(url, "/mcp" if request.param == "WS /mcp" else "/ws")
        ask_socket: Callable[[Any], Any] = socket.ask
        return ask_socket

    return connect


# -- requests and refusals, the same everywhere -------------------------------------------------------------------


def test_a_list_shows_every_field_of_every_tool(server: Any, ask: Any) -> None:
    response = ask(server.url)(request("tools/list", id="list"))
    assert response.keys() == {"jsonrpc", "id", "result"}
    assert response["id"] == "list"
    tools = {tool["name"]: tool for tool in response["result"]["tools"]}
    fields = {
        "name",
        "title",
        "description",
        "inputSchema",
        "outputSchema",
        "icons",
        "annotations",
        "meta",
        "execution",
    }
    assert all(tool.keys() == fields for tool in tools.values())
    assert tools["echo"]["description"] == "Say it again."
    assert "peek" in tools
    assert "ship" not in tools


def test_a_call_returns_a_result_in_snake_case(server: Any, ask: Any) -> None:
    response = ask(server.url)(request("tools/call", params={"name": "echo", "arguments": {"message": "a"}}))
    assert response["result"].keys() == {"content", "structured_content", "meta", "data", "is_error"}
    assert response["result"]["data"] == response["result"]["structured_content"] == {"message": "a"}
    assert response["result"]["is_error"] is False
    (block,) = response["result"]["content"]
    assert block == {"type": "text", "text": '{"message":"a"}', "annotations": None, "meta": None}


def test_a_request_without_id_is_answered_too(server: Any, ask: Any) -> None:
    response = ask(server.url)({"jsonrpc": "2.0", "method": "tools/list"})
    assert response["id"] is None
    assert response["result"]["tools"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "jsonrpc: Field required; method: Field required"),
        ({"jsonrpc": "2.0", "id": 1}, "method: Field required"),
        ({"jsonrpc": "1.0", "id": 1, "method": "tools/list"}, "jsonrpc: Input should be '2.0'"),
        ({"id": 1, "method": "tools/list"}, "jsonrpc: Field required"),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "extra": 1}, "extra: Extra inputs are not permitted"),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": [1]}, "params: Input should be a valid dict"),
        ({"jsonrpc": "2.0", "id": 1.5, "method": "tools/list"}, "id.int: Input should be a valid integer"),
        ({"jsonrpc": "2.0", "id": {}, "method": "tools/list"}, "id.str: Input should be a valid string"),
        ({"jsonrpc": "2.0", "id": 1, "method": 5}, "method: Input should be a valid string"),
    ],
)
def test_an_invalid_request_is_refused_without_its_id(server: Any, ask: Any, body: Any, problem: str) -> None:
    send = ask(server.url)
    text = refused(send(body), -32600, None)
    assert text.startswith("Invalid Request: ")
    assert problem in text
    assert "result" in send(request("tools/list"))


def test_the_text_about_an_invalid_request_has_a_limit(server: Any, ask: Any) -> None:
    body = request("tools/list") | {f"{number} {'x' * 500}": 1 for number in range(100)}
    text = refused(ask(server.url)(body), -32600, None)
    assert text.startswith("Invalid Request: 0 xxx")
    assert len(text) < 1100


@pytest.mark.parametrize("method", ["tools/other", "resources/list", "prompts/get", "openenv/session/other", ""])
def test_an_unknown_method_is_named(server: Any, ask: Any, method: str) -> None:
    assert refused(ask(server.url)(request(method)), -32601) == f"Method not found: {method}"


@pytest.mark.parametrize("params", [{}, {"arguments": {}}, {"name": None}, {"name": ""}])
def test_a_call_needs_a_name(server: Any, ask: Any, params: Any) -> None:
    assert refused(ask(server.url)(request("tools/call", params=params)), -32602) == "Missing 'name' in params"


@pytest.mark.parametrize(
    "params", [{"arguments": [1]}, {"timeout_s": 0}, {"timeout_s": "soon"}, {"arguments": "message"}]
)
def test_what_belongs_to_a_call_is_checked(server: Any, ask: Any, params: Any) -> None:
    refused(ask(server.url)(request("tools/call", params={"name": "count", **params})), -32602)


@pytest.mark.parametrize("timeout_s", [60, 0.5e9, 1e300])
@pytest.mark.parametrize(("tool", "data"), [("count", 1), ("work", "worked")])
def test_any_limit_can_be_asked_for(server: Any, ask: Any, timeout_s: float, tool: str, data: Any) -> None:
    response = ask(server.url)(request("tools/call", params={"name": tool, "timeout_s": timeout_s}))
    assert response["result"]["data"] == data


def test_an_unknown_tool_is_named(server: Any, ask: Any) -> None:
    send = ask(server.url)
    assert refused(send(request("tools/call", params={"name": "nothing"})), -32603) == "Unknown tool: 'nothing'"
    assert refused(send(request("tools/call", params={"name": "ship"})), -32603) == "Unknown tool: 'ship'"


def test_a_failing_tool_is_an_error_and_never_a_result(server: Any, ask: Any) -> None:
    send = ask(server.url)
    assert "bang" in refused(send(request("tools/call", params={"name": "boom"})), -32603)
    refused(send(request("tools/call", params={"name": "echo", "arguments": {"other": 1}})), -32603)


def test_calls_are_no_steps(server: Any, ask: Any) -> None:
    send = ask(server.url)
    send(request("tools/call", params={"name": "count"}))
    assert server.watch.steps == 0
    assert server.watch.resets == 0


# -- POST ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{nope", b"", b"\xff", b"[]", b"[{}]", b"7", b'"text"', b"null"])
def test_what_is_no_object_is_a_parse_error(server: Any, wire: Any, body: bytes) -> None:
    answer = wire(server.url).post(body)
    assert answer.status == 200
    refused(answer.message, -32700, None)


def test_a_request_without_session_runs_on_an_environment_of_its_own(server: Any, wire: Any) -> None:
    client = wire(server.url)
    assert [client.own("tools/call", {"name": "count"})["result"]["data"] for _ in range(2)] == [1, 1]
    assert server.manager.active == 0
    server.wait_for(lambda: server.watch.alive == 0)


def test_a_created_session_keeps_its_state_until_it_is_closed(server: Any, wire: Any) -> None:
    client = wire(server.url)
    created = client.own("openenv/session/create")
    name = created["result"]["session_id"]
    assert created["result"] == {"session_id": name}
    assert str(uuid.UUID(name)) == name
    call = {"name": "count", "session_id": name}
    assert [client.own("tools/call", call)["result"]["data"] for _ in range(3)] == [1, 2, 3]
    assert client.own("tools/list", {"session_id": name})["result"]["tools"]
    assert client.own("openenv/session/close", {"session_id": name})["result"] == {"session_id": name, "closed": True}
    server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)
    message = refused(client.own("tools/call", call, id=1), -32602)
    assert message.startswith(f"Unknown session_id: {name}")
    refused(client.own("openenv/session/close", {"session_id": name}, id=1), -32602)


def test_a_session_must_exist(server: Any, wire: Any) -> None:
    client = wire(server.url)
    for method in ("tools/list", "tools/call", "openenv/session/close"):
        response = client.own(method, {"name": "count", "session_id": "nobody"}, id=1)
        assert refused(response, -32602) == "Unknown session_id: nobody"


@pytest.mark.parametrize("params", [{}, {"session_id": None}])
def test_closing_needs_a_session(server: Any, wire: Any, params: Any) -> None:
    response = wire(server.url).own("openenv/session/close", params, id=1)
    assert refused(response, -32602) == "Missing 'session_id' in params"


def test_the_name_of_a_tool_is_checked_before_the_session(server: Any, wire: Any) -> None:
    response = wire(server.url).own("tools/call", {"session_id": "nobody"}, id=1)
    assert refused(response, -32602) == "Missing 'name' in params"


def test_creating_without_a_free_slot_is_refused_with_numbers(desk: Any, wire: Any) -> None:
    client = wire(desk(sessions=1).url)
    name = client.own("openenv/session/create")["result"]["session_id"]
    full = client.own("openenv/session/create", id=1)
    refused(full, -32000)
    assert full["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
    assert client.own("tools/call", {"name": "count"})["result"]["data"] == 1, "single requests need no slot"
    client.own("openenv/session/close", {"session_id": name})
    assert "result" in client.own("openenv/session/create")


def test_an_unused_session_ends_with_its_lease(desk: Any, wire: Any) -> None:
    server = desk(sessions=1, lease_s=0.2)
    client = wire(server.url)
    name = client.own("openenv/session/create")["result"]["session_id"]
    server.wait_for(lambda: server.manager.active == 0)
    response = client.own("tools/call", {"name": "count", "session_id": name}, id=1)
    assert refused(response, -32602) == f"Unknown session_id: {name} (expired)"
    assert "result" in client.own("openenv/session/create")


def test_an_environment_that_cannot_be_built_is_a_server_error(serve: Serve, wire: Any) -> None:
    def factory() -> Any:
        raise RuntimeError("no room in here")

    client = wire(serve(create_app(factory, CallToolAction, CallToolObservation)).url)
    for method in ("openenv/session/create", "tools/list"):
        response = client.own(method, id=1)
        refused(response, -32000)
        assert response["error"]["data"]["factory_name"] == "factory"


def test_hanging_up_cancels_a_call(server: Any, wire: Any) -> None:
    client = wire(server.url)
    name = client.own("openenv/session/create")["result"]["session_id"]
    body = request("tools/call", params={"name": "wait", "session_id": name})
    with pytest.raises(Exception, match="timed out"):
        client.http.post("/mcp", json=body, timeout=1.5)
    assert server.watch.cancelled.wait(30)
    assert client.own("tools/call", {"name": "count", "session_id": name})["result"]["data"] == 1


# -- sockets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp", "/ws"])
def test_a_socket_has_a_session_of_its_own(server: Any, open_socket: Any, path: str) -> None:
    socket = open_socket(server.url, path)
    name = socket.own("openenv/session/create")["result"]["session_id"]
    assert name == server.session.id
    calls = [socket.own("tools/call", {"name": "count", "session_id": "ignored"})["result"]["data"] for _ in range(3)]
    assert calls == [1, 2, 3]
    refused(socket.own("openenv/session/close", {"session_id": name}), -32600)
    refused(socket.own("openenv/session/close", {}), -32602)
    socket.socket.close()
    server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)


def test_a_socket_tells_progress_before_the_result(server: Any, ask: Any) -> None:
    send = ask(server.url)
    params = {"name": "work", "arguments": {"steps": 2}, "_meta": {"progressToken": "t"}}
    first = send(request("tools/call", params=params))
    if "result" in first:
        return  # HTTP has one message for an answer
    assert first["method"] == "notifications/progress"
    assert first["params"] == {"progressToken": "t", "progress": 1, "total": 2, "message": "step 1"}


def test_the_result_follows_the_progress(server: Any, open_socket: Any) -> None:
    socket = open_socket(server.url)
    socket.send(request("tools/call", params={"name": "work", "_meta": {"progressToken": 0}}))
    messages = [socket.receive() for _ in range(4)]
    assert [message.get("method") for message in messages] == ["notifications/progress"] * 3 + [None]
    assert messages[-1]["result"]["data"] == "worked"


@pytest.mark.parametrize("text", ["{nope", "[]", "7"])
def test_a_socket_survives_what_is_no_object(server: Any, open_socket: Any, text: str) -> None:
    socket = open_socket(server.url)
    socket.socket.send(text)
    refused(socket.receive(), -32700, None)
    assert socket.own("tools/call", {"name": "count"})["result"]["data"] == 1


def test_a_socket_without_a_free_slot_gets_the_error_and_is_closed(desk: Any, open_socket: Any) -> None:
    server = desk(sessions=1)
    first = open_socket(server.url)
    assert first.own("tools/list")["result"]["tools"]
    second = open_socket(server.url)
    response = second.receive()
    refused(response, -32000, None)
    assert response["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
    with pytest.raises(ConnectionClosed) as closed:
        second.receive()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1000


def test_hanging_up_a_socket_cancels_its_call_and_frees_its_slot(server: Any, open_socket: Any) -> None:
    socket = open_socket(server.url)
    socket.send(request("tools/call", params={"name": "wait"}))
    assert server.watch.entered.wait(30)
    socket.socket.close()
    assert server.watch.cancelled.wait(30)
    server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_closing_a_session_waits_for_the_socket_that_is_attached(
    server: Any, wire: Any, open_socket: Any, path: str
) -> None:
    client = wire(server.url)
    name = client.own("openenv/session/create")["result"]["session_id"]
    client.own("tools/call", {"name": "count", "session_id": name})
    socket = open_socket(server.url, f"{path}?session_id={name}")
    assert socket.own("tools/call", {"name": "count"})["result"]["data"] == 2, "it is the same environment"
    closing = client.own("openenv/session/close", {"session_id": name})["result"]
    assert closing == {"session_id": name, "closed": False, "closing": True}
    assert socket.own("tools/call", {"name": "count"})["result"]["data"] == 3
    socket.socket.close()
    server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)


def test_gym_frames_and_rpc_frames_share_a_connection(server: Any, open_socket: Any) -> None:
    socket = open_socket(server.url, "/ws")
    socket.socket.send('{"type": "reset", "data": {"seed": 5}}')
    assert '"type":"observation"' in socket.socket.recv(10).replace(" ", "")
    assert socket.own("tools/call", {"name": "count"})["result"]["data"] == 6
    socket.socket.send('{"type": "state"}')
    assert '"step_count":0' in socket.socket.recv(10).replace(" ", "")


# -- environments with other tools, or none -----------------------------------------------------------------------


class Stepper(Idle):
    """An environment that takes tool actions and has no FastMCP server."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(
                tools=[Tool(name="knock", description="Knock.", input_schema={"type": "object"})]
            )
        if action.tool_name != "knock":
            raise ValueError(f"no tool {action.tool_name}")
        return CallToolObservation(tool_name=action.tool_name, result={"heard": action.arguments})


def test_an_environment_without_tools_says_so(serve: Serve, ask: Any) -> None:
    send = ask(serve(create_app(Idle, Action, Observation)).url)
    for method, params in (("tools/list", {}), ("tools/call", {"name": "any"})):
        assert refused(send(request(method, params=params)), -32603) == "Environment does not support MCP"
    assert refused(send(request("tools/call")), -32602) == "Missing 'name' in params"


def test_standard_clients_learn_that_there_are_no_tools(serve: Serve, uninitialized: Any, modern: Any) -> None:
    running = serve(create_app(Idle, Action, Observation))
    answer = uninitialized(running.url).initialize()
    assert (answer.status, answer.error["code"]) == (200, -32603)
    assert answer.error["message"] == "Environment does not support MCP"
    for answer in (modern(running.url).call("any"), modern(running.url).request("tools/list")):
        assert (answer.status, answer.error["code"]) == (200, -32603)
    assert running.manager.active == 0


def test_tools_that_are_only_actions_can_be_listed_and_called(serve: Serve, ask: Any) -> None:
    send = ask(serve(create_app(Stepper, CallToolAction, CallToolObservation)).url)
    (tool,) = send(request("tools/list"))["result"]["tools"]
    assert tool == {"name": "knock", "description": "Knock.", "input_schema": {"type": "object"}}
    result = send(request("tools/call", params={"name": "knock", "arguments": {"times": 2}}))["result"]
    assert (result["tool_name"], result["result"]) == ("knock", {"heard": {"times": 2}})
    refused(send(request("tools/call", params={"name": "ring"})), -32603)


def test_standard_clients_use_tools_that_are_only_actions(serve: Serve, handshake: Any) -> None:
    client = handshake(serve(create_app(Stepper, CallToolAction, CallToolObservation)).url)
    (tool,) = client.request("tools/list").result["tools"]
    assert tool == {"name": "knock", "description": "Knock.", "inputSchema": {"type": "object"}}
    assert client.call("knock", {"times": 2}).text == '{"heard":{"times":2}}'
    assert client.call("ring").result["isError"] is True


# -- beside standard MCP ------------------------------------------------------------------------------------------


def test_the_same_path_serves_old_and_new_clients_at_once(
    server: Any, wire: Any, handshake: Any, modern: Any, open_socket: Any
) -> None:
    old, middle, new, socket = wire(server.url), handshake(server.url), modern(server.url), open_socket(server.url)
    name = old.own("openenv/session/create")["result"]["session_id"]
    for expected in (1, 2):
        assert old.own("tools/call", {"name": "count", "session_id": name})["result"]["data"] == expected
        assert middle.call("count").text == str(expected)
        assert new.call("count").text == str(expected)
        assert socket.own("tools/call", {"name": "count"})["result"]["data"] == expected
    assert server.manager.active == 4


def test_own_session_methods_work_for_clients_that_accept_events(server: Any, wire: Any) -> None:
    client = wire(server.url)
    both = {"accept": "application/json, text/event-stream"}
    name = client.post(request("openenv/session/create"), both).result["session_id"]
    closed = client.post(request("openenv/session/close", params={"session_id": name}), both)
    assert closed.result["closed"] is True


def test_a_session_created_by_one_method_is_a_handle_for_the_others(server: Any, wire: Any, modern: Any) -> None:
    old = wire(server.url)
    name = old.own("openenv/session/create")["result"]["session_id"]
    old.own("tools/call", {"name": "count", "session_id": name})
    assert modern(server.url).call("count", meta={"openenv/session": name}).text == "2"
