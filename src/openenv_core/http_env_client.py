"""Legacy path of the HTTP client. Re-exports only; the code lives in `openenv.client.http_client`."""

from __future__ import annotations

from openenv.client.http_client import HTTPEnvClient
from openenv.types import StepResult

__all__ = ["HTTPEnvClient", "StepResult"]
