"""Facade: the capture of model calls. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.rollout.capture.sessions_api.detection import APIType as APIType
    from openenv.rollout.capture.sessions_api.detection import detect as detect
    from openenv.rollout.capture.sessions_api.documents import (
        measure_retokenization_skew as measure_retokenization_skew,
    )
    from openenv.rollout.capture.sessions_api.documents import to_trace_entries as to_trace_entries
    from openenv.rollout.capture.sessions_api.documents import to_training_trace as to_training_trace
    from openenv.rollout.capture.sessions_api.documents import to_turn_records as to_turn_records
    from openenv.rollout.capture.sessions_api.engine_client import InferenceClient as InferenceClient
    from openenv.rollout.capture.sessions_api.engine_probe import LLMReport as LLMReport
    from openenv.rollout.capture.sessions_api.engine_probe import require_llm as require_llm
    from openenv.rollout.capture.sessions_api.engine_probe import validate_llm as validate_llm
    from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as _SessionCaptureServer
    from openenv.rollout.capture.sessions_api.turn_graph import RolloutGraph as RolloutGraph
    from openenv.rollout.capture.sessions_api.turn_graph import TurnNode as TurnNode
    from openenv.rollout.capture.upstream_errors import UpstreamError as UpstreamError

    CaptureServer = _SessionCaptureServer

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            **by_module(
                {
                    "openenv.rollout.capture.sessions_api.detection": "APIType detect",
                    "openenv.rollout.capture.sessions_api.documents": """
                measure_retokenization_skew to_trace_entries to_training_trace to_turn_records
            """,
                    "openenv.rollout.capture.sessions_api.engine_client": "InferenceClient",
                    "openenv.rollout.capture.sessions_api.engine_probe": "LLMReport require_llm validate_llm",
                    "openenv.rollout.capture.sessions_api.turn_graph": "RolloutGraph TurnNode",
                    "openenv.rollout.capture.upstream_errors": "UpstreamError",
                }
            ),
            "CaptureServer": "openenv.rollout.capture.sessions_api.session_app:SessionCaptureServer",
        },
    )
