"""Requests and answers between an agent's dialect and chat completions, as objects with methods: `TransformManager`.

Published names over the bridges and translators of `dialects`, which do the work. Thoughts of earlier turns stay.
"""

#   agent's request --- transform_request ---> chat request ---> endpoint
#   agent's answer <--- transform_response --- chat completion <---+         a whole answer
#   agent's events <--- StreamState.process_chunk --- chat chunk <-+         a stream: state across chunks
#                  <--- StreamState.finalize ---------- the end
#
# The published defaults differ from the proxy: 4096 tokens for Anthropic, and thinking by the chat template of Qwen
# models. They are in `_completed` and `_normalised`, so the bridges stay free of them.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from ..dialects import anthropic_over_chat, google, responses_over_chat
from ..dialects.anthropic_over_chat import STOP_REASONS, MessageTranslator
from ..dialects.dialect import MALFORMED, StreamTranslator, as_dict, dicts_in
from ..dialects.google import FINISH_REASONS, ContentTranslator, message_parts, usage_metadata
from ..dialects.responses_over_chat import ResponseTranslator
from ..encoding import Json
from ..upstream_errors import UpstreamRequestError
from .detection import APIType

Translated = Json | list[Json]


class StreamState(Protocol):
    """The state of one stream while its chunks are translated."""

    def process_chunk(self, chunk: Json, is_first: bool = False) -> list[Json]:
        """Take a chunk, and return its events."""

    def finalize(self) -> list[Json]:
        """Return the events that end the stream, once."""


class _TranslatedStream:
    """A stream that is translated chunk by chunk; `is_first` is published, and not needed here."""

    def __init__(self, translator: StreamTranslator) -> None:
        self._translator = translator
        self._is_over = False

    def process_chunk(self, chunk: Json, is_first: bool = False) -> list[Json]:
        """Take a chunk, and return its events."""
        return self._translator.events_of(chunk)

    def finalize(self) -> list[Json]:
        """Return the events that end the stream, once."""
        events = [] if self._is_over else self._translator.end_events()
        self._is_over = True
        return events


class AnthropicStreamState(_TranslatedStream):
    """A stream of Anthropic events.

    Args:
        model: The model's name in them.
        finish_to_stop_reason: Anthropic's names of the finish reasons.
    """

    def __init__(self, model: str, finish_to_stop_reason: Mapping[str, str]) -> None:
        super().__init__(MessageTranslator({"model": model}, stop_reasons=finish_to_stop_reason))


class ResponsesStreamState(_TranslatedStream):
    """A stream of response events.

    Args:
        model: The model's name in them.
    """

    def __init__(self, model: str) -> None:
        super().__init__(ResponseTranslator({"model": model}))


class BaseTransformer(ABC):
    """Translates between one dialect and chat completions."""

    @abstractmethod
    def transform_request(self, body: Json) -> Json:
        """Translate an agent's request to chat completions.

        Raises:
            UpstreamRequestError: The request is malformed.
        """

    @abstractmethod
    def transform_response(self, response: Json, original_request: Json) -> Json:
        """Return a chat completion as the answer to an agent's request."""

    @abstractmethod
    def transform_stream_chunk(self, chunk: Json, original_request: Json, is_first: bool = False) -> Translated:
        """Return one chunk of a chat completion as events, without knowledge of other chunks."""

    def is_streaming_request(self, body: Json) -> bool:
        """Return whether a request asks for a stream."""
        return bool(body.get("stream", False))

    def create_stream_state(self, original_request: Json) -> StreamState | None:
        """Return the translator of one stream; None if each chunk can be translated alone."""
        return None


class OpenAIChatTransformer(BaseTransformer):
    """Chat completions, without translation."""

    def transform_request(self, body: Json) -> Json:
        """Return a request with one system text, and a limit under one name."""
        sent = dict(body)
        if "max_tokens" not in sent and "max_completion_tokens" in sent:
            sent["max_tokens"] = sent["max_completion_tokens"]
        return _normalised(sent, body)

    def transform_response(self, response: Json, original_request: Json) -> Json:
        """Return a completion with the agent's name of the model."""
        return {**response, **{key: original_request[key] for key in ("model",) if key in original_request}}

    def transform_stream_chunk(self, chunk: Json, original_request: Json, is_first: bool = False) -> Translated:
        """Return a chunk with the agent's name of the model."""
        return self.transform_response(chunk, original_request)


class _BridgedTransformer(BaseTransformer):
    """Translates by a bridge of `dialects`."""

    _request: ClassVar[Callable[..., Json]]

    def transform_request(self, body: Json) -> Json:
        """Translate an agent's request to chat completions.

        Raises:
            UpstreamRequestError: The request is malformed.
        """
        try:
            sent = type(self)._request(body, keep_thoughts=True)
        except MALFORMED as exc:
            raise UpstreamRequestError(f"the request cannot be read: {exc}") from exc
        if "model" not in body:
            sent.pop("model", None)
        return _normalised(self._completed(sent, body), body)

    def _completed(self, sent: Json, body: Json) -> Json:
        """Add the defaults of the dialect."""
        return sent

    @abstractmethod
    def create_stream_state(self, original_request: Json) -> StreamState:
        """Return the translator of one stream."""

    # Without a state, each chunk is a stream by itself: its events have their own beginning, and index 0.
    def transform_stream_chunk(self, chunk: Json, original_request: Json, is_first: bool = False) -> Translated:
        """Return one chunk of a chat completion as events; the last chunk brings the final events, too."""
        state = self.create_stream_state(original_request)
        events = state.process_chunk(chunk, is_first)
        is_last = any(choice.get("finish_reason") for choice in dicts_in(chunk.get("choices")))
        return events + state.finalize() if is_last else events


class AnthropicTransformer(_BridgedTransformer):
    """Anthropic messages."""

    _request = staticmethod(anthropic_over_chat.request)

    # "adaptive" is the newer value of the API: the model decides about the length of its thoughts.
    def _completed(self, sent: Json, body: Json) -> Json:
        sent.setdefault("max_tokens", 4096)
        if sent.get("tools"):
            sent.setdefault("tool_choice", "auto")
        if as_dict(body.get("thinking")).get("type") in ("enabled", "adaptive"):
            sent["chat_template_kwargs"] = {"enable_thinking": True}
        return sent

    def transform_response(self, response: Json, original_request: Json) -> Json:
        """Return a completion as a message."""
        message = MessageTranslator({"model": original_request.get("model", "claude-3")}).translate(response)
        return {**message, "id": f"msg_{response['id']}"} if response.get("id") else message

    def create_stream_state(self, original_request: Json) -> StreamState:
        """Return the translator of one stream."""
        return AnthropicStreamState(original_request.get("model", "claude-3"), STOP_REASONS)


class OpenAIResponsesTransformer(_BridgedTransformer):
    """OpenAI responses."""

    _request = staticmethod(responses_over_chat.request)

    def _completed(self, sent: Json, body: Json) -> Json:
        if as_dict(body.get("reasoning")).get("effort") not in (None, "none", "minimal"):
            sent["chat_template_kwargs"] = {"enable_thinking": True}
        return sent

    def transform_response(self, response: Json, original_request: Json) -> Json:
        """Return a completion as a response."""
        model = original_request.get("model", response.get("model", "unknown"))
        whole = ResponseTranslator({**original_request, "model": model}).translate(response)
        named = {"id": response.get("id"), "created_at": response.get("created")}
        return {**whole, **{key: value for key, value in named.items() if value is not None}}

    def create_stream_state(self, original_request: Json) -> StreamState:
        """Return the translator of one stream."""
        return ResponsesStreamState(original_request.get("model", "unknown"))


class GoogleTransformer(_BridgedTransformer):
    """Google's `generateContent`."""

    _request = staticmethod(google.request)

    def transform_response(self, response: Json, original_request: Json) -> Json:
        """Return a completion as Google's answer."""
        candidates = [
            {
                "content": {"parts": message_parts(as_dict(choice.get("message"))), "role": "model"},
                "finishReason": FINISH_REASONS.get(str(choice.get("finish_reason", "stop")), "STOP"),
                "index": index,
                "safetyRatings": [],
            }
            for index, choice in enumerate(dicts_in(response.get("choices")))
        ]
        answer = {"candidates": candidates, "usageMetadata": usage_metadata(as_dict(response.get("usage")))}
        return _with_calls(answer)

    def create_stream_state(self, original_request: Json) -> StreamState:
        """Return the translator of one stream."""
        return _TranslatedStream(ContentTranslator(original_request))

    def transform_stream_chunk(self, chunk: Json, original_request: Json, is_first: bool = False) -> Translated:
        """Return one chunk of a chat completion in Google's form."""
        candidates = []
        for choice in dicts_in(chunk.get("choices")):
            parts = message_parts(as_dict(choice.get("delta")))
            candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": choice.get("index", 0)}
            if choice.get("finish_reason"):
                candidate["finishReason"] = FINISH_REASONS.get(str(choice["finish_reason"]), "STOP")
            candidates.append(candidate)
        usage = {"usageMetadata": usage_metadata(chunk["usage"])} if chunk.get("usage") else {}
        return _with_calls({"candidates": candidates, **usage})

    def is_streaming_request(self, body: Json) -> bool:
        """Return False: in this dialect the path decides."""
        return False


def _with_calls(answer: Json) -> Json:
    parts = [part for candidate in answer["candidates"] for part in candidate["content"]["parts"]]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    return {**answer, "functionCalls": calls} if calls else answer


# Chat templates accept one system message, at the beginning. Agents send several, and `developer` messages in between.
def _normalised(sent: Json, body: Mapping[str, Any]) -> Json:
    """Return a request with one system text at its beginning, and without fields of this server."""
    sent.pop("_served_model", None)
    # [system A, user B, developer C, user D]  ->  [system "A\n\nC", user B, user D]
    texts: list[str] = []
    others: list[Any] = []
    if isinstance(sent.get("messages"), list):
        for message in sent["messages"]:
            is_system = isinstance(message, dict) and message.get("role") in ("system", "developer")
            text = _text(message.get("content")) if is_system else ""
            if text:
                texts.append(text)
            elif not is_system or message.get("content"):
                others.append({**message, "role": "system"} if is_system else message)
        sent["messages"] = [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others
    if "qwen3.5" in str(body.get("_served_model") or "").lower():  # its template thinks by default
        sent["chat_template_kwargs"] = {"enable_thinking": False, **as_dict(sent.get("chat_template_kwargs"))}
    return sent


def _text(content: object) -> str:
    if not isinstance(content, list):
        return str(content) if content else ""
    texts = (block if isinstance(block, str) else as_dict(block).get("text") for block in content)
    return "\n".join(text for text in texts if isinstance(text, str))


class TransformManager:
    """The transformers of all dialects."""

    def __init__(self) -> None:
        self._transformers: dict[APIType, BaseTransformer] = {
            APIType.ANTHROPIC: AnthropicTransformer(),
            APIType.OPENAI_CHAT: OpenAIChatTransformer(),
            APIType.OPENAI_RESPONSES: OpenAIResponsesTransformer(),
            APIType.GOOGLE: GoogleTransformer(),
        }

    def get(self, api_type: APIType) -> BaseTransformer:
        """Return the transformer of a dialect."""
        return self._transformers[api_type]
