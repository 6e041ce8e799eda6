"""Plays scenarios with whichever OpenEnv the interpreter has: a name per line in, its verdict per line out, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import traceback

from . import imports  # first: it looks at what the import of a client loads
from .stage import Stage

__all__ = ["imports", "play"]


def play(name: str) -> dict[str, str]:
    """Run one scenario, given as `module.function`."""
    module, function = name.split(".")
    try:
        scenario = getattr(importlib.import_module(f"pitfalls.{module}"), function)
        with Stage() as stage:
            return {"verdict": scenario(stage)}
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    """Answer until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what environments and servers print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(play(line.strip())) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
