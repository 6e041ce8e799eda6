"""The typed client of the Browser environment."""

from __future__ import annotations

from browser_env.models import BrowserAction, BrowserObservation, BrowserState
from openenv import EnvClient


class BrowserEnv(EnvClient[BrowserAction, BrowserObservation, BrowserState]):
    """Uses a browser of a server."""
