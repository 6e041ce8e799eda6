"""Facade: the document of a captured rollout. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.capture_checks import check_rollout as check_rollout
from openenv.rollout.capture.sessions_api.capture_checks import check_sequence as check_sequence
from openenv.rollout.capture.sessions_api.documents import export_session as export_session
from openenv.rollout.capture.sessions_api.documents import summarise as summarise

export_imports(__name__)
