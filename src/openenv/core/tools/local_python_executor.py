"""Facade: Python code in a sandbox. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.sandboxes.python_session import PyExecutor as PyExecutor
from openenv.types import CodeExecResult as CodeExecResult

export_imports(__name__)
