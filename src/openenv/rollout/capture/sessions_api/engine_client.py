"""The published client of one model endpoint: chat completions with token IDs and log-probabilities.

For code that calls an endpoint directly. The capture server proxies its calls with `model_call`; both share the
connections (`outbound`), the retries and the repairs of refused requests.
"""

# completion(request):
#
#   prepare_request ---> known fixes ---> send, with retries ---> normalize_response ---> the completion
#                            ^                   |
#                            +----- repair <-----+ the endpoint refuses a parameter

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...tasks.model_parameters import NEUTRAL_SAMPLING, finite_number
from ..answer_relay import RESPONSE_LIMIT
from ..dialects.chat_over_anthropic import NATIVE_REQUEST, anthropic_request, anthropic_response
from ..dialects.dialect import as_dict, as_list, dicts_in
from ..encoding import Json, dumps, load_object, loads
from ..outbound import EndpointError, EndpointResponse, Endpoints
from ..parameter_fixes import ParamFix, repair
from ..retries import RetryPolicy
from ..upstream_errors import UpstreamHTTPError, UpstreamTimeoutError, UpstreamTransportError

log = logging.getLogger("openenv.rollout.capture")

PROVIDERS = ("openai", "anthropic", "hf", "vllm")
CAPTURE_LEVELS = ("tokens", "logprobs", "text")
TIMEOUT_S = 900.0
_RETRIES = RetryPolicy(first_pause_s=2.0, longest_wait_s=60.0)
_ID_PREFIX = "token_id:"


def auth_headers(api_key: str | None, header: str = "Authorization") -> dict[str, str]:
    """Return the header with the key: `Authorization` with `Bearer`, any other with the key alone."""
    name = (header or "Authorization").strip()
    if not api_key:
        return {}
    return {name: f"Bearer {api_key}" if name.lower() == "authorization" else api_key}


def normalise_engine_base(url: str) -> str:
    """Return an address without a final `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def openai_api_base(url: str) -> str:
    """Return the base of `/chat/completions`: the address, with `/v1` if it has no path."""
    base = url.rstrip("/")
    return base if urlsplit(base).path else f"{base}/v1"


def truncating_params(request: Mapping[str, Any]) -> Json:
    """Return the parameters of a request that change the sampled distribution."""
    truncating: Json = {}
    for name, neutral in NEUTRAL_SAMPLING.items():
        value = finite_number(request.get(name))
        if value is not None and value not in ((neutral, 0) if name == "top_k" else (neutral,)):
            truncating[name] = request[name]
    return truncating


def prepare_request(request: Json, *, served_model: str | None = None, capture_level: str = "tokens") -> Json:
    """Add the parameters of the capture to a chat request, in place, and return it.

    Args:
        request: The request; its messages stay as they are.
        served_model: The model's name at the endpoint; replaces the name in the request.
        capture_level: The capture level of the endpoint: `tokens`, `logprobs` or `text`.
    """
    request.pop("_served_model", None)
    if served_model:
        request["model"] = served_model
    if capture_level == "tokens":
        request["return_token_ids"] = True
        request.update({name: NEUTRAL_SAMPLING[name] for name in truncating_params(request)})
    if capture_level != "text":
        request["logprobs"] = True
        if request.get("top_logprobs") is None:  # vLLM sends log-probabilities only if this is a number
            request["top_logprobs"] = 0
    if isinstance(request.get("messages"), list):
        request["messages"] = [_with_thoughts(message, capture_level) for message in request["messages"]]
    return request


def _with_thoughts(message: Any, capture_level: str) -> Any:
    """Return a message with its thoughts in vLLM's field, or without them: other engines refuse unknown fields."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return rest if capture_level == "text" else {**rest, "reasoning": message["reasoning_content"]}


# Where engines have the fields:
#
#                      vLLM                            SGLang                      here
#   prompt IDs         prompt_token_ids                choices[].prompt_token_ids  prompt_token_ids
#   thoughts           message.reasoning               message.reasoning_content   message.reasoning_content
#   ID of a token      choices[].token_ids,            choices[].token_ids         choices[].token_ids and
#                      or "token_id:19" as its text                                logprobs.content[].token_id
def normalize_response(response: Json) -> Json:
    """Move fields that engines have in different places to one place, in the response itself, and return it.

    The prompt's IDs go to the top, thoughts into `reasoning_content`, and each token's ID into its log-probability.
    If the log-probabilities contradict the IDs, they are removed.
    """
    choices = dicts_in(response.get("choices"))
    if choices and not response.get("prompt_token_ids") and choices[0].get("prompt_token_ids"):
        response["prompt_token_ids"] = choices[0]["prompt_token_ids"]
    for choice in choices:
        message = as_dict(choice.get("message"))
        if message.get("reasoning_content") is None and message.get("reasoning") is not None:
            message["reasoning_content"] = message.pop("reasoning")
        ids, entries = choice.get("token_ids"), as_list(as_dict(choice.get("logprobs")).get("content"))
        if not isinstance(ids, list) or len(ids) != len(entries):
            continue
        if any(_names_another(token, entry) for token, entry in zip(ids, entries, strict=True)):
            log.warning("log-probabilities contradict the token ids: they are removed")
            choice["logprobs"] = None
            continue
        for token, entry in zip(ids, entries, strict=True):
            if isinstance(entry, dict):
                entry.setdefault("token_id", token)
    return response


def _names_another(token: object, entry: object) -> bool:
    text = as_dict(entry).get("token")
    return isinstance(text, str) and text.startswith(_ID_PREFIX) and text[len(_ID_PREFIX) :] != str(token)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An endpoint, and how requests reach it; for the client and for probes.

    Args:
        base_url: The address, with its version.
        headers: The headers of each request.
        timeout_s: The time limit of one request.
    """

    base_url: str
    headers: Mapping[str, str]
    timeout_s: float = TIMEOUT_S

    async def send(self, endpoints: Endpoints, path: str, body: Json | None = None) -> tuple[EndpointResponse, bytes]:
        """Send a request once, GET if it has no body; return the response and its body.

        Raises:
            UpstreamTimeoutError: The endpoint did not answer in time.
            UpstreamTransportError: It cannot be reached, or hung up.
        """
        method, data = ("GET", b"") if body is None else ("POST", dumps(body))
        headers = {"content-type": "application/json", "accept-encoding": "identity", **self.headers}
        try:
            response = await endpoints.send(method, self.base_url + path, data, headers, timeout_s=self.timeout_s)
            return response, await response.read(RESPONSE_LIMIT)
        except EndpointError as exc:
            kind = UpstreamTimeoutError if exc.kind == "timeout" else UpstreamTransportError
            raise kind(f"could not reach engine: {exc}") from exc


def parsed_answer(response: EndpointResponse, data: bytes) -> Json:
    """Return the JSON object of a response.

    Raises:
        UpstreamHTTPError: The response is an error.
        UpstreamTransportError: It is not a JSON object.
    """
    if 200 <= response.status < 300:
        answer = load_object(data)
        if answer is None:
            raise UpstreamTransportError("the engine's answer is not a JSON object")
        return answer
    text = data.decode("utf-8", "replace").strip()
    try:
        parsed = loads(text) if text else None
    except (ValueError, RecursionError):
        parsed = text
    raise UpstreamHTTPError(response.status, parsed if isinstance(parsed, dict) else text or None)


async def complete_with_repairs(post: Callable[[Json], Awaitable[Json]], body: Json, fixes: list[ParamFix]) -> Json:
    """Post a chat request until the endpoint refuses none of its parameters; return the normalised completion.

    Args:
        post: Sends a request.
        body: The request, changed in place.
        fixes: Known repairs; new ones are added.

    Raises:
        UpstreamError: The endpoint failed, or its error names no parameter.
    """
    for fix in fixes:
        fix.apply(body)
    while True:
        try:
            return normalize_response(await post(body))
        except UpstreamHTTPError as exc:
            if not repair(exc.status_code, exc.body, body, fixes):
                raise


class InferenceClient:
    """Asks one endpoint for chat completions, and remembers the parameters that it refuses.

    Args:
        base_url: The address of the endpoint.
        served_model: The model's name at the endpoint; replaces the name in the request.
        api_key: Its key.
        auth_header: The header for the key.
        capture_level: The capture level of the endpoint: `tokens`, `logprobs` or `text`.
        provider: `openai`, `hf`, `vllm`, or `anthropic` for an endpoint that speaks Anthropic messages.

    Raises:
        ValueError: The provider is unknown.
    """

    def __init__(
        self,
        base_url: str,
        *,
        served_model: str | None = None,
        api_key: str | None = None,
        auth_header: str = "Authorization",
        capture_level: str = "tokens",
        provider: str = "openai",
    ) -> None:
        if provider not in PROVIDERS:
            raise ValueError(f"unknown upstream provider: {provider}")
        self.provider = provider
        is_native = provider == "anthropic"
        self.base_url = f"{normalise_engine_base(base_url)}/v1" if is_native else openai_api_base(base_url)
        self.served_model = served_model
        self.api_key = api_key or None
        self.auth_header = "x-api-key" if is_native else auth_header or "Authorization"
        self.capture_level = "text" if is_native else capture_level
        self.param_fixes: list[ParamFix] = []
        """The changes of requests that the endpoint asked for so far."""
        # Connections belong to the loop that made them, and a server has another loop than its user.
        self._endpoints: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoints] = weakref.WeakKeyDictionary()

    async def completion(self, request: Json) -> Json:
        """Return a whole chat completion.

        Raises:
            UpstreamError: The endpoint failed.
        """
        if self.provider == "anthropic":
            return await self._native_completion(request)
        body = prepare_request(dict(request), served_model=self.served_model, capture_level=self.capture_level)
        return await complete_with_repairs(functools.partial(self._post, "/chat/completions"), body, self.param_fixes)

    def note_refused(self, parameters: Collection[str]) -> None:
        """Leave out parameters that the endpoint is known to refuse.

        Args:
            parameters: Names of parameters.
        """
        names = {fix.param for fix in self.param_fixes}
        self.param_fixes += [ParamFix(name) for name in sorted(parameters) if name not in names]

    async def _native_completion(self, request: Json) -> Json:
        body = anthropic_request(request, self.served_model or str(request.get("model") or ""))
        answer = await self._post("/messages", body)
        return anthropic_response(answer, native_passthrough=request.get(NATIVE_REQUEST) is not None)

    async def list_models(self) -> Json:
        """Return the endpoint's list of models.

        Raises:
            UpstreamError: The endpoint does not list them.
        """
        return parsed_answer(*await self._send("/models"))

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        endpoints = self._endpoints.pop(asyncio.get_running_loop(), None)
        if endpoints is not None:
            endpoints.close()

    # Only answers are repeated. If the connection fails, the caller decides: its server may be starting or gone.
    async def _post(self, path: str, body: Json) -> Json:
        """Send a request, again if that may help."""
        for attempt in itertools.count(1):
            response, data = await self._send(path, body)
            retry_after = response.headers.get("retry-after", "")
            pause_s = _RETRIES.pause_s(attempt, status=response.status, retry_after=retry_after)
            if 200 <= response.status < 300 or pause_s is None:
                return parsed_answer(response, data)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _send(self, path: str, body: Json | None = None) -> tuple[EndpointResponse, bytes]:
        endpoints = self._endpoints.setdefault(asyncio.get_running_loop(), Endpoints())
        headers = {"anthropic-version": "2023-06-01"} if self.provider == "anthropic" else {}
        headers |= auth_headers(self.api_key, self.auth_header)
        return await EngineAddress(self.base_url, headers).send(endpoints, path, body)
