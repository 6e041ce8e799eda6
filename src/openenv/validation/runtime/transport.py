"""Facade: the published path of `openenv.packaging.validate.runtime.transport`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.runtime.transport import abort_socket as abort_socket
from openenv.packaging.validate.runtime.transport import http_deadline as http_deadline

export_imports(__name__)
