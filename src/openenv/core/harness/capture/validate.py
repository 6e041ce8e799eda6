"""Facade: checks of captured calls. Re-exports only."""

from __future__ import annotations

from openenv.rollout.capture.sessions_api.capture_checks import check_rollout as check_rollout
from openenv.rollout.capture.sessions_api.capture_checks import check_sequence as check_sequence
from openenv.rollout.capture.sessions_api.capture_checks import check_turn_eval as check_turn_eval
from openenv.rollout.capture.sessions_api.capture_checks import check_upstream_response as check_upstream_response
from openenv.rollout.capture.training_trace import CaptureFinding as Finding
from openenv.rollout.capture.training_trace import CaptureReport as Report
from openenv.rollout.capture.training_trace import check_turn as check_turn
from openenv.rollout.capture.training_trace import validate_training_turn as validate_training_turn

__all__ = [
    "Finding",
    "Report",
    "check_rollout",
    "check_sequence",
    "check_turn",
    "check_turn_eval",
    "check_upstream_response",
    "validate_training_turn",
]
