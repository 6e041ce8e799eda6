"""Facade: the minimal sandbox interface. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.sandboxes.base import BgJob as BgJob
from openenv.sandboxes.base import ExecResult as ExecResult
from openenv.sandboxes.base import SandboxBackend as SandboxBackend
from openenv.sandboxes.base import SandboxHandle as SandboxHandle

export_imports(__name__)
