"""Facade: addresses of the server for sandboxes. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.rollout.capture.sessions_api.forwarding import CloudflareForwarder as CloudflareForwarder
from openenv.rollout.capture.sessions_api.forwarding import DirectExposure as DirectExposure
from openenv.rollout.capture.sessions_api.forwarding import ForwardingError as ForwardingError
from openenv.rollout.capture.sessions_api.forwarding import GradioForwarder as GradioForwarder
from openenv.rollout.capture.sessions_api.forwarding import PortForwarder as PortForwarder
from openenv.rollout.capture.sessions_api.forwarding import make_forwarder as make_forwarder

export_imports(__name__)
