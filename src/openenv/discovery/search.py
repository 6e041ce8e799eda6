"""Facade: the published path of `openenv.packaging.catalogue.models`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.models import CatalogChanges as CatalogChanges
from openenv.packaging.catalogue.models import CatalogError as CatalogError
from openenv.packaging.catalogue.models import CatalogSnapshot as CatalogSnapshot
from openenv.packaging.catalogue.models import DiscoveryEntry as DiscoveryEntry
from openenv.packaging.catalogue.models import SearchMatch as SearchMatch
from openenv.packaging.catalogue.models import SupersededEntry as SupersededEntry
from openenv.packaging.catalogue.search import SUPPORTED_FILTERS as SUPPORTED_FILTERS
from openenv.packaging.catalogue.search import compare_catalogs as compare_catalogs
from openenv.packaging.catalogue.search import resolve_entry as resolve_entry
from openenv.packaging.catalogue.search import search_catalog as search_catalog
from openenv.packaging.catalogue.serialization import require_complete as require_complete

export_imports(__name__)
