"""`openenv rollouts`: run, resume and branch; list and lint tasks; list, show, export and verify rollouts; cheats."""

from __future__ import annotations

from collections.abc import Callable

from ..command import HelpCommand, command_group
from .cheats import cheats
from .continue_rollouts import branch, resume
from .exchange import export, import_logs
from .listing import list_rollouts, show_stats
from .run import list_tasks, run
from .show import show_difference, show_rollout
from .verify import lint, verify_again

_EXAMPLES = """
Run agents on tasks; list task sets; lint tasks; list, show, count, export and re-verify stored rollouts.

  openenv rollouts tasks
  openenv rollouts run task.yaml --llm-url URL --model MODEL
  openenv rollouts resume
  openenv rollouts branch 3f2a --at 5 -n 8
  openenv rollouts ls --since 2h
  openenv rollouts stats --by model
  openenv rollouts export good.parquet --status ok
"""

rollouts = command_group(_EXAMPLES)
_COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "resume": resume,
    "branch": branch,
    "ls": list_rollouts,
    "show": show_rollout,
    "diff": show_difference,
    "export": export,
    "import": import_logs,
    "stats": show_stats,
    "reverify": verify_again,
    "tasks": list_tasks,
    "lint": lint,
    "cheats": cheats,
}
for _name, _command in _COMMANDS.items():
    rollouts.command(_name, cls=HelpCommand)(_command)
