"""MCP with a handshake: tools, resources, prompts and completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from waiting import in_background

# -- tools ------------------------------------------------------------------------------------------------------------


def test_tools_are_listed_in_camel_case_without_nulls(server: Any, handshake: Any) -> None:
    tools = {tool["name"]: tool for tool in handshake(server.url).request("tools/list").result["tools"]}
    assert set(tools) >= {"echo", "count", "work", "talk", "boom", "thing", "big", "wait", "spin"}
    echo = tools["echo"]
    assert echo["description"] == "Say it again."
    assert echo["inputSchema"]["properties"]["times"]["default"] == 1
    assert echo["outputSchema"]["type"] == "object"
    assert None not in echo.values()


def test_tools_of_the_other_mode_are_neither_listed_nor_called(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    names = [tool["name"] for tool in client.request("tools/list").result["tools"]]
    assert "peek" in names
    assert "ship" not in names
    assert client.call("peek").result["structuredContent"] == {"result": 0}
    assert client.call("ship").error["code"] == -32602


def test_a_long_list_comes_in_pages(desk: Any, handshake: Any) -> None:
    client = handshake(desk(extra_tools=220).url)
    names: list[str] = []
    pages = 0
    params: dict[str, Any] = {}
    while True:
        result = client.request("tools/list", params).result
        pages += 1
        names += [tool["name"] for tool in result["tools"]]
        assert len(result["tools"]) <= 100
        if "nextCursor" not in result:
            break
        params = {"cursor": result["nextCursor"]}
    assert pages == 3
    assert len(names) == len(set(names)) == 220 + 12
    assert names[-1] != names[0]


@pytest.mark.parametrize("cursor", ["nonsense", "", 7, "OTk5OTk=", "LTE=", {"a": 1}])
def test_an_invalid_cursor_is_refused(server: Any, handshake: Any, cursor: Any) -> None:
    assert handshake(server.url).request("tools/list", {"cursor": cursor}).error["code"] == -32602


def test_a_result_has_content_and_structure(server: Any, handshake: Any) -> None:
    answer = handshake(server.url).call("echo", {"message": "ab", "times": 2})
    assert (answer.status, answer.is_stream) == (200, False)
    assert answer.result["isError"] is False
    assert answer.result["structuredContent"] == {"message": "abab"}
    assert json.loads(answer.text) == {"message": "abab"}
    assert answer.result.keys() <= {"content", "structuredContent", "isError", "_meta"}


def test_state_stays_within_a_session_and_is_not_shared(server: Any, handshake: Any) -> None:
    one, other = handshake(server.url), handshake(server.url)
    assert [one.call("count").result["structuredContent"]["result"] for _ in range(3)] == [1, 2, 3]
    assert other.call("count").result["structuredContent"] == {"result": 1}
    assert server.manager.active == 2


@pytest.mark.parametrize(
    "params", [{}, {"name": 7}, {"name": ""}, {"name": "echo", "arguments": [1]}, {"name": "no such tool"}]
)
def test_a_call_that_is_wrong_as_a_request_is_a_json_rpc_error(server: Any, handshake: Any, params: Any) -> None:
    answer = handshake(server.url).request("tools/call", params)
    assert (answer.status, answer.error["code"]) == (200, -32602)


def test_calls_of_one_session_take_turns_and_lists_do_not_wait(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    waiting = in_background(lambda: client.call("wait", id="long"))
    assert server.watch.entered.wait(30)
    assert client.request("tools/list").result["tools"]
    assert client.request("ping").result == {}
    counted = in_background(lambda: client.call("count"))
    client.notify("notifications/cancelled", {"requestId": "long"})
    assert waiting().error["code"] == -32800
    assert counted().result["structuredContent"] == {"result": 1}


# -- resources, prompts, completions ----------------------------------------------------------------------------------


def test_resources_are_passed_through(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    assert [found["uri"] for found in client.request("resources/list").result["resources"]] == ["note://today"]
    templates = client.request("resources/templates/list").result["resourceTemplates"]
    assert [found["uriTemplate"] for found in templates] == ["note://{day}/text"]
    (content,) = client.request("resources/read", {"uri": "note://today"}).result["contents"]
    assert (content["uri"], content["text"]) == ("note://today", "hello")
    (content,) = client.request("resources/read", {"uri": "note://monday/text"}).result["contents"]
    assert content["text"] == "note of monday"


def test_a_resource_that_is_not_there_is_an_error(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    error = client.request("resources/read", {"uri": "note://nowhere"}).error
    assert (error["code"], error["data"]) == (-32002, {"uri": "note://nowhere"})
    assert client.request("resources/read", {}).error["code"] == -32602


def test_prompts_are_passed_through(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    (prompt,) = client.request("prompts/list").result["prompts"]
    assert (prompt["name"], prompt["description"]) == ("greet", "Greet somebody.")
    (message,) = client.request("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}).result["messages"]
    assert (message["role"], message["content"]["text"]) == ("user", "Hello Ada")
    for params in ({}, {"name": "nobody"}):
        assert client.request("prompts/get", params).error["code"] == -32602
    assert client.request("prompts/get", {"name": "greet"}).error["code"] in (-32602, -32603)


def test_a_server_without_completions_has_none_to_offer(server: Any, handshake: Any) -> None:
    client = handshake(server.url)
    params = {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "name", "value": "A"}}
    assert client.request("completion/complete", params).result["completion"]["values"] == []
    for bad in ({}, {"ref": {"type": "ref/other"}, "argument": {}}, {"ref": 1, "argument": 2}):
        assert client.request("completion/complete", bad).error["code"] == -32602
