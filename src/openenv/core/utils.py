"""Facade: helpers of clients. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.driver import run_async_safely as run_async_safely
from openenv.client.network import convert_to_ws_url as convert_to_ws_url
from openenv.client.network import hf_space_subdomain as hf_space_subdomain

export_imports(__name__)
