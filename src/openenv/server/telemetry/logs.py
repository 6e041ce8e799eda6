"""Logs as JSON, one object per line, with the session and the request that each line is about.

The lines of an environment carry them too, with any logger. Knows `logging` and watched calls.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timezone
from typing import Any

from .watched_calls import CURRENT

# Attributes of every record; any other comes from `extra`. `color_message` is uvicorn's, with terminal escapes.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


# ?token=SECRET    https://user:SECRET@host    Authorization: Bearer SECRET
_SECRETS = re.compile(
    r"([?&](?:token|key|api_key|access_token)=)[^&\s\"'#]+|(://)[^/\s@\"']+@|(\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Return a text with `***` for tokens in query strings, passwords in URLs, and the values of authorization."""
    return _SECRETS.sub(lambda match: f"{match[1] or match[2] or match[3]}***{'@' if match[2] else ''}", text)


class RedactSecrets(logging.Filter):
    """Redacts the messages and tracebacks of all lines of a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change a record in place; keep it."""
        message = record.getMessage()
        clean = redacted(message)
        if clean != message:
            if record.name == "uvicorn.access" and isinstance(record.args, tuple):  # its formatter reads the arguments
                record.args = tuple(redacted(each) if isinstance(each, str) else each for each in record.args)
            else:
                record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return True


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object.

    Always: `time` (UTC), `level`, `logger`, `message`. If known: `session`, `request`, `operation`, `trace_id`, `error`
    with `type`, `message` and `traceback`, and the fields of `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown.update(_call_fields())
        for name, value in vars(record).items():
            if name not in _USUAL and not name.startswith("_"):
                shown[name] = value
        error = record.exc_info[1] if record.exc_info else None
        if record.exc_info and error is not None:
            shown["error"] = {
                "type": type(error).__name__,
                "message": redacted(str(error)),
                "traceback": redacted(self.formatException(record.exc_info)),
            }
        return json.dumps(shown, default=repr, ensure_ascii=False)


def _call_fields() -> dict[str, Any]:
    """Describe the call that logs the line."""
    call = CURRENT.get()
    if call is None:
        return {}
    fields: dict[str, Any] = {"session": call.session_id, "operation": call.kind}
    origin = call.origin
    if origin is not None and origin.request_id is not None:
        fields["request"] = origin.request_id
    if origin is not None and origin.traceparent is not None:
        fields["trace_id"] = origin.traceparent.split("-")[1] if "-" in origin.traceparent else origin.traceparent
    return fields
