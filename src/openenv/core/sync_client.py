"""Facade: the blocking client. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.env_client import EnvClient as EnvClient
from openenv.client.env_client import SyncEnvClient as SyncEnvClient
from openenv.client.hooks import ActT as ActT
from openenv.client.hooks import ObsT as ObsT
from openenv.client.hooks import StateT as StateT
from openenv.types import StepResult as StepResult

export_imports(__name__)
