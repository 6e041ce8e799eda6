"""Facade: the base class of transformers. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer

export_imports(__name__)
