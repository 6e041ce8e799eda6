"""A server without free file descriptors: it says so once, keeps its sessions, and recovers."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from openenv.server.process_tuning import FileWatch

# Takes all descriptors of a process with a server, and prints what its clients and its log saw. A client is connected
# before, since it needs descriptors of the same process.
PROGRAM = """
import asyncio, json, logging, resource, socket, sys

from environments import Heard, Parrot, Say
from openenv import GenericEnvClient
from openenv.server.app import create_app
from servers import running_server
from waiting import wait_until

lines = []


class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())


logging.getLogger().addHandler(Lines())
if sys.argv[1] == "uvloop":
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
Parrot.gate.set()
with running_server(create_app(Parrot, Say, Heard, max_concurrent_envs=8), log_config=None) as server:
    address = ("127.0.0.1", server.port)
    with GenericEnvClient(server.url).sync() as env:
        texts = [env.reset() and env.step({"message": "a"}).observation["text"]]
        waiting = [socket.socket() for _ in range(3)]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting[-1].fileno() + 20, hard))
        taken = []
        try:
            while True:
                taken.append(socket.socket())
        except OSError:
            pass
        for each in waiting:
            each.connect(address)  # the kernel takes them, the server cannot
        wait_until(lambda: any("No file descriptors left" in line for line in lines), 60)
        texts += [env.step({"message": text}).observation["text"] for text in "bcd"]
        for each in (*taken, *waiting):
            each.close()
        wait_until(lambda: any("available again" in line for line in lines), 60)
    with GenericEnvClient(server.url).sync() as env:
        texts.append(env.reset() and env.step({"message": "e"}).observation["text"])
print(json.dumps({"texts": texts, "lines": lines}))
"""


@pytest.mark.slow_but_for("uvloop")
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_server_without_descriptors_says_so_once_keeps_its_sessions_and_recovers(loop: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [sys.executable, "program.py", loop],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["texts"] == list("abcde")
    exhausted = [line for line in seen["lines"] if "descriptor" in line]
    assert len(exhausted) == 2, exhausted
    assert "ulimit -n" in exhausted[0]
    assert "available again" in exhausted[1]


@pytest.mark.anyio
async def test_a_process_without_descriptors_is_reported_twice_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    watch = FileWatch(asyncio.get_running_loop(), clock=lambda: now)
    for second in range(70):
        now = float(second)
        assert watch.note(OSError(errno.EMFILE, "Too many open files"))
    assert watch.note(OSError(errno.ENFILE, "Too many open files in system"))
    assert not watch.note(OSError(errno.ECONNRESET, "reset"))
    assert not watch.note(ValueError("x"))
    assert len(caplog.messages) == 3


@pytest.mark.anyio
async def test_other_failures_of_the_loop_reach_the_handler_of_before() -> None:
    loop = asyncio.get_running_loop()
    seen: list[str] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda loop, context: seen.append(context["message"]))
    try:
        with FileWatch(loop).running():
            loop.call_exception_handler({"message": "accept", "exception": OSError(errno.EMFILE, "")})
            loop.call_exception_handler({"message": "other", "exception": ValueError()})
        loop.call_exception_handler({"message": "after"})
    finally:
        loop.set_exception_handler(before)
    assert seen == ["other", "after"]
