"""Facade: the capture server in a thread. Re-exports only."""

from __future__ import annotations

from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as CaptureServer
from openenv.rollout.capture.sessions_api.session_app import create_app as create_app

__all__ = ["CaptureServer", "create_app"]
