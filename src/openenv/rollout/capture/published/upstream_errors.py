"""Why a model endpoint did not answer.

UpstreamError
├── UpstreamRequestError        the request cannot be said in the endpoint's dialect
├── UpstreamHTTPError           it answered with an error
├── UpstreamTimeoutError        it did not answer in time
└── UpstreamTransportError      it cannot be reached

"""

from __future__ import annotations

from ..encoding import Json
from ..model_call import error_message


class UpstreamError(RuntimeError):
    """The endpoint did not answer."""


class UpstreamRequestError(UpstreamError):
    """A request cannot be said in the endpoint's dialect."""


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
