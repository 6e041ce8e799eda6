"""Facade: clients for language models. Re-exports only."""

from __future__ import annotations

from openenv.client.llm_client import AnthropicClient as AnthropicClient
from openenv.client.llm_client import LLMClient as LLMClient
from openenv.client.llm_client import LLMResponse as LLMResponse
from openenv.client.llm_client import OpenAIClient as OpenAIClient
from openenv.client.llm_client import ToolCall as ToolCall
from openenv.client.llm_client import clean_mcp_schema as _clean_mcp_schema
from openenv.client.llm_client import create_llm_client as create_llm_client
from openenv.client.llm_client import mcp_tools_to_anthropic as _mcp_tools_to_anthropic
from openenv.client.llm_client import mcp_tools_to_openai as _mcp_tools_to_openai
from openenv.client.llm_client import openai_messages_to_anthropic as _openai_msgs_to_anthropic

__all__ = [
    "AnthropicClient",
    "LLMClient",
    "LLMResponse",
    "OpenAIClient",
    "ToolCall",
    "_clean_mcp_schema",
    "_mcp_tools_to_anthropic",
    "_mcp_tools_to_openai",
    "_openai_msgs_to_anthropic",
    "create_llm_client",
]
