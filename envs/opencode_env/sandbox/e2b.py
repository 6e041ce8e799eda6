"""E2B's backend, under the names that existing code imports.

Loads without the package `e2b`; making a backend without it raises ImportError with what to install.
"""

from __future__ import annotations

from openenv.sandboxes.base import BgJob as E2BBgJob
from openenv.sandboxes.e2b import E2BSandbox as E2BSandboxHandle
from openenv.sandboxes.e2b import E2BSandboxBackend

__all__ = ["E2BBgJob", "E2BSandboxBackend", "E2BSandboxHandle"]
