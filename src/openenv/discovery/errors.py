"""Facade: the published path of `openenv.packaging.catalogue.errors`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.errors import CatalogError as CatalogError

export_imports(__name__)
