"""Local sandboxes: bubblewrap, control groups, a system call filter and a first process of our own."""

from __future__ import annotations

from openenv.sandboxes.local.sandbox import LocalSandbox, LocalSandboxes

__all__ = ["LocalSandbox", "LocalSandboxes"]
