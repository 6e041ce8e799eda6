"""The request of a model call, as the agent sent it and as the endpoint gets it.

Knows parameters and dialects. Knows nothing of connections, retries or answers.
"""

# From the agent's request to the endpoint's:
#
#   agent's body --> allow ------> bridge -------> rewrite -----------------> fixes ---------> endpoint's body
#                    parameters    translates      model, token limit,        changes that
#                    that agents   to the other    sampling, log-probabili-   endpoints asked
#                    may set       dialect         ties, token IDs            for
#
# If the endpoint refuses the result, `repair` changes one thing and the whole chain runs again.

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..tasks.model_parameters import SAMPLING_PARAMETERS, allow, hidden_items, is_neutral, steering
from .captured_rollout import CapturedRollout
from .dialects.dialect import STREAM, AgentDialect, Bridge, CallOptions, ModelDialect, is_text_message
from .encoding import Json, dumps
from .parameter_fixes import ParamFix, forced_parameters_named, next_fix
from .token_in import TokenCall
from .upstream_errors import REFUSALS


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An agent's request, its dialect, and the dialect of the endpoint."""

    dialect: AgentDialect
    path: str
    body: Json
    headers: Mapping[str, str]
    endpoint: ModelDialect
    bridge: Bridge | None = None
    """Translates between the two dialects; None if they are the same."""
    query: str = ""

    @property
    def wants_stream(self) -> bool:
        """Return whether the agent asks for a stream."""
        return self.body.get("stream") is True


class PreparedRequest:
    """The request for the endpoint, and its repairs."""

    def __init__(self, request: CallRequest, rollout: CapturedRollout) -> None:
        self._request = request
        self._rollout = rollout
        model = rollout.model
        self._allowed = allow(request.dialect.name, request.body, engine=model.engine, may_set=model.agent_may_set)
        self.token_call: TokenCall | None = None
        """The request with token IDs that is sent instead of `body`; None to send `body`."""
        self._fixes: list[ParamFix] = []  # of this call; the rollout gets them once a repaired request succeeded
        self._write(rollout.call_options())

    def _write(self, options: CallOptions) -> None:
        request, body = self._request, self._allowed.body
        if request.bridge is not None:
            body = request.bridge.request(body)
        rewritten = request.endpoint.rewrite(body, options)
        for fix in (*(self._rollout.traits.fixes or ()), *self._fixes):
            fix.apply(rewritten.body)
        self.options = options
        self.body: Json = rewritten.body
        self.forced: frozenset[str] = rewritten.forced
        """The fields that the proxy asks for and the agent did not; the agent must not see them."""
        self.limit: int | None = rewritten.limit
        """The most tokens that the endpoint may sample; None for no limit."""

    @property
    def is_streamed(self) -> bool:
        """Return whether the endpoint is asked for a stream."""
        return self.body.get("stream") is True and self.token_call is None

    def facts(self) -> Json:
        """Return the facts about the request that are recorded with its two bodies."""
        request = self._request
        facts: Json = {"dialect": request.dialect.name, "to": request.endpoint.name, "path": request.path}
        reasons = dict.fromkeys(steering(request.endpoint.name, self.body))
        # A bridge drops references to items: the agent's request names them, the endpoint's does not.
        if any(self.body.get(name) is not request.body.get(name) for name in ("input", "messages")):
            reasons |= dict.fromkeys(hidden_items(request.body))
        facts |= {"stream": request.wants_stream, "not_trainable": list(reasons)}
        return facts | ({"removed": self._allowed.removed} if self._allowed.removed else {})

    def repair(self, status: int, error: Json) -> bool:
        """Change the request after a refusal, if the refusal says how; return whether it changed.

        This ends: each repair removes an option or uses up one of `MAX_FIXES`.
        """
        return self._leave_out_forced(status, error) or self._fix(status, error)

    # Only after success: an agent could provoke refusals, and later calls must not lose parameters for that.
    def accepted(self) -> None:
        """Let the rollout's next calls use the repairs of this one: the endpoint accepted the request."""
        self._rollout.refused = self.options.refused
        shared = self._rollout.traits.fixes
        if shared is not None:
            shared.extend(fix for fix in self._fixes if fix not in shared)

    def _leave_out_forced(self, status: int, error: Json) -> bool:
        """Leave out a forced parameter that the endpoint complains about.

        Only the proxy's own values count. Otherwise an agent could provoke complaints about its values, and so switch
        off the capture of token IDs.
        """
        if status not in REFUSALS:
            return False
        complaint = dumps(error).decode().lower()
        if self.is_streamed and "return_token_ids" in complaint and "stream" in complaint:
            return self._leave_out(STREAM)  # this engine sends IDs with whole answers only
        for parameter in forced_parameters_named(complaint):
            if self._is_ours(parameter) and self._leave_out(parameter):
                return True
        return False

    def _is_ours(self, parameter: str) -> bool:
        if parameter in self.forced:
            return True
        # The trainer's temperature of 0.7 must reach the endpoint, or the call fails. A `top_k` of -1 need not.
        if parameter in SAMPLING_PARAMETERS and not is_neutral(parameter, self.body.get(parameter)):
            return False
        # The proxy writes its own limit into every request.
        is_changed = parameter == "max_tokens" or self.body.get(parameter) != self._request.body.get(parameter)
        return parameter in self.body and is_changed

    def _leave_out(self, parameter: str) -> bool:
        if not self.options.allows(parameter):
            return False
        self._write(self.options.without(parameter))
        return True

    def _fix(self, status: int, error: Json) -> bool:
        """Change the request as the endpoint asks for, in a rollout that allows it."""
        shared = self._rollout.traits.fixes
        if shared is None:
            return False
        fix = next_fix(status, error.get("body") or error.get("message"), self.body, applied=[*shared, *self._fixes])
        if fix is None:
            return False
        self._fixes.append(fix)
        self._write(self.options)
        return True


# Content that the endpoint would fetch for the agent: the agent reaches the network, local files of the engine, or
# files of the provider's account with a key that it does not have. The same for all four dialects:
#
#   chat        {"type": "image_url", "image_url": {"url": U}}     {"type": "file", "file": {"file_id": U}}
#   responses   {"type": "input_image", "image_url": U}            {"type": "input_file", "file_url": U}
#   Anthropic   {"type": "image", "source": {"type": "url", "url": U}}
#   Google      {"fileData": {"mimeType": "image/png", "fileUri": U}}
#
# Engines accept more forms than these, at any depth. So a field of a listed name must contain its content, and a value
# that starts like an address is accepted only in a field for texts.
_REFERENCES = ("url", "uri")
_MEDIA = frozenset({"image", "video", "audio", "filedata", "fileid", "inputimage"})
_TEXTS = re.compile(
    "content|text|arguments|output|refusal|reasoning(content)?|thinking|summary|name|title|context|filename|code|query"
    "|description|(call|tool_?call|tool_?use)?id|(thought)?signature|encryptedcontent|detail|error"
)
_VALUES = frozenset({"arguments", "args", "input", "response", "annotations", "citations", "action", "results"})
"""Fields with values of tools or of the model, which nothing fetches: `{"arguments": {"url": "https://..."}}`."""
_RESULTS = frozenset({"search_result", "web_search_result", "web_fetch_result", "url_citation"})
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_NAMED_LENGTH = 60  # characters of a refused URL in the error


def remote_content(dialect: AgentDialect, body: Json, *, schemes: Collection[str]) -> Iterator[str]:
    """Yield an error text for each part of the messages that names its content instead of containing it.

    Args:
        dialect: The agent's dialect.
        body: The agent's request.
        schemes: The accepted schemes, such as `data`; `file` for paths, `file_id` for IDs of files.
    """
    fields: list[tuple[str, Any]] = [(name, body.get(name)) for name in reversed(dialect.counted_fields)]
    pending = [(name, value, "") for name, value in fields if name != "tools"]
    while pending:
        place, value, name = pending.pop()
        if isinstance(value, dict):
            is_text = value.get("type") == "text"
            for key, item in reversed(value.items()):
                if isinstance(item, dict | list) and key not in _VALUES:
                    pending.append((f"{place}.{key}", item, key))
                elif isinstance(item, str) and not (is_text and key in ("text", "data")):
                    pending.append((f"{place}.{key}", item, "" if _is_result(value, key) else key))
        elif isinstance(value, list):
            others = [(index, item) for index, item in enumerate(value) if not is_text_message(item)]
            pending += [(f"{place}[{index}]", item, name) for index, item in reversed(others)]
        elif isinstance(value, str) and name:
            scheme = _remote_scheme(name, value)
            if scheme is not None and scheme not in schemes:
                yield f"{place} refers to remote content: {value[:_NAMED_LENGTH]!r}"


def _is_result(value: Json, key: str) -> bool:
    return key in ("url", "source") and value.get("type") in _RESULTS


def _remote_scheme(name: str, value: str) -> str | None:
    """Return the scheme of a field that refers to content; None for any other field."""
    plain = name.replace("_", "").lower()
    head = value[:256].strip().lower()
    if plain == "data":  # base64, except that some engines take a URL in its place
        return head.partition("://")[0] if "://" in head else None
    one = plain.removesuffix("s")  # {"image_urls": [...]}
    if not one.endswith(_REFERENCES) and one not in _MEDIA:
        return head.partition("://")[0] if _ADDRESS.match(head) and not _TEXTS.fullmatch(plain) else None
    if plain == "fileid":
        return "file_id"
    scheme, colon, _ = head.partition(":")
    if plain == "filedata" and not colon:  # OpenAI accepts base64 without a `data:` URL
        return None
    return scheme if colon else "file"  # SGLang opens a path without a scheme
