"""Coding: run Python in a sandbox, one piece after another, and solve small exercises."""

from __future__ import annotations

from coding_env.client import CodingEnv
from coding_env.models import CodeAction, CodeObservation, CodeState

__all__ = ["CodeAction", "CodeObservation", "CodeState", "CodingEnv"]
