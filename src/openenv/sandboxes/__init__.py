"""Sandboxes: places to run commands that can reach only the files and sockets you pass in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

_EXPORTS = {
    "BgJob": "openenv.sandboxes.base",
    "CheckResult": "openenv.sandboxes.checks",
    "ExecResult": "openenv.sandboxes.base",
    "Limits": "openenv.sandboxes.base",
    "Mount": "openenv.sandboxes.base",
    "Sandbox": "openenv.sandboxes.base",
    "SandboxBackend": "openenv.sandboxes.base",
    "SandboxHandle": "openenv.sandboxes.base",
    "SandboxSnapshot": "openenv.sandboxes.base",
    "SandboxSpec": "openenv.sandboxes.base",
    "Sandboxes": "openenv.sandboxes.base",
    "LocalSandboxes": "openenv.sandboxes.local",
    "ProcessSandboxes": "openenv.sandboxes.no_isolation",
    "DockerSandboxes": "openenv.sandboxes.docker",
    "KubernetesSandboxes": "openenv.sandboxes.kubernetes",
    "DaytonaSandboxes": "openenv.sandboxes.daytona",
    "E2BSandboxBackend": "openenv.sandboxes.e2b",
    "SandboxPool": "openenv.sandboxes.pool",
    "WarmSandboxes": "openenv.sandboxes.pool",
    "backend": "openenv.sandboxes.base",
    "self_check": "openenv.sandboxes.checks",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.sandboxes.base import BgJob as BgJob
    from openenv.sandboxes.base import ExecResult as ExecResult
    from openenv.sandboxes.base import Limits as Limits
    from openenv.sandboxes.base import Mount as Mount
    from openenv.sandboxes.base import Sandbox as Sandbox
    from openenv.sandboxes.base import SandboxBackend as SandboxBackend
    from openenv.sandboxes.base import Sandboxes as Sandboxes
    from openenv.sandboxes.base import SandboxHandle as SandboxHandle
    from openenv.sandboxes.base import SandboxSnapshot as SandboxSnapshot
    from openenv.sandboxes.base import SandboxSpec as SandboxSpec
    from openenv.sandboxes.base import backend as backend
    from openenv.sandboxes.checks import CheckResult as CheckResult
    from openenv.sandboxes.checks import self_check as self_check
    from openenv.sandboxes.daytona import DaytonaSandboxes as DaytonaSandboxes
    from openenv.sandboxes.docker import DockerSandboxes as DockerSandboxes
    from openenv.sandboxes.e2b import E2BSandboxBackend as E2BSandboxBackend
    from openenv.sandboxes.kubernetes import KubernetesSandboxes as KubernetesSandboxes
    from openenv.sandboxes.local import LocalSandboxes as LocalSandboxes
    from openenv.sandboxes.no_isolation import ProcessSandboxes as ProcessSandboxes
    from openenv.sandboxes.pool import SandboxPool as SandboxPool
    from openenv.sandboxes.pool import WarmSandboxes as WarmSandboxes

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
