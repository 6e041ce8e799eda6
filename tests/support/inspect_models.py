"""Mock models of Inspect's for tests: `mockllm/model` with the answers that a test names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model

Answer = str | tuple[str, dict[str, Any]] | Exception
"""A text, a tool call (name and arguments), or what the model raises."""


def mock(answers: Iterable[Answer] | Callable[[list[Any]], Any]) -> Model:
    """Return a model that answers so, or as a function of the messages does; after the last answer, with that one."""
    known = [] if callable(answers) else list(answers)
    position = 0

    async def output(messages: list[Any], tools: Any, choice: Any, config: Any) -> ModelOutput:
        nonlocal position
        if callable(answers):
            answer = answers(messages)
            if inspect.isawaitable(answer):
                answer = await answer
        else:
            answer = known[min(position, len(known) - 1)]
            position += 1
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            made = ModelOutput.from_content("mockllm", answer)
        else:
            made = ModelOutput.for_tool_call("mockllm", answer[0], answer[1])
        made.usage = ModelUsage(input_tokens=len(messages), output_tokens=5, total_tokens=len(messages) + 5)
        return made

    return get_model("mockllm/model", custom_outputs=output, memoize=False)
