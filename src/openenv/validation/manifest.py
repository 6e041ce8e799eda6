"""Facade: the published path of `openenv.packaging.validate.manifest`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.manifest import CapabilitiesSpec as CapabilitiesSpec
from openenv.packaging.validate.manifest import ExecutionDeclaration as ExecutionDeclaration
from openenv.packaging.validate.manifest import JudgePin as JudgePin
from openenv.packaging.validate.manifest import ManifestError as ManifestError
from openenv.packaging.validate.manifest import NetworkPolicy as NetworkPolicy
from openenv.packaging.validate.manifest import NormalizedManifest as NormalizedManifest
from openenv.packaging.validate.manifest import NormalizedManifestV2 as NormalizedManifestV2
from openenv.packaging.validate.manifest import OracleDeclaration as OracleDeclaration
from openenv.packaging.validate.manifest import ResourceDeclaration as ResourceDeclaration
from openenv.packaging.validate.manifest import RewardDeclaration as RewardDeclaration
from openenv.packaging.validate.manifest import TaskDistributionPin as TaskDistributionPin
from openenv.packaging.validate.manifest import TypeSpec as TypeSpec
from openenv.packaging.validate.manifest import VerifierBinding as VerifierBinding

export_imports(__name__)
