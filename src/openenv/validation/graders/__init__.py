"""Facade: the published path of `openenv.packaging.validate.graders`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.graders import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
from openenv.packaging.validate.graders import Grader as Grader
from openenv.packaging.validate.graders import GraderRegistry as GraderRegistry
from openenv.packaging.validate.graders import Subject as Subject

export_imports(__name__)
