"""Facade: the published path of `openenv.packaging.catalogue.models`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.models import CatalogError as CatalogError
from openenv.packaging.catalogue.models import github_repository as github_repository
from openenv.packaging.catalogue.models import relative_path as relative_path
from openenv.packaging.catalogue.repository import GIT_TIMEOUT_SECONDS as GIT_TIMEOUT_SECONDS
from openenv.packaging.catalogue.repository import MAX_ENVIRONMENTS as MAX_ENVIRONMENTS
from openenv.packaging.catalogue.repository import MAX_METADATA_BYTES as MAX_METADATA_BYTES
from openenv.packaging.catalogue.repository import MAX_TREE_BYTES as MAX_TREE_BYTES
from openenv.packaging.catalogue.repository import GitMetadataSource as GitMetadataSource
from openenv.packaging.catalogue.repository import MetadataError as MetadataError

export_imports(__name__)
