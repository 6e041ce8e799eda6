"""Facade: the published path of `openenv.adapters.harbor.service`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.adapters.harbor.service import HarborService as HarborService
from openenv.adapters.harbor.serving import SameOrigin as SameOrigin
from openenv.adapters.harbor.serving import build_app as build_app
from openenv.adapters.harbor.serving import serve_harbor as serve_harbor
from openenv.adapters.harbor.serving import space_public_url as space_public_url

export_imports(__name__)
