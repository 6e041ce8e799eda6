"""Facade: the published path of `openenv.packaging.validate.types`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.types import CheckStatus as CheckStatus
from openenv.packaging.validate.types import Lane as Lane
from openenv.packaging.validate.types import Level as Level
from openenv.packaging.validate.types import ProviderCapability as ProviderCapability
from openenv.packaging.validate.types import Severity as Severity
from openenv.packaging.validate.types import SignatureKind as SignatureKind
from openenv.packaging.validate.types import Verdict as Verdict

export_imports(__name__)
