"""Facade: the published path of `openenv.packaging.validate.graders`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.graders import NetworkPolicyGrader as NetworkPolicyGrader

export_imports(__name__)
