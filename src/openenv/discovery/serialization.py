"""Facade: the published path of `openenv.packaging.catalogue.models`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.models import MAX_CATALOG_BYTES as MAX_CATALOG_BYTES
from openenv.packaging.catalogue.models import CatalogError as CatalogError
from openenv.packaging.catalogue.models import CatalogSnapshot as CatalogSnapshot
from openenv.packaging.catalogue.serialization import catalog_digest as catalog_digest
from openenv.packaging.catalogue.serialization import load_catalog as load_catalog
from openenv.packaging.catalogue.serialization import parse_json as parse_json
from openenv.packaging.catalogue.serialization import require_complete as require_complete
from openenv.packaging.catalogue.serialization import write_catalog as write_catalog

export_imports(__name__)
