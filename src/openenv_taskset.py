"""The taskset of verifiers under an ID that its loader can resolve: `--env.taskset.id openenv_taskset`.

The loader looks below `verifiers.v1.tasksets` first, where a package `openenv` hides longer IDs such as
`openenv.train.trainers.verifiers`. Re-exports only.
"""

from __future__ import annotations

from openenv.train.trainers.verifiers import ServedData as ServedData
from openenv.train.trainers.verifiers import ServedEnv as ServedEnv
from openenv.train.trainers.verifiers import ServedEnvConfig as ServedEnvConfig
from openenv.train.trainers.verifiers import ServedTask as ServedTask
from openenv.train.trainers.verifiers import ServedTaskset as ServedTaskset
from openenv.train.trainers.verifiers import ServedTasksetConfig as ServedTasksetConfig

__all__ = ["ServedData", "ServedEnv", "ServedEnvConfig", "ServedTask", "ServedTaskset", "ServedTasksetConfig"]
