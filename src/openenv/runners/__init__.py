"""Where environment code runs. A runner hands out lanes; one lane runs one session's calls, one at a time."""

from __future__ import annotations

from .base import (
    Host,
    Lane,
    LaneCall,
    NotSendable,
    PerishableLane,
    ProcessOptions,
    Runner,
    build_in,
    make_runner,
)
from .hub import Hub, current_hub
from .inline import InlineRunner
from .loop_local import loop_local
from .thread import ThreadRunner

__all__ = [
    "Host",
    "Hub",
    "InlineRunner",
    "Lane",
    "LaneCall",
    "NotSendable",
    "PerishableLane",
    "ProcessOptions",
    "Runner",
    "ThreadRunner",
    "build_in",
    "current_hub",
    "loop_local",
    "make_runner",
]
