"""Facade: the published path of `openenv.packaging.validate.parsers.openenv_yaml`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.parsers.openenv_yaml import SCHEMA_REMEDIATION as SCHEMA_REMEDIATION
from openenv.packaging.validate.parsers.openenv_yaml import VALIDATION_BLOCK_REMEDIATION as VALIDATION_BLOCK_REMEDIATION
from openenv.packaging.validate.parsers.openenv_yaml import OpenEnvYamlParser as OpenEnvYamlParser

export_imports(__name__)
