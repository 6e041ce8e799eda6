"""The process runner: environments in worker processes.

`child` is what runs inside a worker, the rest runs in the server.
"""

from __future__ import annotations

from .runner import ProcessRunner

__all__ = ["ProcessRunner"]
