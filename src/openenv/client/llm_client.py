"""Clients of language models: OpenAI's chat completions and Anthropic's messages, over plain HTTP.

Knows the two dialects. Needs no provider's package, but uses a client object of one if given.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import httpx2
from typing_extensions import Self

from openenv.errors import OpenEnvError

logger = logging.getLogger(__name__)

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
    """A model's answer: a text, tool calls, or both."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_message_dict(self) -> Json:
        """Return the answer as an OpenAI message, to be added to the conversation."""
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
        if kind not in cleaned:
            continue
        objects = [one for one in cleaned.pop(kind) if isinstance(one, Mapping) and _is_object(one)]
        if objects:
            cleaned |= objects[0]
        elif "properties" not in cleaned:  # no alternative is an object, so the schema has no arguments
            return {"type": "object", "properties": {}, "required": []}
    if "allOf" in cleaned:
        cleaned = _merged(cleaned, cleaned.pop("allOf"))
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
        if role in ("system", "developer"):
            system.append(content or "")
        elif role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", ""), "content": content or ""}
            if others and others[-1]["role"] == "user" and isinstance(others[-1]["content"], list):
                others[-1]["content"].append(block)
            else:
                others.append({"role": "user", "content": [block]})
        elif role == "assistant" and message.get("tool_calls"):
            blocks: list[Json] = [{"type": "text", "text": content}] if content else []
            blocks += [_tool_use(call) for call in message["tool_calls"]]
            others.append({"role": "assistant", "content": blocks})
        else:  # a list is copied: results of tools are added to it
            others.append({"role": role, "content": list(content) if isinstance(content, list) else content or ""})
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
    merged.update(type="object", properties=properties, required=required)
    return merged


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
    """

    def __init__(self, endpoint: str, port: int | None = None) -> None:
        self.endpoint = endpoint
        self.port = port

    @property
    def base_url(self) -> str:
        """The address with its port.

        Raises:
            ValueError: It is not a valid address, has a password, a query or a fragment, or names another port.
        """
        return _address(self.endpoint, self.port)

    @abstractmethod
    async def complete(self, prompt: str, **kwargs: Any) -> str:
        """Return the model's answer to a prompt."""

    async def complete_with_tools(self, messages: list[Json], tools: list[Json], **kwargs: Any) -> LLMResponse:
        """Return the model's next message in an OpenAI conversation with MCP tools.

        Raises:
            NotImplementedError: This client does not support tools.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support tool calling")


class _HTTPClient(LLMClient):
    """A client that posts JSON; one connection pool per event loop.

    If a client object of the provider's package is given, or `_client` was read, it makes the calls: with its retries,
    its proxies and its exceptions.
    """

    _package: ClassVar[str]
    _sdk_class: ClassVar[str]

    def __init__(
        self,
        endpoint: str,
        port: int | None,
        model: str,
        api_key: str | None = None,
        system_prompt: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
        *,
        client: Any = None,
    ) -> None:
        super().__init__(endpoint, port)
        self._address = self.base_url
        self.model = model
        self.system_prompt = system_prompt
        self.temperature = temperature
        self.max_tokens = max_tokens
        self._api_key = api_key
        self._sdk = client
        self._own_sdk: Any = None
        self._refused: set[str] = set()
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = WeakKeyDictionary()

    @property
    def _client(self) -> Any:
        """The client object of the provider's package, for existing code that reads and replaces this attribute.

        Raises:
            ImportError: The package is not installed.
        """
        if self._sdk is None:
            try:
                package = importlib.import_module(self._package)
            except ImportError as exc:
                name = type(self).__name__
                raise ImportError(
                    f"the client object of {name} needs the package {self._package!r}: pip install {self._package}"
                ) from exc
            key = "not-needed" if self._api_key is None else self._api_key
            self._sdk = self._own_sdk = getattr(package, self._sdk_class)(base_url=self._sdk_url(), api_key=key)
        return self._sdk

    @_client.setter
    def _client(self, client: Any) -> None:
        self._sdk = client

    def _sdk_url(self) -> str:
        """Return the address as the package's client takes it."""
        return self._address

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
            json.JSONDecodeError: The model's arguments are not valid JSON.
        """
        text, calls = await self._request(messages, tools, kwargs)
        return LLMResponse(text, [self._tool_call(call) for call in calls])

    @abstractmethod
    async def _request(self, messages: list[Json], tools: list[Json], options: Json) -> tuple[str, list[Json]]:
        """Post an OpenAI conversation in the endpoint's dialect; return the answer's text and tool calls."""

    @staticmethod
    @abstractmethod
    def _tool_call(call: Json) -> ToolCall:
        """Convert a tool call from the endpoint's dialect."""

    async def aclose(self) -> None:
        """Close the connections of this event loop; a client object that was given stays open."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()
        if self._own_sdk is not None:
            await self._own_sdk.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _post(self, path: str, body: Json, headers: Mapping[str, str]) -> Json:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = httpx2.AsyncClient(timeout=httpx2.Timeout(600, connect=20))
        # `/v1` comes before the route unless the endpoint has a path, such as `/api/v3`.
        url = f"{self._address}{path}" if urlsplit(self._address).path else f"{self._address}/v1{path}"
        for name in self._refused & body.keys():
            body = _without(name, body)
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
                refused = _refused_parameter(response, body)
                if refused is not None and attempt < _ATTEMPTS:
                    logger.warning("%s takes no %s from now on: %s", self.model, refused, _reason(response))
                    self._refused.add(refused)
                    body = _without(refused, body)
                    continue
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
        client: An `openai.AsyncOpenAI`, or any client object like it, that makes the calls.

    Raises:
        ValueError: The address is none, or names another port.
    """

    _package = "openai"
    _sdk_class = "AsyncOpenAI"

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
        *,
        client: Any = None,
    ) -> None:
        super().__init__(endpoint, port, model, api_key, system_prompt, temperature, max_tokens, client=client)
        self._reasons = use_max_completion_tokens

    def _sdk_url(self) -> str:
        return self._address if urlsplit(self._address).path else f"{self._address}/v1"

    async def _request(self, messages: list[Json], tools: list[Json], options: Json) -> tuple[str, list[Json]]:
        body: Json = {"model": self.model, "messages": messages, **options}
        limit = body.pop("max_tokens", body.pop("max_completion_tokens", self.max_tokens))
        body["max_completion_tokens" if self._reasons else "max_tokens"] = limit
        if not self._reasons:
            body.setdefault("temperature", self.temperature)
        if tools:
            body["tools"] = mcp_tools_to_openai(tools)
        if self._sdk is not None:
            said = (await _called(self._sdk, self._sdk.chat.completions.create, body)).choices[0].message
            return said.content or "", [
                {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in said.tool_calls or ()
            ]
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
    """Speaks Anthropic's messages API; takes and returns OpenAI conversations.

    Args:
        endpoint: The address; `/v1` is added when it has no path.
        port: The port; None leaves the address as it is.
        model: The model's name.
        api_key: The key.
        system_prompt: The system message of conversations that have none.
        temperature: By default, for all calls.
        max_tokens: By default, for all calls.
        client: An `anthropic.AsyncAnthropic`, or any client object like it, that makes the calls.

    Raises:
        ValueError: The address is not valid, or names another port.
    """

    _package = "anthropic"
    _sdk_class = "AsyncAnthropic"

    async def _request(self, messages: list[Json], tools: list[Json], options: Json) -> tuple[str, list[Json]]:
        system, others = openai_messages_to_anthropic(messages)
        body: Json = {"max_tokens": self.max_tokens, "temperature": self.temperature, **options}
        body |= {"model": self.model, "messages": others}
        if system or self.system_prompt:
            body["system"] = system or self.system_prompt
        if tools:
            body["tools"] = mcp_tools_to_anthropic(tools)
        if self._sdk is not None:
            said = (await _called(self._sdk, self._sdk.messages.create, body)).content
            uses = [
                {"id": block.id, "name": block.name, "input": block.input} for block in said if block.type == "tool_use"
            ]
            return "".join(block.text for block in said if block.type == "text"), uses
        headers = {"x-api-key": self._api_key or "not-needed", "anthropic-version": "2023-06-01"}
        reply = await self._post("/messages", body, headers)
        blocks = reply.get("content") or []
        text = "".join(block["text"] for block in blocks if block.get("type") == "text")
        return text, [block for block in blocks if block.get("type") == "tool_use"]

    @staticmethod
    def _tool_call(call: Json) -> ToolCall:
        return ToolCall(call["id"], call["name"], dict(call.get("input") or {}))


async def _called(sdk: Any, create: Callable[..., Any], body: Json) -> Any:
    """Call a method of a provider's client object, which may be the async or the blocking one."""
    body = _as_named(create, body)
    if type(sdk).__name__ in ("OpenAI", "AzureOpenAI", "Anthropic"):
        return await asyncio.to_thread(create, **body)
    reply = create(**body)
    return await reply if inspect.isawaitable(reply) else reply


def _as_named(create: Callable[..., Any], body: Json) -> Json:
    """Move unnamed parameters into `extra_body`: packages drop parameters that only older models take."""
    parameters = inspect.signature(create).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return body
    others = {name: value for name, value in body.items() if name not in parameters}
    named = {name: value for name, value in body.items() if name in parameters}
    return {**named, "extra_body": others} if others else named


_REASONING_MODELS = ("gpt-5", "o1", "o3", "o4")
"""How the names of models begin that take `max_completion_tokens` and no temperature."""

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
    more: Json = {"use_max_completion_tokens": True} if provider.lower() == "openai" and _reasons(model) else {}
    return kind(
        endpoint,
        443,
        model,
        api_key=api_key,
        system_prompt=system_prompt,
        temperature=temperature,
        max_tokens=max_tokens,
        **more,
    )


def _reasons(model: str) -> bool:
    return model.startswith(_REASONING_MODELS)


def _address(endpoint: str, port: int | None) -> str:
    scheme, colon, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    shown = f"{scheme}{colon}***@{host.rpartition('@')[2]}{slash}{path}" if "@" in host else endpoint
    try:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it must begin with http:// or https://, and name a host")
        if "@" in parts.netloc:
            raise ValueError("it must not have credentials in it: pass api_key")
        if parts.query or parts.fragment:
            raise ValueError("it must not have a query or a fragment")
        if parts.netloc.endswith(":"):
            raise ValueError("its port is empty")
        for number in (parts.port, port):
            if number is not None and not 1 <= number <= 65535:
                raise ValueError(f"port {number} is out of range: 1 to 65535")
    except ValueError as exc:
        raise ValueError(f"Invalid endpoint URL {shown!r}: {exc}") from None
    if port is not None and parts.port is not None and parts.port != port:
        raise ValueError(f"Endpoint URL {shown!r} names port {parts.port}, which conflicts with port={port}")
    place = parts.netloc if port is None or parts.port is not None else f"{parts.netloc}:{port}"
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", ""))


def _refused_parameter(response: httpx2.Response, body: Json) -> str | None:
    """Return which of our defaults a model refuses: reasoning models take no temperature, or another limit."""
    if response.status_code != 400:
        return None
    reason = _reason(response)
    if "max_tokens" in body and "max_completion_tokens" in reason:
        return "max_tokens"
    return "temperature" if "temperature" in body and "temperature" in reason else None


def _without(name: str, body: Json) -> Json:
    others = {key: value for key, value in body.items() if key != name}
    return {**others, "max_completion_tokens": body[name]} if name == "max_tokens" else others


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
        raise LLMError(f"the answer of {url} is not a JSON object: {response.text[:200]}")
    return value


def _reason(response: httpx2.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
