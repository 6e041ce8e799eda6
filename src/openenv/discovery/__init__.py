"""Catalogues of environments: metadata of a Git repository at one commit, to search before anything is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_EXPORTS = by_module(
    {
        "openenv.discovery.errors": "CatalogError",
        "openenv.discovery.models": "CatalogChanges CatalogSnapshot DiscoveryEntry ENVIRONMENT_MEDIA_TYPE "
        "EnvironmentCard PROFILE_VERSION SearchMatch",
        "openenv.discovery.producer": "build_catalog",
        "openenv.discovery.search": "compare_catalogs resolve_entry search_catalog",
        "openenv.discovery.serialization": "load_catalog write_catalog",
    }
)

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.discovery.errors import CatalogError as CatalogError
    from openenv.discovery.models import ENVIRONMENT_MEDIA_TYPE as ENVIRONMENT_MEDIA_TYPE
    from openenv.discovery.models import PROFILE_VERSION as PROFILE_VERSION
    from openenv.discovery.models import CatalogChanges as CatalogChanges
    from openenv.discovery.models import CatalogSnapshot as CatalogSnapshot
    from openenv.discovery.models import DiscoveryEntry as DiscoveryEntry
    from openenv.discovery.models import EnvironmentCard as EnvironmentCard
    from openenv.discovery.models import SearchMatch as SearchMatch
    from openenv.discovery.producer import build_catalog as build_catalog
    from openenv.discovery.search import compare_catalogs as compare_catalogs
    from openenv.discovery.search import resolve_entry as resolve_entry
    from openenv.discovery.search import search_catalog as search_catalog
    from openenv.discovery.serialization import load_catalog as load_catalog
    from openenv.discovery.serialization import write_catalog as write_catalog

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
