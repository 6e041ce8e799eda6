"""Clients that other people wrote, each in an interpreter of its own, against a served environment: connect, list,
call, progress, cancel, and state that lasts within a client and is not shared between two.

The interpreters are those of `.clients/`, which `make test` makes, or those that `OPENENV_MCP1_PYTHON` and
`OPENENV_MCP2_PYTHON` name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).resolve().parent
VENVS = HERE.parents[1] / ".clients"
SCRIPT = HERE / "clients" / "play.py"

CLIENTS = [
    pytest.param("mcp1", "mcp1", None, id="mcp 1.30"),
    pytest.param("mcp1", "fastmcp", None, id="FastMCP 3"),
    pytest.param("mcp2", "mcp2", "auto", id="mcp 2.3, auto"),
    pytest.param("mcp2", "mcp2", "legacy", id="mcp 2.3, handshake", marks=pytest.mark.slow),
    pytest.param("mcp2", "mcp2", "2026-07-28", id="mcp 2.3, 2026-07-28", marks=pytest.mark.slow),
    pytest.param("mcp2", "fastmcp", "auto", id="FastMCP 4, auto"),
    pytest.param("mcp2", "fastmcp", "legacy", id="FastMCP 4, handshake", marks=pytest.mark.slow),
]


@pytest.fixture
def play(ours: Interpreter) -> Callable[..., dict[str, Any]]:
    """Let a client play; what it saw."""

    def run(interpreter: Any, client: str, url: str, mode: str | None) -> dict[str, Any]:
        command = [interpreter.python, str(SCRIPT), client, url, *([mode] if mode else [])]
        done = subprocess.run(
            command,
            env=interpreter.environment(SCRIPT.parent),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen

    return run


@pytest.fixture
def interpreter(ours: Interpreter) -> Callable[[str], Any]:
    """Find the interpreter of a client."""

    def find(name: str) -> Any:
        given = os.environ.get(f"OPENENV_{name.upper()}_PYTHON")
        python = Path(given) if given else VENVS / name / "bin" / "python"
        if not python.exists():
            reason = f"no interpreter with this client: `make .clients/{name}/ready` makes it"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
        return dataclasses.replace(ours, name=name, python=str(python), source=None)

    return find


@pytest.mark.slow_but_for("FastMCP 4, auto")
@pytest.mark.parametrize(("venv", "client", "mode"), CLIENTS)
def test_a_client_of_mcp_plays(
    server: Any, interpreter: Any, play: Any, venv: str, client: str, mode: str | None
) -> None:
    seen = play(interpreter(venv), client, server.url, mode)
    assert {"echo", "count", "work", "peek"} <= set(seen["names"])
    assert "ship" not in seen["names"]
    assert (seen["counts"], seen["after"], seen["other"]) == ([1, 2, 3], 4, 1)
    assert seen["worked"] == "worked"
    assert seen["progress"] == [[1, 3, "step 1"], [2, 3, "step 2"], [3, 3, "step 3"]]
    assert "bang" in seen["boom"][1]
    assert "no_such_tool" in seen["unknown"][1]
    assert "message" in seen["arguments"][1]
    assert seen["big"] == 3 * 1024 * 1024
    assert seen["cancelled"] is not None, "the call came to an end"
    assert server.watch.cancelled.wait(30), "and so did the tool"
    assert (seen["note"], seen["prompt"]) == ("hello", "Hello Ada")
    if mode in (None, "legacy"):  # the newer era has no goodbye: its sessions end with their lease
        server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)


@pytest.mark.slow
@pytest.mark.published
@pytest.mark.parametrize("mode", ["steps", "http"])
def test_the_published_tool_client_plays(server: Any, published: Interpreter, play: Any, mode: str) -> None:
    seen = play(published, "openenv", server.url, mode)
    assert {"echo", "count", "work", "peek"} <= set(seen["names"])
    assert (seen["counts"], seen["after"], seen["other"]) == ([1, 2, 3], 4, 1)
    assert seen["worked"] == "worked"
    assert "bang" in seen["boom"][1]
    assert "no_such_tool" in seen["unknown"][1]
    assert "message" in seen["arguments"][1]
    assert seen["big"] == 3 * 1024 * 1024
    server.wait_for(lambda: server.manager.active == 0 and server.watch.alive == 0)
