"""What an endpoint's error says about a parameter of the request, as the one change with which to ask again.

Providers turn down parameters that others need, model by model, and say so in texts of their own:

    Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.
    Unsupported value: 'temperature' does not support 0 with this model.      (code: unsupported_value)
    Unrecognized request argument supplied: return_token_ids
    ... use /v1/responses or set reasoning_effort to 'none'.
    `temperature` is deprecated for this model.
    Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.

A parameter counts only where the text names it as one: a request must not be changed on a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .encoding import Json

KEPT = frozenset({"model", "messages", "input", "stream", "tools", "tool_choice"})
"""What a request cannot do without: an error about these is one that the caller must see."""
MAX_FIXES = 6
"""How many changes are worth trying."""
_NAME = r"([A-Za-z0-9_.]+)"
_IN_QUOTES = rf"['`]{_NAME}['`]"
_UNKNOWN = re.compile(rf"unrecognized request argument supplied:\s*{_NAME}", re.IGNORECASE)
_QUOTED = re.compile(_IN_QUOTES)
_INSTEAD = re.compile(rf"use {_IN_QUOTES} instead", re.IGNORECASE)
_SET_TO = re.compile(rf"set {_NAME} to ['`]([A-Za-z0-9_.-]+)['`]")
_TURNED_DOWN = re.compile(rf"{_IN_QUOTES}\s+is\s+(?:deprecated|not supported|unsupported)")
_BOTH = re.compile(rf"setting {_IN_QUOTES} and {_IN_QUOTES}.*?(?:not supported|cannot|at the same time)", re.IGNORECASE)
_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter")
_OPENINGS = ("Unsupported parameter", "Unsupported value", "Unknown parameter")
_OLDER = {"max_tokens": "max_completion_tokens", "functions": "tools", "function_call": "tool_choice"}
"""Parameters with a newer name: of the two, the older one goes."""
NO_LOGPROBS = "you are not allowed to request logprobs from this model"
_CONSEQUENCES = {
    "reasoning_effort": "the model's reasoning is off, which this endpoint demands for tools: agents may stop early",
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
    """What it is set to."""

    @property
    def action(self) -> str:
        """Return `set`, `rename` or `drop`."""
        return "set" if self.value is not None else "rename" if self.replacement else "drop"

    def apply(self, body: Json) -> bool:
        """Change a request in place; False where that makes no difference."""
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
    """Return the change that an error asks for; None where it asks for none.

    Args:
        body: The error's body: an object as OpenAI has it, or text.
    """
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return None
    message, code = str(error.get("message") or ""), str(error.get("code") or "")
    if message.strip().lower() == NO_LOGPROBS:
        return ParamFix("logprobs")
    both = _BOTH.search(message)
    if both is not None:
        older = next((name for name, other in (both.groups(), both.groups()[::-1]) if _OLDER.get(name) == other), None)
        return None if older is None else ParamFix(older)
    demanded = _SET_TO.search(message)
    if demanded is not None and demanded[1] not in KEPT:
        return ParamFix(demanded[1], value=demanded[2])
    unknown = _UNKNOWN.search(message)
    if unknown is not None:
        return _change(unknown[1], message)
    if code in _CODES or message.startswith(_OPENINGS):
        quoted = _QUOTED.search(message)
        return _change(str(error.get("param") or (quoted[1] if quoted is not None else "")), message)
    turned_down = _TURNED_DOWN.search(message)
    return None if turned_down is None else _change(turned_down[1], message)


def _change(name: str, message: str) -> ParamFix | None:
    if not name or name in KEPT:
        return None
    instead = _INSTEAD.search(message)
    # "use 'temperature' instead" in an error about `temperature` means another value.
    replacement = instead[1] if instead is not None and instead[1] not in KEPT | {name} else ""
    return ParamFix(name, replacement)


def behaviour_warnings(fixes: Iterable[Any] | None) -> list[str]:
    """Return what changes mean for what the model does; those that only rename mean nothing.

    Args:
        fixes: `ParamFix`es, or their texts.
    """
    warnings = []
    for fix in fixes or ():
        name = str(getattr(fix, "param", "") or fix)
        known = next((known for known in _CONSEQUENCES if known in name), None)
        if known is not None:
            warnings.append(f"{known}: {_CONSEQUENCES[known]}")
    return warnings
