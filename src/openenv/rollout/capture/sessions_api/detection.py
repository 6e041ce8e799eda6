"""The dialect of a request: by its path, else by a header, else by its body."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ..dialects import route


class APIType(str, Enum):
    """The dialects that agents speak."""

    ANTHROPIC = "anthropic"
    OPENAI_CHAT = "openai_chat"
    OPENAI_RESPONSES = "openai_responses"
    GOOGLE = "google"


# The path decides, if it is one of the four APIs. Proxies in front of an agent rewrite paths, so a header or the fields
# of the body decide otherwise: `contents` is Google's, `input` with `instructions` is the responses API's.
def detect(path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> APIType:
    """Return the dialect of a request; chat completions by default."""
    target = route(path.partition("?")[0])
    if target is not None:
        return APIType(target.dialect.name)
    if any(name.lower() == "anthropic-version" for name in headers):
        return APIType.ANTHROPIC
    if "contents" in body:
        return APIType.GOOGLE
    return APIType.OPENAI_RESPONSES if "input" in body and "instructions" in body else APIType.OPENAI_CHAT


def extract_model(api_type: APIType, body: Mapping[str, Any]) -> str:
    """Return the model that a request names."""
    name = body.get("model", "gemini-pro" if api_type is APIType.GOOGLE else "unknown")
    return str(name)
