"""Facade: the published path of `openenv.packaging.validate.graders.runtime.network`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.graders.runtime.network import NetworkPolicyGrader as NetworkPolicyGrader

export_imports(__name__)
