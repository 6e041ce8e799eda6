"""Memory of a server over many MCP sessions that come and go, each with a state of its own.

    python benchmarks/mcp_soak.py [--sessions 10000] [--state-mb 1] [--clients 4] [--runner thread]

A server in a process of its own; clients open a session over `/mcp`, call a tool and end it. The memory of the server
is printed as sessions go by. It is flat if the last quarter takes no more than the second one, but for `--slack-mb`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
from procfs import process_stats

import openenv

APP = """
from fastmcp import FastMCP
from openenv import create_app
from openenv.env.mcp_environment import MCPEnvironment
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.types import Observation, State


class Held(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.payload = bytearray({state_bytes})
        for place in range(0, len(self.payload), 4096):
            self.payload[place] = 1  # or the pages would not be there
        server = FastMCP("held")
        server.tool(self.holds)
        server.tool(self.waits)
        super().__init__(server)

    def holds(self) -> int:
        return len(self.payload)

    async def waits(self) -> int:
        return len(self.payload)

    def reset(self, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


app = create_app(Held, CallToolAction, CallToolObservation, max_concurrent_envs=64)
"""
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "soak", "version": "1"}}
BOTH = {"accept": "application/json, text/event-stream"}


def request(number: int, method: str, **params: object) -> dict[str, object]:
    """Build a request."""
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def use(http: httpx2.Client) -> None:
    """Open a session, call both tools, end it."""
    begun = http.post("/mcp", json=request(1, "initialize", **HELLO))
    named = {"mcp-session-id": begun.headers["mcp-session-id"]}
    for number, tool in ((2, "holds"), (3, "waits")):
        reply = http.post("/mcp", json=request(number, "tools/call", name=tool, arguments={}), headers=named)
        assert "result" in reply.json(), reply.text
    http.delete("/mcp", headers=named)


def start(folder: Path, options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    """Start the server and return its process and address."""
    (folder / "held.py").write_text(APP.replace("{state_bytes}", str(int(options.state_mb * 1024 * 1024))))
    log = folder / "log"
    environ = {**os.environ, "PYTHONPATH": str(Path(openenv.__file__).parents[1]), "COLUMNS": "200"}
    command = [
        sys.executable,
        "-m",
        "openenv",
        "serve",
        "held.py:app",
        "--port",
        "0",
        "--no-web",
        "--runner",
        options.runner,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace")):
            return process, found.group()
        time.sleep(0.05)
    raise RuntimeError(log.read_text(errors="replace"))


def soak(url: str, pid: int, options: argparse.Namespace) -> list[float]:
    """Use sessions, and return the server's megabytes at each report."""
    done, lock, readings = 0, threading.Lock(), [process_stats(pid).rss_kb / 1024]
    began = time.monotonic()
    print(f"{'sessions':>9} {'RSS MB':>8} {'seconds':>8}\n{0:>9} {readings[0]:>8.0f} {0:>8.0f}", flush=True)

    def work() -> None:
        nonlocal done
        with httpx2.Client(base_url=url, headers=BOTH, trust_env=False, timeout=60) as http:
            while True:
                with lock:
                    if done >= options.sessions:
                        return
                    done += 1
                    number = done
                use(http)
                if number % max(1, options.sessions // 20) == 0:
                    readings.append(process_stats(pid).rss_kb / 1024)
                    print(f"{number:>9} {readings[-1]:>8.0f} {time.monotonic() - began:>8.0f}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return readings


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--state-mb", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--runner", default="thread")
    parser.add_argument("--slack-mb", type=float, default=32.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder), options)
        try:
            readings = soak(url, process.pid, options)
        finally:
            process.terminate()
            process.wait(60)
    quarter = max(1, len(readings) // 4)
    growth = max(readings[-quarter:]) - max(readings[quarter : 2 * quarter])
    print(f"the last quarter is {growth:+.0f} MB over the second")
    return int(growth > options.slack_mb)


if __name__ == "__main__":
    sys.exit(main())
