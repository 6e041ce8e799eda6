"""OpenEnv: write an environment once as a typed class, serve it, step it from fast typed clients.

Importing this module loads almost nothing; each name loads its module at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._lazy import lazy_exports
from ._lazy import load_package_version as _load_package_version

_EXPORTS = {
    "Action": "openenv.types",
    "Observation": "openenv.types",
    "State": "openenv.types",
    "StepResult": "openenv.types",
    "Environment": "openenv.env.environment",
    "MCPEnvironment": "openenv.env.mcp_environment",
    "tool": "openenv.env.mcp_environment",
    "Transform": "openenv.env.environment",
    "Rubric": "openenv.env.rubrics",
    "create_app": "openenv.server.app",
    "create_fastapi_app": "openenv.server.app",
    "EnvClient": "openenv.client.env_client",
    "SyncEnvClient": "openenv.client.env_client",
    "GenericEnvClient": "openenv.client.env_client",
    "GenericAction": "openenv.client.env_client",
    "connect": "openenv.client.schema_client",
    "HTTPEnvClient": "openenv.client.http_client",
    "MCPToolClient": "openenv.client.mcp_client",
    "TaskClient": "openenv.client.task_client",
    "VectorEnv": "openenv.client.vector.vector_env",
    "AsyncVectorEnv": "openenv.client.vector.vector_env",
    "LocalEnv": "openenv.server.local",
    "AutoEnv": "openenv.packaging.auto.auto_env",
    "AutoAction": "openenv.packaging.auto.auto_action",
    "core": "openenv.core:",
    "cli": "openenv.cli:",
    "errors": "openenv.errors:",
}

if TYPE_CHECKING:  # the table above, for type checkers; tests/test_typing.py holds the two together
    from openenv.client.env_client import EnvClient as EnvClient
    from openenv.client.env_client import GenericAction as GenericAction
    from openenv.client.env_client import GenericEnvClient as GenericEnvClient
    from openenv.client.env_client import SyncEnvClient as SyncEnvClient
    from openenv.client.http_client import HTTPEnvClient as HTTPEnvClient
    from openenv.client.mcp_client import MCPToolClient as MCPToolClient
    from openenv.client.schema_client import connect as connect
    from openenv.client.task_client import TaskClient as TaskClient
    from openenv.client.vector.vector_env import AsyncVectorEnv as AsyncVectorEnv
    from openenv.client.vector.vector_env import VectorEnv as VectorEnv
    from openenv.env.environment import Environment as Environment
    from openenv.env.environment import Transform as Transform
    from openenv.env.mcp_environment import MCPEnvironment as MCPEnvironment
    from openenv.env.mcp_environment import tool as tool
    from openenv.env.rubrics import Rubric as Rubric
    from openenv.packaging.auto.auto_action import AutoAction as AutoAction
    from openenv.packaging.auto.auto_env import AutoEnv as AutoEnv
    from openenv.server.app import create_app as create_app
    from openenv.server.app import create_fastapi_app as create_fastapi_app
    from openenv.server.local import LocalEnv as LocalEnv
    from openenv.types import Action as Action
    from openenv.types import Observation as Observation
    from openenv.types import State as State
    from openenv.types import StepResult as StepResult

    from . import cli as cli
    from . import core as core
    from . import errors as errors

    __all__: list[str]
    __version__: str
else:
    _lazy_getattr, __dir__, _names = lazy_exports(__name__, _EXPORTS)
    __all__ = ["__version__", *_names]

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            globals()["__version__"] = version = _load_package_version()
            return version
        return _lazy_getattr(name)
