"""Facade: checks of what was captured, on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.capture_checks import check_rollout as check_rollout
from openenv.rollout.capture.sessions_api.capture_checks import check_sequence as check_sequence
from openenv.rollout.capture.sessions_api.capture_checks import check_turn_eval as check_turn_eval
from openenv.rollout.capture.sessions_api.capture_checks import check_upstream_response as check_upstream_response
from openenv.rollout.capture.training_trace import CaptureFinding as _CaptureFinding
from openenv.rollout.capture.training_trace import CaptureReport as _CaptureReport
from openenv.rollout.capture.training_trace import check_turn as check_turn
from openenv.rollout.capture.training_trace import validate_training_turn as validate_training_turn

Finding = _CaptureFinding
Report = _CaptureReport

export_imports(__name__)
