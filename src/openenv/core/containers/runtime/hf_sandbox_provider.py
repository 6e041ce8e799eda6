"""Facade: the provider of Hugging Face sandboxes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.providers.hf_sandbox import HFSandboxProvider as HFSandboxProvider

export_imports(__name__)
