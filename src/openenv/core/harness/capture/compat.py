"""Facade: request changes required by endpoints. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.parameter_fixes import ParamFix as ParamFix
from openenv.rollout.capture.parameter_fixes import behaviour_warnings as behaviour_warnings
from openenv.rollout.capture.parameter_fixes import diagnose as diagnose

export_imports(__name__)
