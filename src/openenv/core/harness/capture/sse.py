"""Facade: complete responses as streams. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.detection import APIType as APIType
from openenv.rollout.capture.sessions_api.replay import format_chunk as format_chunk
from openenv.rollout.capture.sessions_api.replay import format_events as format_events
from openenv.rollout.capture.sessions_api.replay import keepalive_response as keepalive_response
from openenv.rollout.capture.sessions_api.replay import replay as replay
from openenv.rollout.capture.sessions_api.replay import response_to_chunk as response_to_chunk
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer

export_imports(__name__)
