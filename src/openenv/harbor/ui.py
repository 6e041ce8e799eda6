"""Facade: the published path of `openenv.adapters.harbor.ui`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.ui import connect_endpoint as connect_endpoint
from openenv.adapters.harbor.ui import harbor_gradio_builder as harbor_gradio_builder
from openenv.adapters.harbor.ui import validate_endpoint as validate_endpoint

export_imports(__name__)
