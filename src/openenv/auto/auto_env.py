"""Facade: the published path of `openenv.packaging.auto.auto_env`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv
from openenv.packaging.auto.auto_env import get_discovery as get_discovery
from openenv.packaging.auto.auto_env import hf_space_subdomain as hf_space_subdomain
from openenv.packaging.auto.auto_env import run_async_safely as run_async_safely

export_imports(__name__)
