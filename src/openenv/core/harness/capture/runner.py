"""Facade: the capture server in a thread, on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.session_app import SessionCaptureServer as _SessionCaptureServer
from openenv.rollout.capture.sessions_api.session_app import create_app as create_app

CaptureServer = _SessionCaptureServer

export_imports(__name__)
