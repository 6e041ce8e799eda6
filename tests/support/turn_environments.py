"""Environments around the talking agent, for tests of turns and of `WS /harness`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from fastmcp import FastMCP

from openenv.adapters.turns import HarnessAction, HarnessConfig, HarnessEnvironment, JsonLinesAdapter
from openenv.server.app import create_app
from openenv.types import Observation

AGENT = Path(__file__).resolve().parent / "talking_agent.py"
FOLDER = str(AGENT.parent)


def talking_config(**changes: Any) -> HarnessConfig:
    """Configure the talking agent."""
    fields = {"name": "talker", "command": [sys.executable, "-S", str(AGENT)], "working_directory": FOLDER, **changes}
    return HarnessConfig(**fields)


def talking_adapter(**changes: Any) -> JsonLinesAdapter:
    """Connect the talking agent."""
    return JsonLinesAdapter(talking_config(**changes), ready_check=lambda line: line == "ready")


class TalkingEnv(HarnessEnvironment):
    """The talking agent, with two tools that note the thread they run in."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, **changes: Any) -> None:
        self.threads: list[str] = []
        server: FastMCP[Any] = FastMCP("shop")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.threads.append(threading.current_thread().name)
            return a + b

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("out of stock")

        super().__init__(talking_adapter(**changes), mcp=server)


def talking_app(env: Any = TalkingEnv, **options: Any) -> Any:
    """Serve the talking agent, by default in production mode."""
    return create_app(env, HarnessAction, Observation, **{"mode": "production", **options})
