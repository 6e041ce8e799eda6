"""The demo, as `make demo` runs it: it plays, it ends by itself without a terminal, and it leaves no server behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def test_it_plays_shows_the_rewards_and_ends(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    drawing = tmp_path / "demo.svg"
    done = run_python("scripts/demo.py", "--episodes", "2", "--svg", str(drawing), timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("random", "greedy", "shortest path", "100%", "steps/s"):
        assert expected in done.stdout
    assert drawing.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_it_takes_its_server_with_it_when_it_is_stopped(start_python: Callable[..., subprocess.Popen[str]]) -> None:
    process = start_python("scripts/demo.py", "--episodes", "100000")
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.split("127.0.0.1:")[1].split()[0])
    socket.create_connection(("127.0.0.1", port), 30).close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), 5)
