"""Capture: a proxy on the host between agents and model endpoints that writes down every call, token by token."""

from __future__ import annotations

from openenv._lazy import lazy_exports

_EXPORTS = {
    "Call": "openenv.rollout.capture.records",
    "Capture": "openenv.rollout.capture.capture_server",
    "CaptureOptions": "openenv.rollout.capture.capture_server",
    "CaptureServer": "openenv.rollout.capture.capture_server",
    "Finding": "openenv.rollout.capture.training_trace",
    "JournalFull": "openenv.rollout.capture.records",
    "Recording": "openenv.rollout.capture.records",
    "RoutedExperts": "openenv.rollout.capture.routed_experts",
    "Sequence": "openenv.rollout.capture.training_trace",
    "Stats": "openenv.rollout.capture.captured_rollout",
    "read": "openenv.rollout.capture.records",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
