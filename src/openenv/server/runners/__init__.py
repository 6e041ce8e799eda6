"""Where environment code runs. A runner hands out lanes; one lane runs one session's calls, one at a time."""

from __future__ import annotations

from .base import (
    Lane,
    LaneCall,
    LaneExecutor,
    NotSendable,
    ProcessOptions,
    Runner,
    allowed_cores,
    cores,
    has_affinity,
    make_runner,
)
from .dispatcher import Dispatcher, current_dispatcher, loop_local
from .inline import InlineRunner
from .thread import ThreadRunner

__all__ = [
    "Dispatcher",
    "InlineRunner",
    "Lane",
    "LaneCall",
    "LaneExecutor",
    "NotSendable",
    "ProcessOptions",
    "Runner",
    "ThreadRunner",
    "allowed_cores",
    "cores",
    "current_dispatcher",
    "has_affinity",
    "loop_local",
    "make_runner",
]
