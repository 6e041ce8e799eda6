"""The process runner: environments in worker processes.

`child` runs inside a worker process; the other modules run in the server, or in both.
"""

from __future__ import annotations

from .runner import ProcessRunner

__all__ = ["ProcessRunner"]
