"""The process runner, as the server sees it: workers, lanes in them, and what stands for environments.

What runs inside of a worker is `openenv.workers`.
"""

from __future__ import annotations

from .runner import ProcessRunner

__all__ = ["ProcessRunner"]
