"""Scripted models: servers that play a script of replies and tool calls in place of a language model.

For tests, demonstrations and benchmarks. Nothing here is a model, and every reply says so.
"""

from __future__ import annotations

from .script import (
    CutFailure,
    Failure,
    HangFailure,
    Script,
    ScriptedCall,
    StatusFailure,
    Turn,
    load_scripts,
)
from .server import ModelAddress, Played, ScriptedModel

__all__ = [
    "CutFailure",
    "Failure",
    "HangFailure",
    "ModelAddress",
    "Played",
    "Script",
    "ScriptedCall",
    "ScriptedModel",
    "StatusFailure",
    "Turn",
    "load_scripts",
]
