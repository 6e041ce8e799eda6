"""Facade: the provider of Modal sandboxes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.modal import ModalProvider as ModalProvider

export_imports(__name__)
