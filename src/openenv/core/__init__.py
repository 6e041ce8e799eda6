"""Facade: servers, clients and models on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports, submodules

_CLIENTS = by_module(
    {
        "openenv.client.env_client": "EnvClient SyncEnvClient GenericEnvClient GenericAction",
        "openenv.client.http_client": "HTTPEnvClient",
        "openenv.client.mcp_client": "MCPClientBase MCPToolClient",
        "openenv.client.llm_client": "AnthropicClient LLMClient LLMResponse OpenAIClient ToolCall create_llm_client",
    }
)
_SUBMODULES = submodules(__name__, "client_types containers env_client env_server rubrics tools utils")

if TYPE_CHECKING:  # the tables, for type checkers; tests/test_typing.py holds the two together
    from openenv.client.env_client import EnvClient as EnvClient
    from openenv.client.env_client import GenericAction as GenericAction
    from openenv.client.env_client import GenericEnvClient as GenericEnvClient
    from openenv.client.env_client import SyncEnvClient as SyncEnvClient
    from openenv.client.http_client import HTTPEnvClient as HTTPEnvClient
    from openenv.client.llm_client import AnthropicClient as AnthropicClient
    from openenv.client.llm_client import LLMClient as LLMClient
    from openenv.client.llm_client import LLMResponse as LLMResponse
    from openenv.client.llm_client import OpenAIClient as OpenAIClient
    from openenv.client.llm_client import ToolCall as ToolCall
    from openenv.client.llm_client import create_llm_client as create_llm_client
    from openenv.client.mcp_client import MCPClientBase as MCPClientBase
    from openenv.client.mcp_client import MCPToolClient as MCPToolClient

    from . import client_types as client_types
    from . import containers as containers
    from . import env_client as env_client
    from . import env_server as env_server
    from . import rubrics as rubrics
    from . import tools as tools
    from . import utils as utils
    from .env_server import *  # noqa: F403 - all its names are exported here too, as `_SERVER` does

    __all__: list[str]
else:
    from .env_server import __all__ as _server_names

    _SERVER = dict.fromkeys(_server_names, "openenv.core.env_server")
    __getattr__, __dir__, _names = lazy_exports(__name__, {**_CLIENTS, **_SERVER, **_SUBMODULES})
    __all__ = [*_CLIENTS, *_SERVER]
