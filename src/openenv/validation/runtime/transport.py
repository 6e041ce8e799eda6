"""Facade: the published path of `openenv.packaging.validate.recording`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.recording import abort_socket as abort_socket
from openenv.packaging.validate.recording import http_deadline as http_deadline

export_imports(__name__)
