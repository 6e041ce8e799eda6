"""The failures of model calls.

Published, raised by clients of endpoints:

    UpstreamError
    ├── UpstreamRequestError            the request has no form in the endpoint's dialect
    │   └── ProviderConversionError     the request or the answer has no form in the other dialect
    ├── UpstreamHTTPError               the endpoint answered with an error
    ├── UpstreamTimeoutError            the endpoint did not answer in time
    └── UpstreamTransportError          the endpoint cannot be reached

Inside the proxy a call that cannot go on raises `ProxiedCallFailed`: how it ended, and the agent's error.
"""

from __future__ import annotations

from .encoding import Json

REFUSALS = frozenset({400, 413, 422})
"""Statuses of an endpoint that does not accept a request. They are not failures of the endpoint."""


class UpstreamError(RuntimeError):
    """The endpoint gave no answer."""


class UpstreamRequestError(UpstreamError):
    """The endpoint's dialect has no form for a request."""


class ProviderConversionError(UpstreamRequestError, ValueError):
    """The other dialect has no form for a request or an answer."""


class UpstreamHTTPError(UpstreamError):
    """The endpoint answered with an error.

    Args:
        status_code: The status of the answer.
        body: The body of the answer.
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


# How a call ends in the records, and the agent's status:
#
#   failed         the endpoint's; for 401 and 403 without its text       record_failed   507
#   unreachable    502, nothing came back                                 revoked         403
#   timeout        504                                                    budget          429, or a final answer
#   broken         502, incomplete or invalid                             context         a final answer
#   agent_gone     none: the agent hung up                                cancelled       499: the server stops


class ProxiedCallFailed(Exception):
    """A call cannot go on; the agent gets this error in its dialect.

    Args:
        how: The call's ending in the records.
        status: The status for the agent.
        message: The text for the agent.
        error: The details for the records; by default the message.
    """

    def __init__(self, how: str, status: int, message: str, *, error: Json | None = None) -> None:
        super().__init__(message)
        self.how = how
        self.status = status
        self.error: Json = error or {"message": message}
        self.native_body: bytes | None = None
        """The endpoint's own error body, for an agent that speaks the endpoint's dialect."""
        self.headers: list[tuple[str, str]] = []

    @property
    def is_context_limit(self) -> bool:
        """Return whether the endpoint refused the request because its conversation is too long."""
        body = self.error.get("body")
        error = body.get("error") if isinstance(body, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        text = str(self).lower()
        is_stated = code == "context_length_exceeded" or ("maximum context length" in text and "tokens" in text)
        return self.status == 400 and is_stated


def error_message(parsed: Json | None) -> str | None:
    """Return the text of an error in any of the shapes that endpoints use."""
    error = (parsed or {}).get("error", parsed)
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail")
        return str(message) if message else None
    return str(error) if error else None
