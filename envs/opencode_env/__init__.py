"""OpenCode: a real coding agent in a sandbox, the exact tokens of its model, and a reward that it cannot fake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import lazy_exports

if TYPE_CHECKING:
    from opencode_env.client import OpenCodeEnv as OpenCodeEnv
    from opencode_env.config import OpenCodeConfig as OpenCodeConfig
    from opencode_env.config import Provider as Provider
    from opencode_env.harness import OpenCodeSession as OpenCodeSession
    from opencode_env.harness import OpenCodeSessionFactory as OpenCodeSessionFactory
    from opencode_env.models import CommandResult as CommandResult
    from opencode_env.models import OpenCodeState as OpenCodeState
    from opencode_env.models import RolloutResult as RolloutResult
    from opencode_env.models import RolloutTurn as RolloutTurn
    from opencode_env.sandbox import E2BSandboxBackend as E2BSandboxBackend
    from opencode_env.sandbox import HFSandboxBackend as HFSandboxBackend
    from opencode_env.sandbox import SandboxBackend as SandboxBackend
    from opencode_env.sandbox import SandboxHandle as SandboxHandle
    from opencode_env.task import OpenCodeTask as OpenCodeTask
    from opencode_env.turns import OpenCodeAdapter as OpenCodeAdapter
    from openenv.protocol.tool_messages import CallToolAction as CallToolAction
    from openenv.protocol.tool_messages import ListToolsAction as ListToolsAction

    __all__: list[str]
else:
    _EXPORTS = {
        "CallToolAction": "openenv.protocol.tool_messages",
        "CommandResult": "opencode_env.models",
        "E2BSandboxBackend": "opencode_env.sandbox",
        "HFSandboxBackend": "opencode_env.sandbox",
        "ListToolsAction": "openenv.protocol.tool_messages",
        "OpenCodeAdapter": "opencode_env.turns",
        "OpenCodeConfig": "opencode_env.config",
        "OpenCodeEnv": "opencode_env.client",
        "OpenCodeSession": "opencode_env.harness",
        "OpenCodeSessionFactory": "opencode_env.harness",
        "OpenCodeState": "opencode_env.models",
        "OpenCodeTask": "opencode_env.task",
        "Provider": "opencode_env.config",
        "RolloutResult": "opencode_env.models",
        "RolloutTurn": "opencode_env.models",
        "SandboxBackend": "opencode_env.sandbox",
        "SandboxHandle": "opencode_env.sandbox",
    }
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
