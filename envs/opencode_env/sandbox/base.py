"""The narrow shape of sandboxes that the harness works with: any class that has these methods will do."""

from __future__ import annotations

from openenv.sandboxes.base import BgJob, ExecResult, SandboxBackend, SandboxHandle

__all__ = ["BgJob", "ExecResult", "SandboxBackend", "SandboxHandle"]
