"""Facade: the published path of `openenv.packaging.validate.graders`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.graders import execute_graders as execute_graders
from openenv.packaging.validate.graders import order_graders as order_graders

export_imports(__name__)
