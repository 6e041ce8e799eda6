"""Scripted models: servers that play a given script of tool calls where a language model is asked for.

For tests, demonstrations and benchmarks; nothing here is a model, and every reply says so.
"""

from __future__ import annotations

from ...testing.scripted.script import (
    CutFailure,
    Failure,
    HangFailure,
    Script,
    ScriptedCall,
    StatusFailure,
    Turn,
    load_scripts,
)
from ...testing.scripted.server import ModelAddress, Played, ScriptedModel

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
