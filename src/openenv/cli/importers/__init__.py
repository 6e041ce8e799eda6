"""What `openenv import` can wrap: each importer finds environments of one kind in source code, and writes a package."""

from __future__ import annotations

from .base import DetectedEnvironment, EnvironmentImporter, ImporterRegistry, ImportProblem
from .ors import ORSImporter
from .verifiers import VerifiersImporter

# Add an importer here: a class with `source_type`, `detect` and `generate`, and a folder of templates.
DEFAULT_IMPORTERS: list[EnvironmentImporter] = [ORSImporter(), VerifiersImporter()]
"""In order of precedence."""

__all__ = [
    "DEFAULT_IMPORTERS",
    "DetectedEnvironment",
    "EnvironmentImporter",
    "ImportProblem",
    "ImporterRegistry",
    "ORSImporter",
    "VerifiersImporter",
]
