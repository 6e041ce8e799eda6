"""Facade: the published path of `openenv.packaging.validate.graders.runtime`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.graders.runtime import NetworkPolicyGrader as NetworkPolicyGrader
from openenv.packaging.validate.graders.runtime import ObservationSchemaGrader as ObservationSchemaGrader
from openenv.packaging.validate.graders.runtime import RewardWellFormedGrader as RewardWellFormedGrader
from openenv.packaging.validate.graders.runtime import StateContractGrader as StateContractGrader

export_imports(__name__)
