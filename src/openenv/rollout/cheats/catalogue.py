"""All cheats, in the order in which they are run."""

from __future__ import annotations

from openenv.rollout.cheats.cheat import Cheat
from openenv.rollout.cheats.checked_code import CHECKED_CODE
from openenv.rollout.cheats.hosts import HOSTS
from openenv.rollout.cheats.processes import PROCESSES
from openenv.rollout.cheats.python import PYTHON
from openenv.rollout.cheats.rewards import REWARDS
from openenv.rollout.cheats.trees import TREES


def all_cheats() -> tuple[Cheat, ...]:
    """Return every cheat."""
    return (*REWARDS, *PYTHON, *CHECKED_CODE, *TREES, *PROCESSES, *HOSTS)
