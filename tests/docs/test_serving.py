"""What the pages say about `openenv serve`: its log shows failures of an environment, its exit codes are as listed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openenv import GenericEnvClient
from openenv.errors import ExecutionError

FAILING = """
from openenv import Action, Environment, Observation, State

class Failing(Environment[Action, Observation, State]):
    state = State()

    def reset(self, **kwargs):
        return Observation()

    def step(self, action, **kwargs):
        raise RuntimeError("out of paint")
"""

# A test run in the background may ignore Ctrl-C, and its children with it.
SERVE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("openenv", run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_log_shows_what_an_environment_raised_and_ctrl_c_exits_with_130(
    start_python: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    file = tmp_path / "failing_env.py"
    file.write_text(FAILING, encoding="utf-8")
    process = start_python("-c", SERVE, "serve", str(file), "--port", "0")
    assert process.stdout is not None
    line = next(line for line in process.stdout if "http://127.0.0.1:" in line)
    url = re.findall(r"http://127\.0\.0\.1:\d+", line)[0]
    with GenericEnvClient(base_url=url).sync() as env:
        env.reset()
        with pytest.raises(ExecutionError, match="out of paint"):
            env.step({})
    process.send_signal(signal.SIGINT)
    log = process.stdout.read()
    assert process.wait(20) == 130
    assert "RuntimeError: out of paint" in log
    assert "failing_env.py" in log


@pytest.mark.parametrize(("arguments", "code"), [(["nothing_here"], 1), (["--no-such-option"], 2)])
def test_a_failure_exits_with_the_code_that_is_documented(
    run_python: Callable[..., subprocess.CompletedProcess[str]], arguments: list[str], code: int
) -> None:
    done = run_python("-m", "openenv", "serve", *arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
