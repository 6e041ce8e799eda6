"""TextArena: games in words, alone or against others."""

from __future__ import annotations

from textarena_env.client import TextArenaEnv
from textarena_env.models import TextArenaAction, TextArenaMessage, TextArenaObservation, TextArenaState

__all__ = ["TextArenaAction", "TextArenaEnv", "TextArenaMessage", "TextArenaObservation", "TextArenaState"]
