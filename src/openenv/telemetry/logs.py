"""Logs as JSON, one object per line, with the session and the request that each line is about.

What an environment logs while it runs is marked as well, whatever logger it uses. Knows `logging` and watched calls;
must not know who reads the lines.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

from .watched_calls import CURRENT

# What every record has; whatever else is there was given with `extra`. `color_message` is uvicorn's, with escapes.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object.

    Always there: `time` (UTC), `level`, `logger`, `message`. Where they are known: `session`, `request`, `operation`,
    `trace_id`, `error` with `type`, `message` and `traceback`, and whatever was given with `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown.update(_circumstances())
        for name, value in vars(record).items():
            if name not in _USUAL and not name.startswith("_"):
                shown[name] = value
        error = record.exc_info[1] if record.exc_info else None
        if record.exc_info and error is not None:
            shown["error"] = {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": self.formatException(record.exc_info),
            }
        return json.dumps(shown, default=repr, ensure_ascii=False)


def _circumstances() -> dict[str, Any]:
    """What is known of the call that runs where the line is logged."""
    call = CURRENT.get()
    if call is None:
        return {}
    found: dict[str, Any] = {"session": call.session_id, "operation": call.kind}
    origin = call.origin
    if origin is not None and origin.request_id is not None:
        found["request"] = origin.request_id
    if origin is not None and origin.traceparent is not None:
        found["trace_id"] = origin.traceparent.split("-")[1] if "-" in origin.traceparent else origin.traceparent
    return found
