"""Facade: the published path of `openenv.packaging.validate.runtime.collector`. Re-exports only."""

from __future__ import annotations

from openenv._lazy import export_imports
from openenv.packaging.validate.runtime.collector import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from openenv.packaging.validate.runtime.collector import MAX_TRACE_BYTES as MAX_TRACE_BYTES
from openenv.packaging.validate.runtime.collector import RuntimeCollectionInterrupted as RuntimeCollectionInterrupted
from openenv.packaging.validate.runtime.collector import collect_runtime_evidence as collect_runtime_evidence

export_imports(__name__)
