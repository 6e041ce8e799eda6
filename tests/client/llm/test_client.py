"""Clients of language models ask as existing ones do, and their failures are typed. Against real servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from openenv.client.llm_client import (
    AnthropicClient,
    LLMClient,
    LLMError,
    LLMResponse,
    OpenAIClient,
    ToolCall,
    create_llm_client,
    openai_messages_to_anthropic,
)
from openenv.core import llm_client as facade
from openenv.env.rubrics import LLMJudge
from openenv.errors import OpenEnvError
from openenv.testing import Script, ScriptedCall, ScriptedModel, StatusFailure, Turn

pytestmark = pytest.mark.anyio

Start = Callable[..., ScriptedModel]
Json = dict[str, Any]

TOOLS: list[Json] = [
    {"name": "look", "description": "Look", "inputSchema": {"type": "object", "properties": {"at": {}}}}
]
LOOKS = Script(
    turns=(
        Turn(text="I look.", calls=(ScriptedCall(name="look", arguments={"at": "it"}),)),
        Turn(text="Seen: ${result}"),
    )
)


class Recorder:
    """A server that keeps what it is sent and answers from a list."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Json]] = []
        self.answers: list[tuple[int, Any]] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                recorder.requests.append((self.path, headers, body))
                status, value = recorder.answers.pop(0)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("retry-after", "0.01")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port

    def says(self, message: Json, status: int = 200) -> None:
        self.answers.append((status, {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    thread = threading.Thread(target=recorder.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield recorder
    recorder.server.shutdown()
    recorder.server.server_close()
    thread.join(10)


async def test_a_prompt_is_sent_as_existing_clients_send_it(recorder: Recorder) -> None:
    async with OpenAIClient("http://127.0.0.1", recorder.port, "m", system_prompt="sys") as client:
        recorder.says({"content": "hello"})
        assert await client.complete("hi") == "hello"
        recorder.says({"content": None})
        assert await client.complete("hi", temperature=0.5, max_tokens=9) == ""
    (path, headers, first), (_, _, second) = recorder.requests
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer not-needed")
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}]
    assert first == {"model": "m", "messages": messages, "max_tokens": 256, "temperature": 0.0}
    assert second == {"model": "m", "messages": messages, "max_tokens": 9, "temperature": 0.5}


async def test_models_that_reason_get_another_limit_and_no_temperature(recorder: Recorder) -> None:
    async with OpenAIClient(
        f"http://127.0.0.1:{recorder.port}/api", None, "m", api_key="k", use_max_completion_tokens=True
    ) as client:
        recorder.says({"content": "hello"})
        await client.complete("hi", max_tokens=5)
    ((path, headers, body),) = recorder.requests
    assert (path, headers["authorization"]) == ("/api/chat/completions", "Bearer k")
    assert body == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}


@pytest.mark.parametrize("kind", [OpenAIClient, AnthropicClient])
async def test_a_conversation_with_tools_goes_round(scripted: Start, kind: Any) -> None:
    model = scripted(LOOKS)
    async with kind("http://127.0.0.1", model.port, "m") as client:
        messages: list[Json] = [{"role": "system", "content": "Look."}, {"role": "user", "content": "what is it?"}]
        answer = await client.complete_with_tools(messages, TOOLS)
        assert answer.content == "I look."
        (call,) = answer.tool_calls
        assert (call.name, call.args) == ("look", {"at": "it"})
        messages += [answer.to_message_dict(), {"role": "tool", "tool_call_id": call.id, "content": "a cat"}]
        assert await client.complete_with_tools(messages, TOOLS) == LLMResponse("Seen: a cat")
        assert await client.complete("title?") == "Scripted answer"
    dialect = "openai_chat" if kind is OpenAIClient else "anthropic"
    assert [(one.dialect, one.turn) for one in model.played()] == [(dialect, 0), (dialect, 1), (dialect, -1)]


async def test_a_judge_works_with_a_client(scripted: Start) -> None:
    model = scripted(Script(turns=(Turn(text="I think it is good.\nScore: 0.8"),)))
    async with OpenAIClient("http://127.0.0.1", model.port, "m") as client:
        judge = LLMJudge("Is {action} a good answer to {observation}?", client)
        assert await judge("yes", "maybe?") == 0.8


async def test_a_call_is_repeated_when_that_may_help(scripted: Start, recorder: Recorder) -> None:
    failures = (StatusFailure(status=529, retry_after_s=0.01), StatusFailure(status=503, retry_after_s=0.01))
    model = scripted(Script(turns=(Turn(text="at last", failures=failures),)))
    async with AnthropicClient("http://127.0.0.1", model.port, "m") as client:
        assert await client.complete("hi") == "at last"
    async with OpenAIClient("http://127.0.0.1", recorder.port, "m") as client:
        for _ in range(3):
            recorder.says({}, status=500)
        with pytest.raises(LLMError, match="answered 500") as caught:
            await client.complete("hi")
        assert (caught.value.status, caught.value.details, len(recorder.requests)) == (500, {"status": 500}, 3)
        recorder.answers.append((400, {"error": {"message": "no such model"}}))
        with pytest.raises(LLMError, match="no such model"):
            await client.complete("hi")
        assert len(recorder.requests) == 4
        recorder.answers += [(200, []), (200, {"choices": []})]
        for text in ("not a JSON object", "without a choice"):
            with pytest.raises(LLMError, match=text):
                await client.complete("hi")
    assert isinstance(caught.value, OpenEnvError)


async def test_arguments_that_are_no_json_are_an_error_and_none_are_empty(recorder: Recorder) -> None:
    async with OpenAIClient("http://127.0.0.1", recorder.port, "m") as client:
        for arguments in ("", "{bad"):
            recorder.says({"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": arguments}}]})
        assert (await client.complete_with_tools([], TOOLS)).tool_calls == [ToolCall("1", "look", {})]
        with pytest.raises(json.JSONDecodeError):
            await client.complete_with_tools([], TOOLS)


async def test_a_prompt_is_answered_whatever_the_tool_calls_beside_the_text_are(recorder: Recorder) -> None:
    recorder.says({"content": "8/10", "tool_calls": [{"function": {"name": "look", "arguments": "{bad"}}]})
    async with OpenAIClient("http://127.0.0.1", recorder.port, "m") as client:
        assert await client.complete("how good?") == "8/10"


def test_one_client_serves_several_event_loops(scripted: Start) -> None:
    model = scripted(Script(turns=(Turn(text="hello"),)))
    client = OpenAIClient("http://127.0.0.1", model.port, "m")

    async def ask() -> str:
        try:
            return await client.complete("hi")
        finally:
            await client.aclose()

    assert [asyncio.run(ask()) for _ in range(2)] == ["hello", "hello"]


def test_addresses_are_put_together_or_refused() -> None:
    def url(endpoint: str, port: int | None) -> str:
        return OpenAIClient(endpoint, port, "m").base_url

    assert url("http://localhost", 8000) == "http://localhost:8000"
    assert url("http://h/v1", 1) == "http://h:1/v1"
    assert url("http://h:90", None) == "http://h:90"
    with pytest.raises(ValueError, match="conflicts"):
        url("http://h:90", 80)
    for endpoint, port in (("h", 80), ("http://h?q=1", 80), ("http://h#f", 80), ("http://h:", None), ("http://h", 0)):
        with pytest.raises(ValueError, match="Invalid endpoint"):
            url(endpoint, port)
    with pytest.raises(ValueError, match=r"http://\*\*\*@h") as caught:
        url("http://me:hidden@h", 80)
    assert "hidden" not in str(caught.value)


def test_providers_have_endpoints_of_their_own() -> None:
    assert create_llm_client("OpenAI", "m", "k").base_url == "https://api.openai.com:443"
    client = create_llm_client("anthropic", "m", "k", system_prompt="s")
    assert isinstance(client, AnthropicClient)
    assert (client.base_url, client.max_tokens, client.system_prompt) == ("https://api.anthropic.com:443", 4096, "s")
    with pytest.raises(ValueError, match="Unsupported provider: 'nope'"):
        create_llm_client("nope", "m", "k")


@pytest.mark.parametrize(("model", "limit"), [("gpt-4o", "max_tokens"), ("o1-mini", "max_completion_tokens")])
async def test_models_of_openai_get_the_limit_that_they_know(recorder: Recorder, model: str, limit: str) -> None:
    client = create_llm_client("openai", model, "k", max_tokens=7)
    assert isinstance(client, OpenAIClient)
    client._address = f"http://127.0.0.1:{recorder.port}"
    recorder.says({"content": "hello"})
    async with client:
        await client.complete("hi")
    ((_, _, body),) = recorder.requests
    assert body[limit] == 7
    assert ("temperature" in body) == (limit == "max_tokens")


async def test_what_a_model_refuses_is_left_out_from_then_on(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    for reason in (
        "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
        "Unsupported value: 'temperature' does not support 0.5 with this model.",
    ):
        recorder.answers.append((400, {"error": {"message": reason}}))
    recorder.says({"content": "hello"})
    recorder.says({"content": "again"})
    async with OpenAIClient("http://127.0.0.1", recorder.port, "m", temperature=0.5) as client:
        assert [await client.complete("hi"), await client.complete("hi")] == ["hello", "again"]
        recorder.answers.append((400, {"error": {"message": "the prompt is too long"}}))
        with pytest.raises(LLMError, match="too long"):
            await client.complete("hi")
    limits = [{key for key in body if "max" in key or key == "temperature"} for _, _, body in recorder.requests]
    assert limits[0] == {"max_tokens", "temperature"}
    assert limits[1] == {"max_completion_tokens", "temperature"}
    assert limits[2:] == [{"max_completion_tokens"}] * 3
    assert "m takes no temperature from now on" in caplog.text


class Api:
    """A client object like those of the providers' packages: keeps what it is called with, returns objects."""

    def __init__(self, reply: Any) -> None:
        self.bodies: list[Json] = []
        self._reply = reply
        self.chat = SimpleNamespace(completions=self)
        self.messages = self

    async def create(self, **body: Any) -> Any:
        self.bodies.append(body)
        return self._reply


async def test_a_client_object_that_is_given_makes_the_calls() -> None:
    function = SimpleNamespace(name="look", arguments='{"at": 1}')
    said = SimpleNamespace(content=None, tool_calls=[SimpleNamespace(id="1", function=function)])
    api = Api(SimpleNamespace(choices=[SimpleNamespace(message=said)]))
    client = OpenAIClient("http://nowhere.invalid", None, "m", client=api)
    assert await client.complete_with_tools([], TOOLS) == LLMResponse("", [ToolCall("1", "look", {"at": 1})])
    assert api.bodies[0]["tools"] == facade._mcp_tools_to_openai(TOOLS)
    assert (api.bodies[0]["max_tokens"], api.bodies[0]["temperature"]) == (256, 0.0)
    blocks = [
        SimpleNamespace(type="text", text="Hm. "),
        SimpleNamespace(type="tool_use", id="2", name="look", input={"at": 2}),
        SimpleNamespace(type="text", text="Yes."),
    ]
    api = Api(SimpleNamespace(content=blocks))
    other = AnthropicClient("http://nowhere.invalid", None, "m", system_prompt="sys")
    other._client = api  # as existing code replaces it
    assert await other.complete_with_tools([], TOOLS) == LLMResponse("Hm. Yes.", [ToolCall("2", "look", {"at": 2})])
    assert await other.complete("hi") == "Hm. Yes."
    assert (api.bodies[0]["system"], api.bodies[1]["messages"]) == ("sys", [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("kind", "package", "name"),
    [
        (OpenAIClient, "openai", "AsyncOpenAI"),
        (OpenAIClient, "openai", "OpenAI"),
        (AnthropicClient, "anthropic", "AsyncAnthropic"),
        (AnthropicClient, "anthropic", "Anthropic"),
    ],
)
async def test_the_packages_of_the_providers_work(scripted: Start, kind: Any, package: str, name: str) -> None:
    sdk = pytest.importorskip(package)
    model = scripted(LOOKS)
    address = f"http://127.0.0.1:{model.port}" + ("/v1" if package == "openai" else "")
    api = getattr(sdk, name)(base_url=address, api_key="k")
    client = kind("http://nowhere.invalid", None, "m", client=api)
    answer = await client.complete_with_tools([{"role": "user", "content": "what is it?"}], TOOLS)
    assert (answer.content, answer.tool_calls[0].args) == ("I look.", {"at": "it"})
    own = kind("http://127.0.0.1", model.port, "m", api_key="k")
    assert type(own._client).__name__ == f"Async{package.capitalize().replace('ai', 'AI')}"
    assert await own.complete("title?") == "Scripted answer"
    await own.aclose()
    closed = api.close()
    if closed is not None:
        await closed


@pytest.mark.skipif(find_spec("anthropic") is not None, reason="the package is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match="pip install anthropic"):
        AnthropicClient("http://h", 1, "m")._client  # noqa: B018


async def test_a_custom_client_needs_one_method() -> None:
    class Parrot(LLMClient):
        async def complete(self, prompt: str, **kwargs: Any) -> str:
            return prompt

    assert Parrot("grpc://h", 1).endpoint == "grpc://h", "only those who speak HTTP check the address"
    parrot = Parrot("http://h", 1)
    assert (await parrot.complete("hi"), parrot.base_url) == ("hi", "http://h:1")
    with pytest.raises(NotImplementedError, match="Parrot does not support tool calling"):
        await parrot.complete_with_tools([], [])


@pytest.mark.parametrize(
    ("schema", "cleaned"),
    [
        (None, {"type": "object", "properties": {}, "required": []}),
        ({}, {"type": "object", "properties": {}}),
        ({"properties": {"x": {}}}, {"properties": {"x": {}}, "type": "object"}),
        (
            {"oneOf": [{"type": "string"}, {"type": "object", "required": ["q"]}]},
            {"type": "object", "required": ["q"], "properties": {}},
        ),
        ({"anyOf": [{"type": "null"}, {"properties": {"q": {}}}]}, {"properties": {"q": {}}, "type": "object"}),
        ({"oneOf": [{"type": "string"}]}, {"type": "object", "properties": {}, "required": []}),
        ({"anyOf": []}, {"type": "object", "properties": {}, "required": []}),
        (
            {"properties": {"q": {}}, "anyOf": [{"required": ["q"]}]},
            {"properties": {"q": {}}, "type": "object"},
        ),
        (
            {"allOf": [{"properties": {"x": {}}, "required": ["x"]}, {"properties": {"y": {}}}]},
            {"type": "object", "properties": {"x": {}, "y": {}}, "required": ["x"]},
        ),
        (
            {"type": "object", "properties": {"a": {"anyOf": [1]}}},
            {"type": "object", "properties": {"a": {"anyOf": [1]}}},
        ),
    ],
)
def test_schemas_of_tools_are_objects_at_the_top(schema: Any, cleaned: Json) -> None:
    assert facade._clean_mcp_schema(schema) == cleaned
    tools = [{"name": "t", "inputSchema": schema}] if schema is not None else [{"name": "t"}]
    assert facade._mcp_tools_to_openai(tools)[0]["function"] == {"name": "t", "description": "", "parameters": cleaned}
    assert facade._mcp_tools_to_anthropic(tools) == [{"name": "t", "description": "", "input_schema": cleaned}]


def test_results_of_tools_join_the_users_last_message_and_change_no_argument() -> None:
    content = [{"type": "text", "text": "look"}]
    sent = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": content},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant"},
    ]
    system, messages = facade._openai_msgs_to_anthropic(sent)
    assert system == "be kind"
    result = {"type": "tool_result", "tool_use_id": "1", "content": "r"}
    assert messages == [{"role": "user", "content": [*content, result]}, {"role": "assistant", "content": ""}]
    assert len(content) == 1


def test_conversations_are_converted_to_anthropics_shape() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    system, messages = openai_messages_to_anthropic(
        [
            {"role": "system", "content": "one"},
            {"role": "system", "content": "two"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "r1"},
            {"role": "tool", "tool_call_id": "2", "content": "r2"},
            {"role": "assistant", "content": "end"},
        ]
    )
    assert system == "one\n\ntwo"
    assert messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "r1"},
                {"type": "tool_result", "tool_use_id": "2", "content": "r2"},
            ],
        },
        {"role": "assistant", "content": "end"},
    ]
