"""Code mode: a program that calls an environment's tools as functions.

Knows how to run a program; must not know where the functions come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import message_of
from ..types import Observation


def execute(code: str, functions: Mapping[str, Callable[..., Any]]) -> Observation:
    """Run a program; the observation's metadata has its variable `result`, or what went wrong as `error`.

    A program earns nothing by itself: the reward is 0.
    """
    names: dict[str, Any] = {**functions, "__name__": "__openenv_code__"}
    try:
        exec(compile(code, "<code>", "exec"), names)
    except SyntaxError as exc:
        return Observation(reward=0.0, metadata={"error": f"Syntax error: {exc}"})
    except Exception as exc:
        return Observation(reward=0.0, metadata={"error": f"{type(exc).__name__}: {message_of(exc)}"})
    return Observation(reward=0.0, metadata={"result": names.get("result")})
