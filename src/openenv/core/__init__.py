"""Facade: servers, clients and models on the module path that existing code imports. No logic lives here."""

from __future__ import annotations

from openenv._lazy import lazy_exports

from .env_server import __all__ as _server_names

_CLIENTS = {
    "EnvClient": "openenv.client.env_client",
    "SyncEnvClient": "openenv.client.sync_client",
    "GenericEnvClient": "openenv.client.generic",
    "GenericAction": "openenv.client.generic",
    "HTTPEnvClient": "openenv.client.http_client",
}
_SERVER = dict.fromkeys(_server_names, "openenv.core.env_server")
_LATER = {
    **dict.fromkeys(("MCPClientBase", "MCPToolClient"), "openenv.core.mcp_client"),
    **dict.fromkeys(
        ("AnthropicClient", "LLMClient", "LLMResponse", "OpenAIClient", "ToolCall", "create_llm_client"),
        "openenv.core.llm_client",
    ),
    **dict.fromkeys(("MCPEnvironment", "WebInterfaceManager", "create_web_interface_app"), "openenv.core.env_server"),
}
_SUBMODULES = {
    name: f"{__name__}.{name}:"
    for name in ("client_types", "containers", "env_client", "env_server", "rubrics", "tools", "utils")
}

__getattr__, __dir__, _names = lazy_exports(__name__, {**_CLIENTS, **_SERVER, **_LATER, **_SUBMODULES})
__all__ = [*_CLIENTS, *_SERVER]
