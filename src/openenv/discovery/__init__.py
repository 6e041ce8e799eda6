"""Facade: the published path of `openenv.packaging.catalogue.models`. Re-exports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

if TYPE_CHECKING:
    from openenv.packaging.catalogue.models import ENVIRONMENT_MEDIA_TYPE as ENVIRONMENT_MEDIA_TYPE
    from openenv.packaging.catalogue.models import PROFILE_VERSION as PROFILE_VERSION
    from openenv.packaging.catalogue.models import CatalogChanges as CatalogChanges
    from openenv.packaging.catalogue.models import CatalogError as CatalogError
    from openenv.packaging.catalogue.models import CatalogSnapshot as CatalogSnapshot
    from openenv.packaging.catalogue.models import DiscoveryEntry as DiscoveryEntry
    from openenv.packaging.catalogue.models import EnvironmentCard as EnvironmentCard
    from openenv.packaging.catalogue.models import SearchMatch as SearchMatch
    from openenv.packaging.catalogue.producer import build_catalog as build_catalog
    from openenv.packaging.catalogue.search import compare_catalogs as compare_catalogs
    from openenv.packaging.catalogue.search import resolve_entry as resolve_entry
    from openenv.packaging.catalogue.search import search_catalog as search_catalog
    from openenv.packaging.catalogue.serialization import load_catalog as load_catalog
    from openenv.packaging.catalogue.serialization import write_catalog as write_catalog

    __all__: list[str]
else:  # the same names, loaded at their first use
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        by_module(
            {
                "openenv.packaging.catalogue.models": """
                CatalogChanges CatalogError CatalogSnapshot DiscoveryEntry ENVIRONMENT_MEDIA_TYPE
                EnvironmentCard PROFILE_VERSION SearchMatch
            """,
                "openenv.packaging.catalogue.producer": "build_catalog",
                "openenv.packaging.catalogue.search": "compare_catalogs resolve_entry search_catalog",
                "openenv.packaging.catalogue.serialization": "load_catalog write_catalog",
            }
        ),
    )
