"""Facade: the published path of `openenv.packaging.catalogue.search`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.search import SUPPORTED_FILTERS as SUPPORTED_FILTERS
from openenv.packaging.catalogue.search import compare_catalogs as compare_catalogs
from openenv.packaging.catalogue.search import resolve_entry as resolve_entry
from openenv.packaging.catalogue.search import search_catalog as search_catalog

export_imports(__name__)
