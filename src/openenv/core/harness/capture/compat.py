"""Facade: changes of requests that endpoints ask for. On the module path that existing code imports; no logic."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.parameter_fixes import ParamFix as ParamFix
from openenv.rollout.capture.parameter_fixes import behaviour_warnings as behaviour_warnings
from openenv.rollout.capture.parameter_fixes import diagnose as diagnose

export_imports(__name__)
