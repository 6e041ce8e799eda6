"""The typed client of the Coding environment."""

from __future__ import annotations

from coding_env.models import CodeAction, CodeObservation, CodeState
from openenv import EnvClient


class CodingEnv(EnvClient[CodeAction, CodeObservation, CodeState]):
    """Runs Python on a server."""
