"""Facade: the published path of `openenv.packaging.catalogue.metadata`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.metadata import DiscoveryDeclaration as DiscoveryDeclaration
from openenv.packaging.catalogue.metadata import discovery_declaration as discovery_declaration
from openenv.packaging.catalogue.metadata import framework_requirement as framework_requirement
from openenv.packaging.catalogue.metadata import license_declaration as license_declaration
from openenv.packaging.catalogue.metadata import project_metadata as project_metadata
from openenv.packaging.catalogue.metadata import readme_metadata as readme_metadata
from openenv.packaging.catalogue.metadata import yaml_mapping as yaml_mapping
from openenv.packaging.catalogue.models import PROFILE_VERSION as PROFILE_VERSION
from openenv.packaging.catalogue.models import AgentToolsInterface as AgentToolsInterface
from openenv.packaging.catalogue.models import CatalogError as CatalogError
from openenv.packaging.catalogue.models import CatalogIssue as CatalogIssue
from openenv.packaging.catalogue.models import CatalogSnapshot as CatalogSnapshot
from openenv.packaging.catalogue.models import DiscoveryEntry as DiscoveryEntry
from openenv.packaging.catalogue.models import EnvironmentCard as EnvironmentCard
from openenv.packaging.catalogue.models import EnvironmentSource as EnvironmentSource
from openenv.packaging.catalogue.models import GitArtifact as GitArtifact
from openenv.packaging.catalogue.models import Inventory as Inventory
from openenv.packaging.catalogue.models import OrchestrationInterface as OrchestrationInterface
from openenv.packaging.catalogue.models import Owner as Owner
from openenv.packaging.catalogue.models import RepositorySource as RepositorySource
from openenv.packaging.catalogue.producer import build_catalog as build_catalog
from openenv.packaging.catalogue.repository import GitMetadataSource as GitMetadataSource
from openenv.packaging.catalogue.repository import MetadataError as MetadataError
from openenv.packaging.catalogue.serialization import catalog_digest as catalog_digest

export_imports(__name__)
