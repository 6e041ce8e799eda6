"""Facade: the published path of `openenv.packaging.validate.report`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.report import source_digest as source_digest
from openenv.packaging.validate.runner import REPORT_SCHEMA_VERSION as REPORT_SCHEMA_VERSION
from openenv.packaging.validate.runner import default_grader_registry as default_grader_registry
from openenv.packaging.validate.runner import default_parser_registry as default_parser_registry
from openenv.packaging.validate.runner import run_validation as run_validation

export_imports(__name__)
