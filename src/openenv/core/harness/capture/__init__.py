"""Facade: the capture of model calls, on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

# By way of the submodules: one of them has the name of a function, and must not replace that when it is imported later.
from .contract import measure_retokenization_skew as measure_retokenization_skew
from .contract import to_trace_entries as to_trace_entries
from .contract import to_training_trace as to_training_trace
from .contract import to_turn_records as to_turn_records
from .detection import APIType as APIType
from .detection import detect as detect
from .graph import RolloutGraph as RolloutGraph
from .graph import TurnNode as TurnNode
from .runner import CaptureServer as CaptureServer
from .upstream import InferenceClient as InferenceClient
from .upstream import UpstreamError as UpstreamError
from .validate_llm import LLMReport as LLMReport
from .validate_llm import require_llm as require_llm
from .validate_llm import validate_llm as validate_llm

_NAMES = """
    CaptureServer to_turn_records to_trace_entries to_training_trace measure_retokenization_skew APIType detect
    RolloutGraph TurnNode InferenceClient UpstreamError LLMReport validate_llm require_llm
"""

__all__ = _NAMES.split()
