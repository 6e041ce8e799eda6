"""Facade: the published path of `openenv.packaging.validate.graders`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.graders import ObservationSchemaGrader as ObservationSchemaGrader
from openenv.packaging.validate.graders import RewardWellFormedGrader as RewardWellFormedGrader
from openenv.packaging.validate.graders import StateContractGrader as StateContractGrader

export_imports(__name__)
