"""Facade: the published path of `openenv.packaging.catalogue.metadata`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.catalogue.metadata import DiscoveryDeclaration as DiscoveryDeclaration
from openenv.packaging.catalogue.metadata import ToolDeclaration as ToolDeclaration
from openenv.packaging.catalogue.metadata import discovery_declaration as discovery_declaration
from openenv.packaging.catalogue.metadata import framework_requirement as framework_requirement
from openenv.packaging.catalogue.metadata import license_declaration as license_declaration
from openenv.packaging.catalogue.metadata import project_metadata as project_metadata
from openenv.packaging.catalogue.metadata import readme_metadata as readme_metadata
from openenv.packaging.catalogue.metadata import yaml_mapping as yaml_mapping
from openenv.packaging.catalogue.models import CatalogError as CatalogError
from openenv.packaging.catalogue.models import ProfileModel as ProfileModel
from openenv.packaging.catalogue.repository import GitMetadataSource as GitMetadataSource
from openenv.packaging.catalogue.repository import MetadataError as MetadataError
from openenv.packaging.catalogue.serialization import parse_json as parse_json

export_imports(__name__)
