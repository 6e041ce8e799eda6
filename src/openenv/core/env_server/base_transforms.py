"""Facade: transforms. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.environment import CompositeTransform as CompositeTransform
from openenv.env.environment import NullTransform as NullTransform
from openenv.env.environment import Transform as Transform
from openenv.types import Observation as Observation

export_imports(__name__)
