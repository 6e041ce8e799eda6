"""Facade: the client's base class. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.env_client import EnvClient as EnvClient
from openenv.client.hooks import ActT as ActT
from openenv.client.hooks import ObsT as ObsT
from openenv.client.hooks import StateT as StateT
from openenv.client.network import convert_to_ws_url as convert_to_ws_url
from openenv.client.network import hf_space_subdomain as hf_space_subdomain
from openenv.types import StepResult as StepResult

export_imports(__name__)
