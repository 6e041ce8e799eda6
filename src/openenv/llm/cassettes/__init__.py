"""Cassettes: real calls of a model endpoint, recorded once and played back as often as needed.

For tests and for looking at a rollout again without a model. Keys are never stored.
"""

from __future__ import annotations

from .cassette import Cassette, CassetteError, CassetteMiss, Piece, Recording
from .matching import Mode
from .servers import CassettePlayer, CassetteRecorder

__all__ = [
    "Cassette",
    "CassetteError",
    "CassetteMiss",
    "CassettePlayer",
    "CassetteRecorder",
    "Mode",
    "Piece",
    "Recording",
]
