"""Facade: the published path of `openenv.packaging.validate.policy`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.policy import DeclarationBounds as DeclarationBounds
from openenv.packaging.validate.policy import PolicyEntry as PolicyEntry
from openenv.packaging.validate.policy import PolicyError as PolicyError
from openenv.packaging.validate.policy import SeverityPolicy as SeverityPolicy
from openenv.packaging.validate.policy import apply_policy as apply_policy
from openenv.packaging.validate.policy import load_policy as load_policy

export_imports(__name__)
