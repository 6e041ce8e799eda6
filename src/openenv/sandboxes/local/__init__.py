"""Local sandboxes: bubblewrap, control groups, a system call filter and a special first process."""

from __future__ import annotations

from openenv.sandboxes.local.sandbox import LocalSandbox, LocalSandboxes

__all__ = ["LocalSandbox", "LocalSandboxes"]
