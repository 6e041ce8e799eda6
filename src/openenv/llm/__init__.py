"""Language models: clients of model endpoints.

Knows HTTP and the dialects of model endpoints. Must not know rollouts, sandboxes or environments. Scripted models are
in `openenv.testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openenv._lazy import by_module, lazy_exports

_NAMES = "AnthropicClient LLMClient LLMError LLMResponse OpenAIClient ToolCall create_llm_client"

if TYPE_CHECKING:  # the table, for type checkers
    from .client import AnthropicClient as AnthropicClient
    from .client import LLMClient as LLMClient
    from .client import LLMError as LLMError
    from .client import LLMResponse as LLMResponse
    from .client import OpenAIClient as OpenAIClient
    from .client import ToolCall as ToolCall
    from .client import create_llm_client as create_llm_client

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, by_module({f"{__name__}.client": _NAMES}))
