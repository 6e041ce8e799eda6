"""Notes: read and write notes with tools until a task is done."""

from __future__ import annotations

from notes_env.client import NotesEnv
from notes_env.models import NotesObservation, NotesState

__all__ = ["NotesEnv", "NotesObservation", "NotesState"]
