"""Why a model endpoint did not answer.

UpstreamError
├── UpstreamRequestError            the request cannot be said in the endpoint's dialect
│   └── ProviderConversionError     or the answer in the agent's
├── UpstreamHTTPError               it answered with an error
├── UpstreamTimeoutError            it did not answer in time
└── UpstreamTransportError          it cannot be reached
"""

from __future__ import annotations

from .encoding import Json


class UpstreamError(RuntimeError):
    """The endpoint did not answer."""


class UpstreamRequestError(UpstreamError):
    """A request cannot be said in the endpoint's dialect."""


class ProviderConversionError(UpstreamRequestError, ValueError):
    """A request or an answer cannot be said in the other dialect."""


class UpstreamHTTPError(UpstreamError):
    """The endpoint answered with an error.

    Args:
        status_code: Its status.
        body: What it said.
    """

    def __init__(self, status_code: int, body: Json | str | None = None) -> None:
        text = error_message(body) if isinstance(body, dict) else body
        super().__init__(f"upstream returned {status_code}: {str(text or body)[:400]}")
        self.status_code = status_code
        self.body = body


class UpstreamTimeoutError(UpstreamError):
    """The endpoint did not answer in time."""


class UpstreamTransportError(UpstreamError):
    """The endpoint cannot be reached, or hung up."""


def error_message(parsed: Json | None) -> str | None:
    """Return the text of an error in any of the shapes that endpoints use."""
    error = (parsed or {}).get("error", parsed)
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail")
        return str(message) if message else None
    return str(error) if error else None
