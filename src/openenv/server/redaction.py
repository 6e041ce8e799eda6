"""What clients learn of a failure: the exception's own text, or only an id under which the log has the rest.

Knows exceptions and the log; must not know requests. What the framework itself says, what a tool tells the agent that
has called it, and what is wrong with a request is always shown.
"""

from __future__ import annotations

import logging
import secrets
from typing import overload

from ..errors import (
    AccessDenied,
    EnvironmentFactoryError,
    ExecutionError,
    OpenEnvError,
    RequestCancelled,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
    ToolCallError,
    message_of,
)

logger = logging.getLogger(__name__)

# An environment may be a client of others; what else it raises is its own, whatever the class.
_SHOWN = (
    AccessDenied,
    EnvironmentFactoryError,  # says what `explain` has said
    RequestCancelled,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
    ToolCallError,
)


class Redaction:
    """Decides what is shown of the exceptions of one server's environments.

    Args:
        is_on: Whether their texts are kept from clients.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    @overload
    def shown(self, exc: OpenEnvError) -> OpenEnvError: ...

    @overload
    def shown(self, exc: BaseException) -> BaseException: ...

    def shown(self, exc: BaseException) -> BaseException:
        """Return an exception as clients may see it."""
        if not self._is_on or isinstance(exc, _SHOWN):
            return exc
        error_id = _logged(exc)
        text = f"The environment failed; the server's log has more under {error_id}."
        return ExecutionError(text, details={"error_id": error_id})

    def text(self, exc: BaseException) -> str:
        """Return the text of an exception as clients may see it."""
        return message_of(self.shown(exc))

    def explain(self, exc: BaseException) -> str:
        """Say why an environment could not be built."""
        if self._is_on:
            return f"the server's log has more under {_logged(exc)}"
        return f"{type(exc).__name__}: {message_of(exc)}"


def _logged(exc: BaseException) -> str:
    error_id = secrets.token_hex(6)
    logger.error("error %s: %s", error_id, type(exc).__name__, exc_info=exc)
    return error_id
