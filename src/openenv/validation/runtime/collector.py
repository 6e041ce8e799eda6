"""Facade: the published path of `openenv.packaging.validate.recording`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.recording import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from openenv.packaging.validate.recording import MAX_TRACE_BYTES as MAX_TRACE_BYTES
from openenv.packaging.validate.recording import RuntimeCollectionInterrupted as RuntimeCollectionInterrupted
from openenv.packaging.validate.recording import collect_runtime_evidence as collect_runtime_evidence

export_imports(__name__)
