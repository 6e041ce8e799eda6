"""The checks that every backend passes, by topic."""

from __future__ import annotations

from openenv.sandboxes.checks import commands, files, isolation
from openenv.sandboxes.checks import commands as jobs
from openenv.sandboxes.checks import commands as output
from openenv.sandboxes.checks import commands as times
from openenv.sandboxes.checks import files as trees
from openenv.sandboxes.checks import isolation as endings
from openenv.sandboxes.checks import isolation as limits
from openenv.sandboxes.checks import isolation as ports
from openenv.sandboxes.checks.bench import Bench, Check, NotOffered

CHECKS: tuple[Check, ...] = (
    *commands.CHECKS,
    *output.CHECKS,
    *times.CHECKS,
    *jobs.CHECKS,
    *files.CHECKS,
    *trees.CHECKS,
    *isolation.CHECKS,
    *limits.CHECKS,
    *ports.CHECKS,
    *endings.CHECKS,
)

__all__ = ["CHECKS", "Bench", "Check", "NotOffered"]
