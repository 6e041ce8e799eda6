"""Facade: clients without models. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.env_client import EnvClient as EnvClient
from openenv.client.env_client import GenericAction as GenericAction
from openenv.client.env_client import GenericEnvClient as GenericEnvClient
from openenv.types import StepResult as StepResult

export_imports(__name__)
