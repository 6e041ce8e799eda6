"""Facade: the published path of `openenv.packaging.catalogue.models`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.models import ARD_CONTEXT as ARD_CONTEXT
from openenv.packaging.catalogue.models import ENVIRONMENT_MEDIA_TYPE as ENVIRONMENT_MEDIA_TYPE
from openenv.packaging.catalogue.models import MAX_CATALOG_BYTES as MAX_CATALOG_BYTES
from openenv.packaging.catalogue.models import PROFILE_VERSION as PROFILE_VERSION
from openenv.packaging.catalogue.models import SIMULATION_CONTROLS as SIMULATION_CONTROLS
from openenv.packaging.catalogue.models import AgentToolsInterface as AgentToolsInterface
from openenv.packaging.catalogue.models import CatalogChanges as CatalogChanges
from openenv.packaging.catalogue.models import CatalogIssue as CatalogIssue
from openenv.packaging.catalogue.models import CatalogSnapshot as CatalogSnapshot
from openenv.packaging.catalogue.models import DiscoveryEntry as DiscoveryEntry
from openenv.packaging.catalogue.models import EnvironmentCard as EnvironmentCard
from openenv.packaging.catalogue.models import EnvironmentSource as EnvironmentSource
from openenv.packaging.catalogue.models import Generator as Generator
from openenv.packaging.catalogue.models import GitArtifact as GitArtifact
from openenv.packaging.catalogue.models import Interface as Interface
from openenv.packaging.catalogue.models import Inventory as Inventory
from openenv.packaging.catalogue.models import MetadataURL as MetadataURL
from openenv.packaging.catalogue.models import NonEmpty as NonEmpty
from openenv.packaging.catalogue.models import OrchestrationInterface as OrchestrationInterface
from openenv.packaging.catalogue.models import Owner as Owner
from openenv.packaging.catalogue.models import ProfileModel as ProfileModel
from openenv.packaging.catalogue.models import Publisher as Publisher
from openenv.packaging.catalogue.models import RelativePath as RelativePath
from openenv.packaging.catalogue.models import RepositorySource as RepositorySource
from openenv.packaging.catalogue.models import RepresentativeQueries as RepresentativeQueries
from openenv.packaging.catalogue.models import Revision as Revision
from openenv.packaging.catalogue.models import SearchMatch as SearchMatch
from openenv.packaging.catalogue.models import SupersededEntry as SupersededEntry
from openenv.packaging.catalogue.models import github_repository as github_repository
from openenv.packaging.catalogue.models import metadata_url as metadata_url
from openenv.packaging.catalogue.models import relative_path as relative_path

export_imports(__name__)
