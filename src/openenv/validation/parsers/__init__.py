"""Facade: the published path of `openenv.packaging.validate.parsers`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.parsers import Parser as Parser
from openenv.packaging.validate.parsers import ParserRegistry as ParserRegistry

export_imports(__name__)
