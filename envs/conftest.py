"""Fixtures for the tests of environments: each is served from its folder, in a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ENVS = Path(__file__).parent
sys.path.insert(0, str(ENVS))  # environments are packages of this folder, installed or not

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run `openenv serve` on a free port; give the address that it announces."""
    command = [sys.executable, "-m", "openenv", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, cwd=ENVS.parent, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        output = ""
        for line in process.stderr:
            output += line
            if found := _ADDRESS.search(line):
                yield found.group()
                break
        else:
            pytest.fail(f"the server did not start:\n{output}")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(20)


@pytest.fixture
def serve_folder() -> Iterator[Callable[[str], str]]:
    """Serve an environment by the name of its folder; all are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(served(ENVS / name))
