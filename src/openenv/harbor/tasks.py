"""Facade: the published path of `openenv.adapters.harbor.tasks`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.tasks import HarborTaskProvider as HarborTaskProvider
from openenv.adapters.harbor.tasks import has_symlinks as has_symlinks
from openenv.adapters.harbor.tasks import own_file as own_file
from openenv.adapters.harbor.tasks import prefetch as prefetch
from openenv.adapters.harbor.tasks import read_instruction as read_instruction
from openenv.adapters.harbor.tasks import resolve_task_dirs as resolve_task_dirs
from openenv.adapters.harbor.tasks import task_root as task_root

export_imports(__name__)
