"""Facade: the published path of `openenv.packaging.validate.report`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.report import CheckResult as CheckResult
from openenv.packaging.validate.report import ValidationReport as ValidationReport
from openenv.packaging.validate.report import ValidationReportV2 as ValidationReportV2
from openenv.packaging.validate.report import write_report as write_report

export_imports(__name__)
