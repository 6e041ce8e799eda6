"""Repairs of refused requests: the one change that an endpoint's error asks for.

Providers refuse parameters that others require, model by model, each with its own error text:

    Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.
    Unsupported value: 'temperature' does not support 0 with this model.      (code: unsupported_value)
    Unrecognized request argument supplied: return_token_ids
    ... use /v1/responses or set reasoning_effort to 'none'.
    `temperature` is deprecated for this model.
    Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.

A parameter counts only if the text clearly names it as one: a request must not be changed on a guess.

Decides on the change; `call_request`, `engine_client` and `engine_probe` apply it and send again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .encoding import Json

REQUIRED = frozenset({"model", "messages", "input", "stream", "tools", "tool_choice"})
"""Parameters that are never changed: the caller must see an error about them."""
MAX_FIXES = 6
"""The number of changes to try."""

# Engines differ in the parameters that they accept, and there is no way to ask. The proxy sends the parameters of
# the capture, and leaves out a parameter that an error names. For example, vLLM with `--max-logprobs 0`:
#     400 {"message": "Requested sample logprobs of 5, which is greater than max allowed: 0"}
# This has the word "logprobs": `top_logprobs` goes first, because `logprobs` alone may be accepted.
_FORCED = (
    ("return_token_ids", ("return_token_ids",)),
    ("return_routed_experts", ("return_routed_experts",)),
    ("logprobs", ("top_logprobs", "logprobs")),
    ("stream_options", ("stream_options",)),
    ("chat_template_kwargs", ("chat_template_kwargs",)),
    ("max_completion_tokens", ("max_tokens",)),
    ("seed", ("seed",)),
    # Sampling parameters without effect; `is_neutral` checks the value.
    *((name, (name,)) for name in ("top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")),
    *((name, (name,)) for name in ("top_p", "temperature")),
)
"""A word in a complaint, and the parameters to leave out then, in this order."""
_NAME = r"([A-Za-z0-9_.]+)"
_IN_QUOTES = rf"['`]{_NAME}['`]"
# One expression per form of the texts above.
_UNKNOWN = re.compile(rf"unrecognized request argument supplied:\s*{_NAME}", re.IGNORECASE)
_QUOTED = re.compile(_IN_QUOTES)
_INSTEAD = re.compile(rf"use {_IN_QUOTES} instead", re.IGNORECASE)
_SET_TO = re.compile(rf"set {_NAME} to ['`]([A-Za-z0-9_.-]+)['`]")
_TURNED_DOWN = re.compile(rf"{_IN_QUOTES}\s+is\s+(?:deprecated|not supported|unsupported)")
_BOTH = re.compile(rf"setting {_IN_QUOTES} and {_IN_QUOTES}.*?(?:not supported|cannot|at the same time)", re.IGNORECASE)
_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter")
_OPENINGS = ("Unsupported parameter", "Unsupported value", "Unknown parameter")
_OLDER = {"max_tokens": "max_completion_tokens", "functions": "tools", "function_call": "tool_choice"}
"""Parameters with a newer name; the older one is dropped if the endpoint refuses both together."""
NO_LOGPROBS = "you are not allowed to request logprobs from this model"
_CONSEQUENCES = {
    "reasoning_effort": "the model's reasoning is off, which this endpoint requires for tools: agents may stop early",
    "temperature": "the agent's temperature does not reach the model: the endpoint's default counts",
    "top_p": "the agent's top_p does not reach the model: the endpoint's default counts",
    "top_k": "the agent's top_k does not reach the model: the endpoint's default counts",
}


@dataclass(frozen=True)
class ParamFix:
    """A change of a request: a parameter is dropped, renamed, or set to a value."""

    param: str
    replacement: str = ""
    """Its new name."""
    value: str | None = None
    """Its new value."""

    @property
    def action(self) -> str:
        """Return `set`, `rename` or `drop`."""
        if self.value is not None:
            return "set"
        return "rename" if self.replacement else "drop"

    def apply(self, body: Json) -> bool:
        """Change a request in place; return whether that makes a difference."""
        if self.value is not None:
            changes = body.get(self.param) != self.value
            body[self.param] = self.value
            return changes
        names = [self.param]
        if self.param == "logprobs" and not self.replacement:
            names.append("top_logprobs")  # endpoints refuse it alone
        present = [name for name in names if name in body]
        for name in present:
            value = body.pop(name)
            if self.replacement:
                body[self.replacement] = value
        return bool(present)

    def __str__(self) -> str:
        if self.value is not None:
            return f"set {self.param}={self.value}"
        return f"renamed {self.param} -> {self.replacement}" if self.replacement else f"dropped {self.param}"


def diagnose(body: Any) -> ParamFix | None:
    """Return the change that an error asks for; None if it asks for none.

    Args:
        body: The error's body: an object in OpenAI's form, or text.
    """
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return None
    message, code = str(error.get("message") or ""), str(error.get("code") or "")
    if message.strip().lower() == NO_LOGPROBS:
        return ParamFix("logprobs")
    # From the most specific text to the least: an error may match several of them.
    both = _BOTH.search(message)
    if both is not None:
        older = next((name for name, other in (both.groups(), both.groups()[::-1]) if _OLDER.get(name) == other), None)
        return None if older is None else ParamFix(older)
    demanded = _SET_TO.search(message)
    if demanded is not None and demanded[1] not in REQUIRED:
        return ParamFix(demanded[1], value=demanded[2])
    unknown = _UNKNOWN.search(message)
    if unknown is not None:
        return _change(unknown[1], message)
    if code in _CODES or message.startswith(_OPENINGS):
        quoted = _QUOTED.search(message)
        return _change(str(error.get("param") or (quoted[1] if quoted is not None else "")), message)
    turned_down = _TURNED_DOWN.search(message)
    return None if turned_down is None else _change(turned_down[1], message)


def next_fix(status: int, error: Any, request: Json, *, applied: Collection[ParamFix]) -> ParamFix | None:
    """Return the change to try after a refusal; None if the caller must see the error.

    Args:
        status: The status of the refusal.
        error: Its body, as for `diagnose`.
        request: The refused request, which stays as it is.
        applied: The changes that are in the request already.
    """
    # 403 is about the key, with one exception: an endpoint that gives log-probabilities to some keys only.
    is_refusal = status == 400 or (status == 403 and NO_LOGPROBS in str(error).lower())
    if not is_refusal or len(applied) >= MAX_FIXES:
        return None
    fix = diagnose(error)
    return fix if fix is not None and fix not in applied and fix.apply(dict(request)) else None


# The loop of clients and probes: send, repair, send again. Agents' calls repair in `call_request`, which also removes
# forced parameters and shares repairs between rollouts only after success.
def repair(status: int, error: Any, request: Json, fixes: list[ParamFix]) -> bool:
    """Change a refused request in place and add the change to `fixes`; return False if nothing can be changed."""
    fix = next_fix(status, error, request, applied=fixes)
    if fix is None:
        return False
    fix.apply(request)
    fixes.append(fix)
    return True


# The word must be in the error. Endpoints that refuse a request without naming the parameter cannot be helped.
def forced_parameters_named(complaint: str) -> Iterator[str]:
    """Yield the parameters of the capture that an error may be about, the first one to leave out first."""
    for word, parameters in _FORCED:
        if word in complaint:
            yield from parameters


def _change(name: str, message: str) -> ParamFix | None:
    if not name or name in REQUIRED:
        return None
    instead = _INSTEAD.search(message)
    # "use 'temperature' instead" in an error about `temperature` means another value.
    replacement = instead[1] if instead is not None and instead[1] not in REQUIRED | {name} else ""
    return ParamFix(name, replacement)


def behaviour_warnings(fixes: Iterable[Any] | None) -> list[str]:
    """Return a warning for each change that affects the model's behaviour.

    Args:
        fixes: `ParamFix` objects, or their texts.
    """
    warnings = []
    for fix in fixes or ():
        name = str(getattr(fix, "param", "") or fix)
        parameter = next((parameter for parameter in _CONSEQUENCES if parameter in name), None)
        if parameter is not None:
            warnings.append(f"{parameter}: {_CONSEQUENCES[parameter]}")
    return warnings
