"""The contract of sandbox backends, as checks that run; `self_check` runs them."""

from __future__ import annotations

from .bench import CheckBench, ContractCheck, NotOffered
from .commands import COMMANDS, JOBS, OUTPUT, TIMES
from .files import FILES, TREES
from .isolation import ENDINGS, ISOLATION, LIMITS, PORTS

CHECKS: tuple[ContractCheck, ...] = (
    *COMMANDS,
    *OUTPUT,
    *TIMES,
    *JOBS,
    *FILES,
    *TREES,
    *ISOLATION,
    *LIMITS,
    *PORTS,
    *ENDINGS,
)

__all__ = ["CHECKS", "CheckBench", "ContractCheck", "NotOffered"]
