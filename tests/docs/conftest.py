"""Fixtures for the documentation's tests: snippets run as their readers run them, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import openenv

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "docs_src"
# Snippets import each other, environments by their packages, and openenv as this process does.
_PATHS = [str(SOURCES), str(ROOT / "envs"), str(Path(openenv.__file__).parents[1])]
_ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS), "PYTHONDONTWRITEBYTECODE": "1"}


def run(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, where snippets can be imported."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=_ENVIRON, capture_output=True, text=True, timeout=timeout_s)


@contextlib.contextmanager
def served(file: str) -> Iterator[str]:
    """Run `openenv serve` on a snippet and a free port; give the address that it announces."""
    command = [sys.executable, "-m", "openenv", "serve", str(SOURCES / file), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, env=_ENVIRON, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        output = ""
        for line in process.stderr:
            output += line
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield match.group()
                break
        else:
            pytest.fail(f"{file} could not be served:\n{output}")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(20)


@pytest.fixture(name="run_python")
def _run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a process of its own."""
    return run


@pytest.fixture
def start_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python, all of its output in one pipe; a process that still runs when the test ends is stopped."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-u", *arguments]
            process = subprocess.Popen(
                command, cwd=ROOT, env=_ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            return process

        yield start


@pytest.fixture
def serve_snippet() -> Iterator[Callable[[str], str]]:
    """Serve a snippet; all servers are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda file: stack.enter_context(served(file))


@pytest.fixture
def run_snippet(tmp_path: Path) -> Callable[..., str]:
    """Run a snippet with the address of a real server in place of the one it names; give what it prints."""

    def run_it(file: str, url: str = "") -> str:
        text = (SOURCES / file).read_text(encoding="utf-8")
        if url:
            assert "localhost:8000" in text
            text = text.replace("localhost:8000", url.removeprefix("http://"))
        script = tmp_path / file
        script.write_text(text, encoding="utf-8")
        done = run(str(script))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_it
