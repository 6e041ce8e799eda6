"""Facade: the published path of `openenv.env.manifest`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.env.manifest import CapabilitiesSpec as CapabilitiesSpec
from openenv.env.manifest import ExecutionDeclaration as ExecutionDeclaration
from openenv.env.manifest import JudgePin as JudgePin
from openenv.env.manifest import ManifestError as ManifestError
from openenv.env.manifest import NetworkPolicy as NetworkPolicy
from openenv.env.manifest import OracleDeclaration as OracleDeclaration
from openenv.env.manifest import ResourceDeclaration as ResourceDeclaration
from openenv.env.manifest import RewardDeclaration as RewardDeclaration
from openenv.env.manifest import TaskDistributionPin as TaskDistributionPin
from openenv.env.manifest import VerifierBinding as VerifierBinding
from openenv.packaging.validate.manifest import NormalizedManifest as NormalizedManifest
from openenv.packaging.validate.manifest import NormalizedManifestV2 as NormalizedManifestV2
from openenv.packaging.validate.manifest import TypeSpec as TypeSpec

export_imports(__name__)
