"""Sandboxes as the harness sees them: the narrow shape, the backends of E2B and Hugging Face, the proxy for inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

if TYPE_CHECKING:
    from opencode_env.sandbox.base import BgJob as BgJob
    from opencode_env.sandbox.base import ExecResult as ExecResult
    from opencode_env.sandbox.base import SandboxBackend as SandboxBackend
    from opencode_env.sandbox.base import SandboxHandle as SandboxHandle
    from opencode_env.sandbox.e2b import E2BBgJob as E2BBgJob
    from opencode_env.sandbox.e2b import E2BSandboxBackend as E2BSandboxBackend
    from opencode_env.sandbox.e2b import E2BSandboxHandle as E2BSandboxHandle
    from opencode_env.sandbox.hf import HFBgJob as HFBgJob
    from opencode_env.sandbox.hf import HFSandboxBackend as HFSandboxBackend
    from opencode_env.sandbox.hf import HFSandboxHandle as HFSandboxHandle

    __all__: list[str]
else:
    _EXPORTS = {
        **dict.fromkeys(("BgJob", "ExecResult", "SandboxBackend", "SandboxHandle"), "opencode_env.sandbox.base"),
        **dict.fromkeys(("E2BBgJob", "E2BSandboxBackend", "E2BSandboxHandle"), "opencode_env.sandbox.e2b"),
        **dict.fromkeys(("HFBgJob", "HFSandboxBackend", "HFSandboxHandle"), "opencode_env.sandbox.hf"),
    }
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
