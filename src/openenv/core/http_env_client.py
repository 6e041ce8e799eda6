"""Facade: the HTTP client. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.client.http_client import HTTPEnvClient as HTTPEnvClient
from openenv.types import StepResult as StepResult

export_imports(__name__)
