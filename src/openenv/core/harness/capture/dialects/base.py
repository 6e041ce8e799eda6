"""Facade: what every transformer has. On the module path that existing code imports; no logic."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.transformers import BaseTransformer as BaseTransformer

export_imports(__name__)
