"""Facade: the published path of `openenv.packaging.validate.recording`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.recording import MAX_JSON_DEPTH as MAX_JSON_DEPTH
from openenv.packaging.validate.recording import MAX_JSON_NODES as MAX_JSON_NODES
from openenv.packaging.validate.recording import MAX_PLAN_ACTIONS as MAX_PLAN_ACTIONS
from openenv.packaging.validate.recording import MAX_PLAN_BYTES as MAX_PLAN_BYTES
from openenv.packaging.validate.recording import LaunchSpec as LaunchSpec
from openenv.packaging.validate.recording import NamespaceEvidence as NamespaceEvidence
from openenv.packaging.validate.recording import NetworkEvidence as NetworkEvidence
from openenv.packaging.validate.recording import NetworkProbe as NetworkProbe
from openenv.packaging.validate.recording import ProbeOutcome as ProbeOutcome
from openenv.packaging.validate.recording import RuntimeEvidence as RuntimeEvidence
from openenv.packaging.validate.recording import RuntimePlan as RuntimePlan
from openenv.packaging.validate.recording import RuntimePlanError as RuntimePlanError
from openenv.packaging.validate.recording import RuntimeReset as RuntimeReset
from openenv.packaging.validate.recording import WireExchange as WireExchange
from openenv.packaging.validate.recording import load_runtime_plan as load_runtime_plan

export_imports(__name__)
