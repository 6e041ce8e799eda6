"""Logs as JSON, one object per line, with the session and the request that each line is about.

The lines of an environment carry them too, with any logger. Knows `logging` and watched calls.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

from openenv.protocol.redaction import redacted

from .watched_calls import CURRENT

# Attributes of every record; any other comes from `extra`. `color_message` is uvicorn's, with terminal escapes.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


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
                "traceback": record.exc_text or redacted(self.formatException(record.exc_info)),
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
