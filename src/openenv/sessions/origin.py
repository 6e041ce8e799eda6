"""`Origin`: what a requester calls its request, and the trace that it belongs to. For logs and traces only."""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """Where a call comes from.

    Args:
        request_id: The id that the requester gave it.
        traceparent: The trace that it is part of, as in W3C Trace Context.
    """

    request_id: str | int | None = None
    traceparent: str | None = None
