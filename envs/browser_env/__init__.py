"""Browser: a real Chromium on pages that come with the environment, and tasks to do there."""

from __future__ import annotations

from browser_env.client import BrowserEnv
from browser_env.models import BrowserAction, BrowserObservation, BrowserState

__all__ = ["BrowserAction", "BrowserEnv", "BrowserObservation", "BrowserState"]
