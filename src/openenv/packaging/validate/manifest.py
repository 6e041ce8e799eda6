"""The promises of a package as a report repeats them. Must not know how they are checked, or which file has them."""

from __future__ import annotations

from typing import Literal

from openenv.env.manifest import ManifestError as ManifestError
from openenv.env.manifest_models import CapabilitiesSpec as CapabilitiesSpec
from openenv.env.manifest_models import ExecutionDeclaration as ExecutionDeclaration
from openenv.env.manifest_models import JudgePin as JudgePin
from openenv.env.manifest_models import NetworkPolicy as NetworkPolicy
from openenv.env.manifest_models import OracleDeclaration as OracleDeclaration
from openenv.env.manifest_models import Promises, Types
from openenv.env.manifest_models import ResourceDeclaration as ResourceDeclaration
from openenv.env.manifest_models import RewardDeclaration as RewardDeclaration
from openenv.env.manifest_models import TaskDistributionPin as TaskDistributionPin
from openenv.env.manifest_models import VerifierBinding as VerifierBinding

from .types import SignatureKind

TypeSpec = Types


class NormalizedManifest(Promises):
    """What a package promises, and which package it is."""

    manifest_schema_version: Literal["1"]
    name: str
    version: str | None = None
    signature: SignatureKind


class NormalizedManifestV2(NormalizedManifest):
    """The same of a package that also says how it is run for its checks."""

    manifest_schema_version: Literal["2"]  # type: ignore[assignment]
    execution: ExecutionDeclaration
