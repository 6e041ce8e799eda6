"""Facade: the dialect of a request. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.detection import APIType as APIType
from openenv.rollout.capture.sessions_api.detection import detect as detect
from openenv.rollout.capture.sessions_api.detection import extract_model as extract_model

export_imports(__name__)
