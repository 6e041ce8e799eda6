"""Facade: the published path of `openenv.packaging.validate.manifest`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.manifest import SCHEMA_REMEDIATION as SCHEMA_REMEDIATION
from openenv.packaging.validate.manifest import VALIDATION_BLOCK_REMEDIATION as VALIDATION_BLOCK_REMEDIATION
from openenv.packaging.validate.manifest import OpenEnvYamlParser as OpenEnvYamlParser

export_imports(__name__)
