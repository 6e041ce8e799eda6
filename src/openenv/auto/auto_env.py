"""Facade: the published path of `openenv.client.driver`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.driver import run_async_safely as run_async_safely
from openenv.client.network import hf_space_subdomain as hf_space_subdomain
from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv
from openenv.packaging.auto.installed import get_discovery as get_discovery

export_imports(__name__)
