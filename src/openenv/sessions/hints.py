"""What is added to an environment's own exception where its session tells more about the cause.

Knows sessions and exceptions; must not know how a failure is sent.
"""

from __future__ import annotations

from typing import Final

from ..errors import ExecutionError, OpenEnvError, message_of
from .session import Session

_NEVER_RESET: Final = " (reset() has not been called in this session yet)"


def hint(session: Session, kind: str) -> str:
    """Return what to append to the text of an exception that an operation of that kind has raised."""
    return _NEVER_RESET if kind == "step" and not session.was_reset else ""


def hinted(shown: BaseException, session: Session, kind: str) -> BaseException:
    """Return a failure as clients may see it, with a hint; what the framework itself raises stays as it is."""
    text = hint(session, kind)
    if not text or (isinstance(shown, OpenEnvError) and not isinstance(shown, ExecutionError)):
        return shown
    details = shown.details if isinstance(shown, OpenEnvError) else None
    return ExecutionError(f"{message_of(shown)}{text}", details=details)
