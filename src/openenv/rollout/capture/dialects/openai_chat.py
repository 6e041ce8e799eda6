"""OpenAI chat completions, for endpoints of OpenAI, vLLM, SGLang and llama.cpp.

Each engine has different fields for the IDs of prompt and completion:

    vLLM       {"prompt_token_ids": [...], "choices": [{"token_ids": [...], "logprobs": {...}}]}
    SGLang     {"choices": [{"prompt_token_ids": [...], "completion_token_ids": [...]}]}, or both in "sglext"
    llama.cpp  {"choices": [{"logprobs": {"content": [{"id": 19, "token": "4", "logprob": -0.1}]}}]}
"""

from __future__ import annotations

import functools
import json
import time
import uuid
from typing import Any

from ...tasks.model_parameters import MINIMUM_LIMITS, OUTPUT_LIMITS, THINKING_LIMITS, token_limit
from ..encoding import STREAM_DONE, Json, dumps, event_bytes
from ..training_trace import VersionSpan
from .dialect import (
    EXPERTS,
    LOGPROBS,
    STREAM,
    TOKEN_IDS,
    USAGE,
    CallOptions,
    Completion,
    ModelDialect,
    RewrittenRequest,
    TokenLog,
    as_dict,
    as_list,
    capped,
    count_in,
    dicts_in,
    error_kind,
    size_of,
)

RENAMES_MAX_TOKENS = ("gpt-5", "o1", "o3", "o4")
"""Models that accept `max_completion_tokens` only (OpenAI API: `max_tokens` is deprecated)."""

_CHOICE_IDS = ("token_ids", "completion_token_ids", "output_token_ids")
_PROMPT_IDS = ("prompt_token_ids", "input_token_ids")
_VERSION_HOLDERS = ("sglext", "metadata")


class ChatAssembler:
    """Assembles a chat completion from its chunks."""

    #     {"id": ..., "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    #     {"choices": [{"index": 0, "delta": {"content": "4"}, "token_ids": [19], "logprobs": {"content": [...]}}]}
    #     {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    #     {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 2}}
    #     [DONE]

    def __init__(self) -> None:
        self._top: Json = {}
        self._usage: Json | None = None
        self._choices: dict[int, _Choice] = {}
        self._prompt_ids: list[int] | None = None

    def feed(self, chunk: Json) -> None:
        self._prompt_ids = _take_prompt_ids(dict(chunk)) or self._prompt_ids
        for key, value in chunk.items():
            if key in ("error", "metadata") and value:
                self._top[key] = value  # the last error and version count; of all other fields the first value
            elif key not in ("choices", "usage", "object", *_PROMPT_IDS) and value is not None:
                self._top.setdefault(key, value)
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]  # cumulative, if an engine reports it with each chunk
        for choice in dicts_in(chunk.get("choices")):
            index = choice.get("index")
            self._choices.setdefault(index if isinstance(index, int) else 0, _Choice()).feed(choice)

    def response(self) -> Json:
        choices = [choice.whole(index) for index, choice in sorted(self._choices.items())]
        whole: Json = {**self._top, "object": "chat.completion", "choices": choices, "usage": self._usage}
        if self._prompt_ids is not None:
            whole["prompt_token_ids"] = self._prompt_ids
        return whole


class _Choice:
    """One choice of a completion, while it is assembled."""

    def __init__(self) -> None:
        self._finish_reason: str | None = None
        self._role = "assistant"
        self._text: dict[str, list[str]] = {}
        self._parts: Json = {}
        self._other: Json = {}
        self._tool_calls: dict[int, Json] = {}
        self._pieces: list[tuple[list[int], list[Any]]] = []  # IDs and log-probability entries of each chunk

    def feed(self, choice: Json) -> None:
        for key, value in as_dict(choice.get("delta")).items():
            self._feed_delta(key, value)
        if choice.get("finish_reason") is not None:
            self._finish_reason = choice["finish_reason"]
        ids, entries = _first_list(choice, _CHOICE_IDS), _entries(choice)
        if ids or entries:
            self._pieces.append((ids, entries))
        for key, value in choice.items():
            if key not in ("delta", "index", "finish_reason", "logprobs", *_CHOICE_IDS) and value is not None:
                self._other[key] = value

    def _feed_delta(self, key: str, value: Any) -> None:
        if key == "role":
            self._role = value or self._role
        elif key == "tool_calls":
            for call in value or ():
                self._feed_tool_call(call)
        elif isinstance(value, str):
            self._text.setdefault(key, []).append(value)
        elif isinstance(value, list):
            self._parts.setdefault(key, []).extend(value)
        elif value is not None:
            self._parts[key] = value

    def _feed_tool_call(self, call: Any) -> None:
        if not isinstance(call, dict):
            return
        # The first piece of a call has its ID and name; later pieces have only arguments:
        #
        #     {"index": 0, "id": "call_1", "type": "function", "function": {"name": "bash", "arguments": ""}}
        #     {"index": 0, "function": {"arguments": "{\"comm"}}
        #
        # Engines that send a whole call at once may omit the index: then each piece is a new call.
        index = call.get("index")
        index = index if isinstance(index, int) else max(self._tool_calls, default=-1) + 1
        whole = self._tool_calls.setdefault(index, {"type": "function", "function": {"name": "", "arguments": ""}})
        if call.get("id"):
            whole["id"] = call["id"]
        if call.get("type"):
            whole["type"] = call["type"]
        function = call.get("function") or {}
        whole["function"]["name"] += function.get("name") or ""
        whole["function"]["arguments"] += function.get("arguments") or ""

    def whole(self, index: int) -> Json:
        message: Json = {"role": self._role, "content": None}
        message.update({key: "".join(parts) for key, parts in self._text.items()})
        message.update(self._parts)
        if self._tool_calls:
            message["tool_calls"] = [call for _, call in sorted(self._tool_calls.items())]
        choice: Json = {"index": index, "message": message, "finish_reason": self._finish_reason}
        all_ids = [token for ids, _ in self._pieces for token in ids]
        all_entries = [entry for _, entries in self._pieces for entry in entries]
        if all_entries:
            choice["logprobs"] = {"content": all_entries}
        if all_ids:
            choice["token_ids"] = all_ids
        if all_ids and all_entries and len(all_ids) != len(all_entries):
            # Our field, of no engine: if the total numbers differ, `completion` pairs the two chunk by chunk.
            choice["token_pieces"] = [[ids, entries] for ids, entries in self._pieces]
        return {**choice, **self._other}


class OpenAIChat(ModelDialect):
    """`POST /v1/chat/completions`."""

    name = "openai_chat"
    path = "/chat/completions"
    counted_fields = ("messages", "tools")
    assembler = ChatAssembler

    def rewrite(self, body: Json, options: CallOptions) -> RewrittenRequest:
        sent = options.applied_to(body)
        forced: set[str] = set()
        if options.allows(LOGPROBS) and sent.get("logprobs") is not True:
            forced.add(LOGPROBS)
            sent["logprobs"] = True
            if options.top_logprobs > 0 and options.allows("top_logprobs"):
                sent["top_logprobs"] = options.top_logprobs
            else:  # the agent's number is invalid: it did not ask for `logprobs`
                sent.pop("top_logprobs", None)
        if options.return_token_ids and options.allows(TOKEN_IDS) and sent.get("return_token_ids") is not True:
            forced.add(TOKEN_IDS)
            sent["return_token_ids"] = True
        if options.seed is not None and options.allows("seed"):
            sent["seed"] = options.seed
        if options.asks_for_experts and options.allows(EXPERTS):
            sent[EXPERTS] = True
        if options.routed_experts:
            sent["stream"] = False
        if sent.get("return_token_ids") and not options.allows(STREAM):
            sent["stream"] = False  # SGLang sends IDs without streaming only, and IDs matter more than a stream
        if sent.get("stream") is True:
            _force_usage(sent, options, forced)
        else:
            sent.pop("stream_options", None)  # endpoints refuse it without `stream`
        if options.disable_thinking and options.allows("chat_template_kwargs"):
            sent["chat_template_kwargs"] = {**as_dict(sent.get("chat_template_kwargs")), "enable_thinking": False}
        return RewrittenRequest(sent, frozenset(forced), _limit_tokens(sent, options))

    def strip_event(self, chunk: Json, forced: frozenset[str]) -> Json | None:
        choices = chunk.get("choices")
        # The chunk after the last choice is {"choices": [], "usage": {...}}. A client that did not ask for it may fail
        # at a chunk without choices.
        if USAGE in forced and choices == [] and chunk.get("usage") is not None and "error" not in chunk:
            return None
        visible = _strip(chunk, choices, forced)
        return visible if visible is chunk or _worth_sending(chunk, visible) else None

    def strip_response(self, response: Json, forced: frozenset[str]) -> Json:
        return _strip(response, response.get("choices"), forced)

    def completion(self, response: Json) -> Completion:
        choice = as_dict((as_list(response.get("choices")) or [None])[0])
        log = TokenLog()
        if isinstance(choice.get("token_pieces"), list):
            for ids, entries in choice["token_pieces"]:
                log.add(ids, entries)
        else:
            log.add(_first_list(choice, _CHOICE_IDS) or _sgl_ids(response, "completion_token_ids"), _entries(choice))
        copy = {**response, "choices": [dict(item) for item in dicts_in(response.get("choices"))]}
        prompt_ids = _take_prompt_ids(copy)
        finish = choice.get("finish_reason")
        sampled = log.sampled()
        spans = _version_spans(response, choice, len(sampled))
        return Completion(
            finish_reason=finish if isinstance(finish, str) else None,
            sampled=sampled,
            prompt_ids=tuple(prompt_ids) if prompt_ids else None,
            usage=as_dict(response.get("usage")) or None,
            error=_error_in(response),
            policy_version=spans[0].version if spans else _weight_version(response),
            version_spans=spans,
            routed_experts=_routed_experts(response, choice),
        )

    def sampled_in(self, chunk: Json) -> int:
        choices = dicts_in(chunk.get("choices"))
        return sum(max(len(_first_list(choice, _CHOICE_IDS)), len(_entries(choice))) for choice in choices)

    def text_size(self, value: Json) -> int:
        size = 0
        for choice in dicts_in(value.get("choices")):
            said = as_dict(choice.get("delta") or choice.get("message"))
            size += size_of(said.get("content"), said.get("reasoning_content") or said.get("reasoning"))
            for call in dicts_in(said.get("tool_calls")):
                function = as_dict(call.get("function"))
                size += size_of(function.get("name"), function.get("arguments"))
        return size

    def is_end(self, chunk: Json) -> bool:
        return any(choice.get("finish_reason") for choice in dicts_in(chunk.get("choices")))

    def completion_tokens(self, value: Json) -> int:
        return count_in(value.get("usage"), "completion_tokens")

    def take_prompt_ids(self, value: Json) -> list[int] | None:
        return _take_prompt_ids(value)

    def error(self, status: int, message: str) -> Json:
        return {"error": {"message": message, "type": error_kind(status), "param": None, "code": status}}

    def error_event(self, status: int, message: str) -> bytes:
        return event_bytes(dumps(self.error(status, message)))

    def final_answer(self, body: Json, text: str) -> Json:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or "",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }

    def stream(self, body: Json, response: Json) -> list[bytes]:
        copied = ("id", "created", "model", "system_fingerprint")
        top: Json = {key: value for key, value in response.items() if key in copied}
        top["object"] = "chat.completion.chunk"
        events = []
        for choice in response.get("choices") or ():
            message = dict(choice.get("message") or {})
            calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", None) or ())]
            delta = {key: value for key, value in message.items() if value is not None}
            if calls:
                delta["tool_calls"] = calls
            index = choice.get("index", 0)
            other = {key: value for key, value in choice.items() if key not in ("message", "finish_reason", "index")}
            # Two chunks, like real engines: some clients ignore the delta of a chunk with a finish reason.
            events.append({**top, "choices": [{"index": index, "delta": delta, **other, "finish_reason": None}]})
            end = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
            events.append({**top, "choices": [end]})
        if response.get("usage") and (body.get("stream_options") or {}).get("include_usage"):
            events.append({**top, "choices": [], "usage": response["usage"]})
        return [*(event_bytes(dumps(event)) for event in events), event_bytes(STREAM_DONE)]

    def setting(self, body: Json) -> list[Any]:
        messages = dicts_in(body.get("messages"))
        tools = [tool.get("function") or tool for tool in dicts_in(body.get("tools"))]
        system = [reduced_message(message) for message in messages[: _leading(messages)]]
        return [system, sorted(str(tool.get("name")) for tool in tools)]

    def items(self, body: Json) -> list[Any]:
        messages = dicts_in(body.get("messages"))
        return [reduced_message(message) for message in messages[_leading(messages) :]]

    def reply_items(self, response: Json) -> list[Any]:
        choices = response.get("choices") or [{}]
        return [reduced_message(choices[0].get("message") or {"role": "assistant"})]


def _force_usage(sent: Json, options: CallOptions, forced: set[str]) -> None:
    stream_options = as_dict(sent.get("stream_options"))
    if options.allows(USAGE) and stream_options.get("include_usage") is not True:
        forced.add(USAGE)
        sent["stream_options"] = {**stream_options, "include_usage": True}


def _limit_tokens(sent: Json, options: CallOptions) -> int | None:
    """Set the token limit under the one name that the model accepts, and return it."""
    # Only one name: if several are set, engines differ in their choice. llama.cpp prefers `n_predict`.
    asked = [sent.pop(name) for name in OUTPUT_LIMITS if name in sent]
    limit = capped(next(filter(token_limit, asked), None), options.max_tokens)
    renames = options.model.rpartition("/")[2].startswith(RENAMES_MAX_TOKENS) or not options.allows("max_tokens")
    if limit is not None:
        sent["max_completion_tokens" if renames else "max_tokens"] = limit
    for name in (*MINIMUM_LIMITS, *THINKING_LIMITS):
        if limit is not None and (token_limit(sent.get(name)) or 0) > limit:
            sent[name] = limit
    return limit


def _strip(value: Json, choices: Any, forced: frozenset[str]) -> Json:
    # Runs for every chunk: a chunk without forced fields is returned unchanged, so its bytes are not encoded again.
    unwanted = _unwanted(forced)
    top = TOKEN_IDS in forced and any(key in value for key in (*_PROMPT_IDS, *_VERSION_HOLDERS))
    dirty = [isinstance(choice, dict) and not unwanted.isdisjoint(choice) for choice in choices or ()]
    if not top and not any(dirty):
        return value
    visible = dict(value)
    if top:
        # SGLang's `metadata` has lists of versions, which OpenAI's clients refuse there.
        for key in (*_PROMPT_IDS, *_VERSION_HOLDERS):
            visible.pop(key, None)
    if any(dirty):
        visible["choices"] = [
            {key: item for key, item in choice.items() if key not in unwanted} if is_dirty else choice
            for choice, is_dirty in zip(choices, dirty, strict=True)
        ]
    return visible


@functools.cache
def _unwanted(forced: frozenset[str]) -> frozenset[str]:
    names: set[str] = set()
    if LOGPROBS in forced:
        names.add("logprobs")
    if TOKEN_IDS in forced:
        names.update(_CHOICE_IDS)
        names.update(("routed_experts", "weight_versions"))  # vLLM sends them unasked
        names.update(_PROMPT_IDS)
    return frozenset(names)


def _worth_sending(chunk: Json, visible: Json) -> bool:
    """Return whether a chunk has more than IDs."""
    # For example {"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [151645]}]}: a special token, or
    # half a character. Clients that count or time chunks would see more output than there is.
    for choice in visible.get("choices") or ():
        if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
            return True
        if any(value not in (None, "", []) for value in (choice.get("delta") or {}).values()):
            return True
        if "text" in choice:
            return True
    return not visible.get("choices") and (bool(chunk.get("usage")) or "error" in chunk)


def _take_prompt_ids(value: Json) -> list[int] | None:
    prompt_ids: list[int] | None = None
    for holder in (value, *dicts_in(value.get("choices"))):
        for key in _PROMPT_IDS:
            if isinstance(holder.get(key), list):
                ids = holder.pop(key)
                prompt_ids = prompt_ids or ids
    return prompt_ids or _sgl_ids(value, "prompt_token_ids") or None


def _leading(messages: list[Json]) -> int:
    """Return the number of system texts at the beginning."""
    roles = [message.get("role") in ("system", "developer") for message in messages]
    return roles.index(False) if False in roles else len(roles)


def reduced_message(message: Json) -> list[Any]:
    """Return a message as a value to compare: two forms of one message have the same."""
    # Agents parse an answer and send it back in another form: a text as a list of one part, calls with new IDs and
    # re-encoded arguments ({"a": 1} for {"a":1}), no thoughts.
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in dicts_in(content) if part.get("type") == "text"]
        content = "".join(text for text in texts if isinstance(text, str)) if len(texts) == len(content) else content
    functions = [call.get("function") or {} for call in dicts_in(message.get("tool_calls"))]
    calls = [[function.get("name"), _canonical(function.get("arguments"))] for function in functions]
    return [message.get("role"), content.strip() if isinstance(content, str) else content or "", calls]


def _canonical(arguments: Any) -> str:
    """Return the arguments of a call in canonical form: sorted keys, standard spaces."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments).strip()


def _first_list(choice: Json, keys: tuple[str, ...]) -> list[int]:
    for key in keys:
        value = choice.get(key)
        if isinstance(value, list):
            return value
    return []


def _entries(choice: Json) -> list[Any]:
    return as_list(as_dict(choice.get("logprobs")).get("content"))


def _sgl_ids(value: Json, key: str) -> list[int]:
    """Read IDs from SGLang's extension object: one list per choice, or one list."""
    ids = as_list(as_dict(value.get("sglext")).get(key))
    return ids[0] if ids and isinstance(ids[0], list) else ids


def _routed_experts(response: Json, choice: Json) -> str | None:
    holders = (choice, as_dict(choice.get("meta_info")), as_dict(response.get("sglext")))
    found = (holder.get("routed_experts") for holder in holders)
    values = [value[0] if isinstance(value, list) and value else value for value in found]
    return next((value for value in values if isinstance(value, str)), None)


def _error_in(response: Json) -> Json | None:
    # {"error": {"message": "...", "code": 400}} of most engines; {"error": "..."} of some gateways.
    error = response.get("error")
    if isinstance(error, dict):
        return error
    return {"message": str(error)} if error else None


# A weight update during an answer gives its tokens two versions:
#
#   vLLM     {"choices": [{"weight_versions": [{"version": "7", "start": 0, "end": 57}, {"version": "8", ...}]}]}
#   SGLang   {"metadata": {"weight_version": "8", "weight_versions": [...]}}, in newer releases in "sglext"


def _weight_version(response: Json) -> str | None:
    holders = (as_dict(response.get(name)) for name in _VERSION_HOLDERS)
    versions = (holder.get("weight_version") for holder in holders)
    return next((str(version) for version in versions if version is not None), None)


def _version_spans(response: Json, choice: Json, count: int) -> tuple[VersionSpan, ...]:
    """Return the versions of the sampled tokens; empty if the engine's list does not cover exactly these tokens."""
    holders = (choice, as_dict(choice.get("meta_info")), *(as_dict(response.get(name)) for name in _VERSION_HOLDERS))
    listed = next((found for holder in holders if (found := dicts_in(holder.get("weight_versions")))), [])
    spans: list[VersionSpan] = []
    end = 0
    for item in listed:
        if item.get("start") != end or not isinstance(item.get("end"), int) or item.get("version") is None:
            return ()
        end = item["end"]
        spans.append(VersionSpan(str(item["version"]), item["start"], end))
    return tuple(spans) if end == count else ()
