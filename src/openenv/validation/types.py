"""Facade: the published path of `openenv.packaging.validate.rules`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.rules import CheckStatus as CheckStatus
from openenv.packaging.validate.rules import Lane as Lane
from openenv.packaging.validate.rules import Level as Level
from openenv.packaging.validate.rules import ProviderCapability as ProviderCapability
from openenv.packaging.validate.rules import Severity as Severity
from openenv.packaging.validate.rules import SignatureKind as SignatureKind
from openenv.packaging.validate.rules import Verdict as Verdict

export_imports(__name__)
