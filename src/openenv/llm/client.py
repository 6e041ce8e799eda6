"""Clients of language models: OpenAI's chat completions and Anthropic's messages, over plain HTTP.

Knows the two dialects. Needs no provider's package.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import httpx2
from typing_extensions import Self

from ..errors import OpenEnvError

# ---- messages and tools, from one provider's shape to another's ----
#
# Conversations are in OpenAI's shape and tools in MCP's unless a name says otherwise.


Json = dict[str, Any]


@dataclass
class ToolCall:
    """A tool call that a model requests."""

    id: str
    name: str
    args: Json


@dataclass
class LLMResponse:
    """What a model said: a text, tool calls, or both."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_message_dict(self) -> Json:
        """Return the answer as a message of OpenAI's shape, to be added to the conversation."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.args)}}
                for call in self.tool_calls
            ]
        return message


def clean_mcp_schema(schema: Any) -> Json:
    """Return a tool's schema as model providers accept it: an object at the top, no alternatives there.

    Of alternatives, the first that is an object is taken; parts of an `allOf` become one.
    """
    if not isinstance(schema, Mapping):
        return {"type": "object", "properties": {}, "required": []}
    cleaned = dict(schema)
    for kind in ("oneOf", "anyOf"):
        variants = cleaned.pop(kind, None)
        if variants:
            objects = [one for one in variants if isinstance(one, Mapping) and _is_object(one)]
            cleaned = {**cleaned, **(objects[0] if objects else {})}
    parts = cleaned.pop("allOf", None)
    if parts:
        cleaned = _merged(cleaned, parts)
    if cleaned.setdefault("type", "object") == "object":
        cleaned.setdefault("properties", {})
    return cleaned


def mcp_tools_to_openai(mcp_tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return tools as OpenAI's chat completions take them."""
    return [{"type": "function", "function": _tool(tool, schema="parameters")} for tool in mcp_tools]


def mcp_tools_to_anthropic(mcp_tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return tools as Anthropic's messages take them."""
    return [_tool(tool, schema="input_schema") for tool in mcp_tools]


def _tool(tool: Mapping[str, Any], *, schema: str) -> Json:
    """Return a tool with its schema under another key; MCP's own is `inputSchema`, our `Tool` has `input_schema`."""
    parameters = clean_mcp_schema(tool.get("inputSchema", tool.get("input_schema")))
    return {"name": tool["name"], "description": tool.get("description") or "", schema: parameters}


def openai_messages_to_anthropic(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Json]]:
    """Return the system's text and the other messages as Anthropic takes them; results of tools are the user's."""
    system: list[str] = []
    others: list[Json] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            system.append(content or "")
        elif role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", ""), "content": content or ""}
            if others and _holds_results(others[-1]):
                others[-1]["content"].append(block)
            else:
                others.append({"role": "user", "content": [block]})
        elif role == "assistant" and message.get("tool_calls"):
            blocks: list[Json] = [{"type": "text", "text": content}] if content else []
            blocks += [_tool_use(call) for call in message["tool_calls"]]
            others.append({"role": "assistant", "content": blocks})
        else:
            others.append({"role": role, "content": content})
    return "\n\n".join(system), others


def arguments_of(text: Any) -> Json:
    """Return a call's arguments, which come as JSON; none at all is an empty object.

    Raises:
        json.JSONDecodeError: The model wrote no JSON.
    """
    if isinstance(text, Mapping):
        return dict(text)
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {"value": value}


def _is_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object" or "properties" in schema


def _merged(base: Json, parts: Sequence[Any]) -> Json:
    merged = dict(base)
    properties, required = dict(base.get("properties", {})), list(base.get("required", []))
    for part in parts:
        if isinstance(part, Mapping):
            properties.update(part.get("properties", {}))
            required += [name for name in part.get("required", []) if name not in required]
    merged.update(type="object", properties=properties)
    if required:
        merged["required"] = required
    return merged


def _holds_results(message: Json) -> bool:
    content = message["content"]
    return message["role"] == "user" and isinstance(content, list) and content[-1].get("type") == "tool_result"


def _tool_use(call: Mapping[str, Any]) -> Json:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": arguments_of(function["arguments"]),
    }


_ATTEMPTS = 3
_LONGEST_WAIT_S = 30.0
_WORTH_REPEATING = frozenset({408, 409, 429, 500, 502, 503, 504, 529})


class LLMError(OpenEnvError, RuntimeError):
    """A model endpoint could not be reached or refused the request; `status` is its answer, if there was one."""

    code = "LLM_ERROR"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message, details={"status": status})
        self.status = status


class LLMClient(ABC):
    """A model behind an address.

    Args:
        endpoint: The address, with `http://` or `https://`.
        port: The port; None leaves the address as it is.

    Raises:
        ValueError: The address is none, or names another port.
    """

    def __init__(self, endpoint: str, port: int | None = None) -> None:
        self.endpoint = endpoint
        self.port = port
        self._address = _address(endpoint, port)

    @property
    def base_url(self) -> str:
        """The address with its port."""
        return self._address

    @abstractmethod
    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """Return the model's answer to a prompt."""

    async def complete_with_tools(self, messages: list[Json], tools: list[Json], **kwargs: Any) -> LLMResponse:
        """Return the model's next message in a conversation of OpenAI's shape, with tools of MCP's.

        Raises:
            NotImplementedError: This client cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support tool calling")


class _HTTPClient(LLMClient):
    """A client that posts JSON; one connection pool per event loop."""

    def __init__(
        self,
        endpoint: str,
        port: int | None,
        model: str,
        api_key: str | None = None,
        system_prompt: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
    ) -> None:
        super().__init__(endpoint, port)
        self.model = model
        self.system_prompt = system_prompt
        self.temperature = temperature
        self.max_tokens = max_tokens
        self._api_key = api_key
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = WeakKeyDictionary()

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """Return the model's answer to a prompt.

        Raises:
            LLMError: The endpoint failed.
        """
        system: list[Json] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return (await self._request([*system, {"role": "user", "content": prompt}], [], kwargs))[0]

    async def complete_with_tools(self, messages: list[Json], tools: list[Json], **kwargs: Any) -> LLMResponse:
        """Return the model's next message.

        Raises:
            LLMError: The endpoint failed.
            json.JSONDecodeError: The model's arguments are no JSON.
        """
        text, calls = await self._request(messages, tools, kwargs)
        return LLMResponse(text, [self._tool_call(call) for call in calls])

    @abstractmethod
    async def _request(self, messages: list[Json], tools: list[Json], options: Json) -> tuple[str, list[Json]]:
        """Post a conversation of OpenAI's shape in the endpoint's dialect; return the answer's text and tool calls."""

    @staticmethod
    @abstractmethod
    def _tool_call(call: Json) -> ToolCall:
        """Read a tool call of the endpoint's dialect."""

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _post(self, path: str, body: Json, headers: Mapping[str, str]) -> Json:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = httpx2.AsyncClient(timeout=httpx2.Timeout(600, connect=20))
        # `/v1` comes before the route unless the endpoint has a path of its own, such as `/api/v3`.
        url = f"{self._address}{path}" if urlsplit(self._address).path else f"{self._address}/v1{path}"
        for attempt in range(1, _ATTEMPTS + 1):
            wait_s = 0.5 * 2**attempt
            try:
                response = await pool.post(url, json=body, headers=dict(headers))
            except httpx2.HTTPError as exc:
                if attempt == _ATTEMPTS:
                    raise LLMError(f"{url} cannot be reached: {exc or type(exc).__name__}") from exc
            else:
                if response.is_success:
                    return _object(response, url)
                if attempt == _ATTEMPTS or response.status_code not in _WORTH_REPEATING:
                    text = f"{url} answered {response.status_code}: {_reason(response)}"
                    raise LLMError(text, status=response.status_code)
                wait_s = _retry_after(response, default=wait_s)
            await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
        raise AssertionError("unreachable")


class OpenAIClient(_HTTPClient):
    """Speaks chat completions: OpenAI itself, vLLM, SGLang and all that answer like them.

    Args:
        endpoint: The address; `/v1` is added when it has no path.
        port: The port; None leaves the address as it is.
        model: The model's name.
        api_key: The key; None where none is needed.
        system_prompt: What `complete` puts before a prompt.
        temperature: By default, for all calls.
        max_tokens: By default, for all calls.
        use_max_completion_tokens: For models that know this name only, and no temperature.
    """

    def __init__(
        self,
        endpoint: str,
        port: int | None,
        model: str,
        api_key: str | None = None,
        system_prompt: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
        use_max_completion_tokens: bool = False,
    ) -> None:
        super().__init__(endpoint, port, model, api_key, system_prompt, temperature, max_tokens)
        self._reasons = use_max_completion_tokens

    async def _request(self, messages: list[Json], tools: list[Json], options: Json) -> tuple[str, list[Json]]:
        body: Json = {"model": self.model, "messages": messages, **options}
        limit = body.pop("max_tokens", body.pop("max_completion_tokens", self.max_tokens))
        body["max_completion_tokens" if self._reasons else "max_tokens"] = limit
        if not self._reasons:
            body.setdefault("temperature", self.temperature)
        if tools:
            body["tools"] = mcp_tools_to_openai(tools)
        headers = {"authorization": f"Bearer {self._api_key or 'not-needed'}"}
        reply = await self._post("/chat/completions", body, headers)
        choices = reply.get("choices")
        if not choices:
            raise LLMError(f"{self.base_url} answered without a choice: {str(reply)[:200]}")
        message: Json = choices[0].get("message") or {}
        return message.get("content") or "", message.get("tool_calls") or []

    @staticmethod
    def _tool_call(call: Json) -> ToolCall:
        return ToolCall(call["id"], call["function"]["name"], arguments_of(call["function"].get("arguments")))


class AnthropicClient(_HTTPClient):
    """Speaks Anthropic's messages; takes and returns conversations of OpenAI's shape.

    Args:
        endpoint: The address; `/v1` is added when it has no path.
        port: The port; None leaves the address as it is.
        model: The model's name.
        api_key: The key.
        system_prompt: What comes before every conversation that has no system message of its own.
        temperature: By default, for all calls.
        max_tokens: By default, for all calls.
    """

    async def _request(self, messages: list[Json], tools: list[Json], options: Json) -> tuple[str, list[Json]]:
        system, others = openai_messages_to_anthropic(messages)
        body: Json = {"max_tokens": self.max_tokens, "temperature": self.temperature, **options}
        body |= {"model": self.model, "messages": others}
        if system or self.system_prompt:
            body["system"] = system or self.system_prompt
        if tools:
            body["tools"] = mcp_tools_to_anthropic(tools)
        headers = {"x-api-key": self._api_key or "not-needed", "anthropic-version": "2023-06-01"}
        reply = await self._post("/messages", body, headers)
        blocks = reply.get("content") or []
        text = "".join(block["text"] for block in blocks if block.get("type") == "text")
        return text, [block for block in blocks if block.get("type") == "tool_use"]

    @staticmethod
    def _tool_call(call: Json) -> ToolCall:
        return ToolCall(call["id"], call["name"], dict(call.get("input") or {}))


_PROVIDERS: Mapping[str, tuple[type[OpenAIClient] | type[AnthropicClient], str]] = {
    "anthropic": (AnthropicClient, "https://api.anthropic.com"),
    "openai": (OpenAIClient, "https://api.openai.com"),
}


def create_llm_client(
    provider: str,
    model: str,
    api_key: str,
    *,
    system_prompt: str | None = None,
    temperature: float = 0.0,
    max_tokens: int = 4096,
) -> LLMClient:
    """Return a client of a provider's own endpoint.

    Args:
        provider: `openai` or `anthropic`.
        model: The model's name.
        api_key: The key.

    Raises:
        ValueError: There is no such provider.
    """
    try:
        kind, endpoint = _PROVIDERS[provider.lower()]
    except KeyError:
        raise ValueError(f"Unsupported provider: {provider!r}. Supported: {sorted(_PROVIDERS)}") from None
    return kind(
        endpoint,
        443,
        model,
        api_key=api_key,
        system_prompt=system_prompt,
        temperature=temperature,
        max_tokens=max_tokens,
    )


def _address(endpoint: str, port: int | None) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"Invalid endpoint URL {endpoint!r}: it must begin with http:// or https://")
    if port is not None and parts.port is not None and parts.port != port:
        raise ValueError(f"Endpoint URL {endpoint!r} names port {parts.port}, which conflicts with port={port}")
    host = parts.netloc if port is None or parts.port is not None else f"{parts.netloc}:{port}"
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))


def _retry_after(response: httpx2.Response, *, default: float) -> float:
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):  # absent, or a date
        return default


def _object(response: httpx2.Response, url: str) -> Json:
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LLMError(f"{url} answered something that is no JSON object: {response.text[:200]}")
    return value


def _reason(response: httpx2.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
