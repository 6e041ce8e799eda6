"""`python -m openenv.testing.scripted SCRIPT.yaml`: a scripted model as a process."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import get_args

from . import agent_scripts
from .script import Script, load_scripts
from .server import ScriptedModel
from .wire_formats import EngineName


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(
        prog="python -m openenv.testing.scripted",
        description="Serve a model that plays scripts. It is no real model, and says so in every reply.",
    )
    parser.add_argument("script", help="a YAML or JSON file, or AGENT:binary_search for a ready one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 is any free one")
    parser.add_argument(
        "--engine", choices=get_args(EngineName), default="vllm", help="where token ids stand in replies"
    )
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--api-key", help="the key that requests must bring; without it, any")
    options = parser.parse_args(arguments)
    try:
        model = ScriptedModel(
            _scripts(options.script),
            host=options.host,
            port=options.port,
            engine=options.engine,
            tokens_per_chunk=options.tokens_per_chunk,
            api_key=options.api_key,
        )
    except (OSError, ValueError) as exc:
        parser.exit(2, f"{options.script}: {exc}\n")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with model:
        names = ", ".join(script.model_name for script in model.scripts)
        sys.stdout.write(f"Scripted model (no real one) at {model.url}: {names}\n")
        sys.stdout.flush()
        ended.wait()
    return 0


def _scripts(source: str) -> tuple[Script, ...]:
    agent, _, ready = source.rpartition(":")
    if agent in agent_scripts.AGENTS and ready == "binary_search":
        return (agent_scripts.binary_search(agent),)
    if agent in agent_scripts.AGENTS:
        raise ValueError(f"there is no ready script {ready!r}, only {agent}:binary_search")
    return load_scripts(source)


if __name__ == "__main__":
    sys.exit(main())
