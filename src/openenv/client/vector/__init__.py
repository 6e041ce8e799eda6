"""Many sessions as one: `VectorEnv` steps them in batches, `AsyncVectorEnv` does so on an event loop."""

from __future__ import annotations

from openenv.errors import SlotsFailed

from .results import SlotResult, VectorResult
from .vector_env import AsyncVectorEnv, VectorEnv

__all__ = ["AsyncVectorEnv", "SlotResult", "SlotsFailed", "VectorEnv", "VectorResult"]
