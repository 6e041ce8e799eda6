"""The typed client of the TextArena environment."""

from __future__ import annotations

from openenv import EnvClient
from textarena_env.models import TextArenaAction, TextArenaObservation, TextArenaState


class TextArenaEnv(EnvClient[TextArenaAction, TextArenaObservation, TextArenaState]):
    """Plays a game on a server."""


TextarenaEnv = TextArenaEnv  # AutoEnv makes this name from that of the package
