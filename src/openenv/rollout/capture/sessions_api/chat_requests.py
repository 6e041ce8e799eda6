"""Published helpers for requests and answers: token counts, limits, usage fields. Values only.

The capture server does the same work in `dialects` and `agent_routes`; published code calls these functions itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dialects import route
from ..dialects.dialect import as_dict, text_length
from ..dialects.google import action_of
from ..encoding import Json
from .detection import APIType

# Chat completions, chat completions since the o1 models, responses.
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# The prompt fields of all dialects: the estimate does not need to know which one it is.
_COUNTED = (
    "system",
    "messages",
    "contents",
    "systemInstruction",
    "system_instruction",
    "input",
    "instructions",
    "tools",
)
_PROMPT_DETAILS = {"cached_tokens": 0, "audio_tokens": 0}
_COMPLETION_DETAILS = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}


def aux_dialect(path: str) -> str | None:
    """Return the dialect of a path that asks for a token count; None for any other path."""
    target = route("/" + path.lstrip("/"))
    return target.dialect.name if target is not None and target.kind == "count" else None


def is_aux_route(path: str) -> bool:
    """Return whether a path asks for a token count instead of a model call."""
    return aux_dialect(path) is not None


def approximate_token_count(body: Mapping[str, Any]) -> int:
    """Return the approximate number of tokens of a request: one per four characters."""
    return max(1, sum(text_length(body.get(name)) for name in _COUNTED) // 4)


def aux_token_count_response(dialect: str, count: int) -> Json:
    """Return a token count in the form of a dialect."""
    if dialect != "google":
        return {"input_tokens": count}
    details = [{"modality": "TEXT", "tokenCount": count}]
    return {"totalTokens": count, "totalBillableCharacters": count * 4, "promptTokensDetails": details}


def wants_stream(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether a request asks for a stream: in its body, or in a Google path."""
    # POST .../models/MODEL:streamGenerateContent?alt=sse
    target, _, query = path.partition("?")
    if body.get("stream") is True or action_of(target) == "streamgeneratecontent":
        return True
    return "alt=sse" in query.lower()


# Three names of one limit: of chat completions, of their newer form, and of responses. A request may have several.
def clamp_output_tokens(chat_request: Json, cap: int | None) -> int | None:
    """Limit the tokens of an answer, in place; return the largest limit that was above the cap.

    Args:
        chat_request: The request; one without a limit gets the cap.
        cap: The limit; None or 0 for no limit.
    """
    if not cap:
        return None
    above = {name: chat_request[name] for name in _LIMITS if _is_above(chat_request.get(name), cap)}
    chat_request.update(dict.fromkeys(above, cap))
    if all(chat_request.get(name) is None for name in _LIMITS):
        chat_request["max_tokens"] = cap
    return max(above.values(), default=None)


def _is_above(value: object, cap: int) -> bool:
    return isinstance(value, int) and value > cap


# Endpoints refuse `tool_choice` without tools, and empty lists of tools. Agents send both.
def normalise_for_capture(chat_request: Json) -> None:
    """Change a request in place to ask for a whole answer, without parameters that endpoints then refuse."""
    chat_request["stream"] = False
    chat_request.pop("stream_options", None)
    for name in ("tools", "functions"):
        if name in chat_request and not chat_request[name]:
            del chat_request[name]
    if "tools" not in chat_request:
        chat_request.pop("tool_choice", None)
        chat_request.pop("parallel_tool_calls", None)


def normalise_response(response: Json) -> None:
    """Fill in usage details that clients read without a check and some engines leave null."""
    _add_details(response, {"prompt_tokens_details": _PROMPT_DETAILS, "completion_tokens_details": _COMPLETION_DETAILS})


def normalise_client_payload(payload: Json, api_type: APIType) -> None:
    """Fill in usage details that clients of the responses API read without a check."""
    if api_type is APIType.OPENAI_RESPONSES:
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        _add_details(payload, details)


def _add_details(answer: Json, details: Mapping[str, Json]) -> None:
    # {"usage": {"prompt_tokens": 5, "prompt_tokens_details": null}}, from some engines.
    usage = as_dict(answer.get("usage"))
    if isinstance(answer.get("usage"), dict):
        usage.update({name: dict(values) for name, values in details.items() if usage.get(name) is None})
