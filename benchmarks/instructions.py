#!/usr/bin/env python3
"""Count the instructions of one operation in this checkout and in an older one, with valgrind's callgrind.

Time on a shared machine varies by a factor of two between two runs; instructions vary by a few per mille, so a change
of 3 % shows. They leave out waiting, caches and the kernel: `run.py` is for what users see.

  git worktree add ../before REVISION && python benchmarks/instructions.py --before ../before
  python benchmarks/instructions.py --before ../before --only inline,clients

The server (for `clients` the client) runs under callgrind, some 50 times slower; the other side runs as usual. So the
time limits of the thread runner are stretched; otherwise every step would count as slow, and each session would
get a thread. Each operation is repeated until it is warm, then counted over COUNT repetitions. Needs valgrind, and
websockets here.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from servers import free_port

HERE = Path(__file__).resolve().parent
WARMUP, COUNT = 60, 240
MESSAGE = "x" * 100
SESSION_HEADER = "X-OpenEnv-Session"

SLOWER = 200  # callgrind by 50, and other work on the machine
_SERVE = "serve {app}:app --host 127.0.0.1 --port {port} --log-level warning --no-web --runner "
_UVICORN = "{app}:app --host 127.0.0.1 --port {port} --log-level warning --loop uvloop --http httptools"
SERVERS = {"inline": _SERVE + "inline", "thread": _SERVE + "thread", "uvicorn": _UVICORN}

# Starts a server; its arguments are the module to run, and its arguments.
START = f"""
import importlib, runpy, sys
for path in ("server.runners.dispatcher", "server.runners.thread", "runners.dispatcher", "runners.thread"):
    try:
        module = importlib.import_module("openenv." + path)
    except ModuleNotFoundError:
        continue  # older checkouts have them elsewhere
    for name in ("WAIT_S", "TURN_S", "SLOW_S", "FAST_S", "_SWITCH_S"):
        if hasattr(module, name):
            setattr(module, name, {SLOWER} * getattr(module, name))
sys.setswitchinterval({SLOWER} * sys.getswitchinterval())
sys.argv[:2] = [sys.argv[1]]
sys.path.insert(0, ".")
runpy.run_module(sys.argv[0], run_name="__main__")
"""

# Steps 64 sessions; its arguments are the server and the number of steps.
VECTOR = """
import sys
from openenv import VectorEnv
with VectorEnv(sys.argv[1], 64, connections=1) as env:
    env.reset()
    for _ in range(int(sys.argv[2])):
        env.step([{"message": "hello"}] * 64)
"""

Operation = Callable[[], object]


class Callgrind:
    """A process under callgrind, and the instructions it has run since they were last read."""

    def __init__(self, folder: Path, command: list[str], **options: Any) -> None:
        self._out = folder / "callgrind"
        self._dumps = 0
        under = ["valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={self._out}"]
        self.process = subprocess.Popen([*under, *command], **options)

    def read(self) -> int:
        """Return the instructions since the last call, and start again at 0."""
        subprocess.run(["callgrind_control", "--dump", str(self.process.pid)], check=True, capture_output=True)
        self._dumps += 1
        return self._total(Path(f"{self._out}.{self._dumps}"))

    def finish(self) -> int:
        """Wait for the end of the process; return its instructions."""
        if self.process.wait() != 0:
            raise SystemExit(f"{self.process.args} failed")
        return self._total(self._out)

    @staticmethod
    def _total(path: Path) -> int:
        totals = (line.split()[1] for line in path.read_text().splitlines() if line.startswith(("totals:", "summary:")))
        return int(next(totals))


def environ(checkout: Path) -> dict[str, str]:
    """Return the environment of a process that runs a checkout's code."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENENV_"))}
    return {**kept, "PYTHONPATH": str(checkout / "src"), "PYTHONHASHSEED": "0"}


def serve_command(kind: str, app: str, port: int) -> list[str]:
    """Return the command of a server."""
    module = "uvicorn" if kind == "uvicorn" else "openenv.cli"
    return [sys.executable, "-c", START, module, *SERVERS[kind].format(app=app, port=port).split()]


@contextmanager
def server(checkout: Path, kind: str, app: str) -> Iterator[tuple[Callgrind, int]]:
    """Start a server under callgrind and wait until it answers."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        run = Callgrind(Path(folder), serve_command(kind, app, port), cwd=HERE / "apps", env=environ(checkout))
        try:
            wait_healthy(port, run.process)
            yield run, port
        finally:
            run.process.terminate()
            run.process.wait()


def wait_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait for the first answer of `/health`."""
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and process.poll() is None:
        try:
            request(http.client.HTTPConnection("127.0.0.1", port, timeout=60), "GET", "/health")
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise SystemExit(f"{process.args} does not answer")


def request(
    connection: http.client.HTTPConnection, method: str, path: str, body: object = None, session: str | None = None
) -> tuple[str, bytes]:
    """Send a request; return the session that the reply names, and its body."""
    headers = {"Content-Type": "application/json"} | ({SESSION_HEADER: session} if session else {})
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    content = reply.read()
    if reply.status != 200:
        raise SystemExit(f"{method} {path}: {reply.status} {content[:300]!r}")
    return reply.headers.get(SESSION_HEADER, ""), content


def exchange(sockets: list[ClientConnection], text: str) -> None:
    """Send a message on each socket, then read a reply from each."""
    for socket in sockets:
        socket.send(text)
    for socket in sockets:
        reply = socket.recv()
        if '"type":"error"' in str(reply)[:200]:
            raise SystemExit(f"the reply to {text[:80]} is {reply!r}")


def open_socket(port: int, **options: Any) -> ClientConnection:
    """Open a WebSocket without compression."""
    return connect(f"ws://127.0.0.1:{port}/ws", compression=None, max_size=None, ping_interval=None, **options)


def v1(stack: ExitStack, port: int, *, sessions: int = 1, data: object = None, kind: str = "step") -> Operation:
    """Return one request on each of some v1 connections."""
    sockets = [stack.enter_context(open_socket(port)) for _ in range(sessions)]
    exchange(sockets, '{"type":"reset","data":{}}')
    text = json.dumps({"type": kind, "data": {"message": MESSAGE} if data is None else data})
    return lambda: exchange(sockets, text)


def v2(stack: ExitStack, port: int, *, batch: int = 0) -> Operation:
    """Return one v2 step, or a batch of steps of as many sessions."""
    socket = stack.enter_context(open_socket(port, subprotocols=["openenv.v2.json"]))
    ids = iter(range(1, 1_000_000))
    names = []
    for _ in range(max(1, batch)):
        socket.send(json.dumps({"type": "open", "id": next(ids)}))
        names.append(json.loads(socket.recv())["session"])
        exchange([socket], json.dumps({"type": "reset", "id": next(ids), "session": names[-1], "data": {}}))

    def step(name: str) -> dict[str, object]:
        return {"type": "step", "id": next(ids), "session": name, "data": {"message": MESSAGE}}

    if not batch:
        return lambda: exchange([socket], json.dumps(step(names[0])))
    return lambda: exchange(
        [socket], json.dumps({"type": "batch", "id": next(ids), "requests": [step(name) for name in names]})
    )


def opening(port: int) -> Operation:
    """Return the opening, reset and end of a v1 session."""

    def once() -> None:
        with open_socket(port) as socket:
            exchange([socket], '{"type":"reset","data":{}}')

    return once


def http_step(port: int, *, stateful: bool) -> Operation:
    """Return one POST /step."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    session = request(connection, "POST", "/reset", {}, "new")[0] if stateful else None
    return lambda: request(connection, "POST", "/step", {"action": {"message": MESSAGE}}, session)


ECHO = {"name": "echo", "arguments": {"message": MESSAGE}}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ECHO}


def mcp_post(port: int) -> Operation:
    """Return one POST /mcp in a session of our own JSON-RPC."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    create = {"jsonrpc": "2.0", "id": 0, "method": "openenv/session/create", "params": {}}
    session = json.loads(request(connection, "POST", "/mcp", create)[1])["result"]["session_id"]
    call = {**CALL, "params": {**ECHO, "session_id": session}}
    return lambda: request(connection, "POST", "/mcp", call)


def operations(stack: ExitStack, app: str, port: int) -> Iterator[tuple[str, int, Operation]]:
    """Yield what is counted: its name, how many steps it makes, and the operation."""
    if app == "echo_app":
        yield "v1 step", 1, v1(stack, port)
        yield "v1 step, 16 sessions", 16, v1(stack, port, sessions=16)
        yield "v1 step, 10 KB", 1, v1(stack, port, data={"message": MESSAGE * 100})
        yield "v2 step", 1, v2(stack, port)
        yield "v2 step in a batch of 32", 32, v2(stack, port, batch=32)
        yield "connect and reset", 1, opening(port)
        yield "HTTP step", 1, http_step(port, stateful=True)
        yield "HTTP step, stateless", 1, http_step(port, stateful=False)
    else:
        step = {"type": "call_tool", "tool_name": "echo", "arguments": {"message": MESSAGE}}
        yield "tool call as a step", 1, v1(stack, port, data=step)
        yield "tool call in an mcp message", 1, v1(stack, port, data=CALL, kind="mcp")
        yield "tool call, POST /mcp", 1, mcp_post(port)


def count_server(checkout: Path, kind: str, app: str) -> Iterator[tuple[str, float]]:
    """Yield what each operation costs a server."""
    with server(checkout, kind, app) as (run, port), ExitStack() as stack:
        for name, steps, operation in operations(stack, app, port):
            for _ in range(max(1, WARMUP // steps)):
                operation()
            repetitions = max(8, COUNT // steps)
            run.read()
            for _ in range(repetitions):
                operation()
            yield f"{name}, {kind}", run.read() / repetitions / steps


def count_client(checkout: Path) -> Iterator[tuple[str, float]]:
    """Yield what one step costs each kind of client; the difference of a long and a short run leaves out its start."""
    port = free_port()
    stub = [sys.executable, "stub_server.py", "--port", str(port)]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(running(stub, HERE / "apps", environ(checkout)))
        real = free_port()
        serve = serve_command("inline", "echo_app", real)
        process = stack.enter_context(running(serve, HERE / "apps", environ(checkout)))
        wait_healthy(real, process)
        round_trip = [str(HERE / "clients/round_trip.py"), "--url", f"http://127.0.0.1:{port}", "--warmup", "1"]
        commands = {
            "step of the sync client": (1, lambda n: [*round_trip, "--kind", "sync", "--steps", str(n)]),
            "step of the async client": (1, lambda n: [*round_trip, "--kind", "async", "--steps", str(n)]),
            "step in VectorEnv, 64 sessions": (64, lambda n: ["-c", VECTOR, f"http://127.0.0.1:{real}", str(n // 8)]),
        }
        for name, (sessions, command) in commands.items():
            costs = []
            # Once without callgrind: the first run of a checkout compiles its modules.
            subprocess.run([sys.executable, *command(8)], env=environ(checkout), stdout=subprocess.DEVNULL, check=True)
            for steps in (80, 400):
                run = Callgrind(
                    Path(folder), [sys.executable, *command(steps)], env=environ(checkout), stdout=subprocess.DEVNULL
                )
                costs.append(run.finish())
            yield name, (costs[1] - costs[0]) / (320 if sessions == 1 else 40 * sessions)
        nothing, imported = (
            Callgrind(Path(folder), [sys.executable, "-c", code], env=environ(checkout)).finish()
            for code in ("", "from openenv.core.env_client import EnvClient")
        )
        yield "import of the client", imported - nothing


@contextmanager
def running(command: list[str], cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process while the block runs."""
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def count(checkout: Path, section: str) -> Iterator[tuple[str, float]]:
    """Yield the costs of a section."""
    if section == "clients":
        yield from count_client(checkout)
    elif section == "tools":
        yield from count_server(checkout, "inline", "tool_app")
    else:
        yield from count_server(checkout, section, "echo_app")


def main() -> None:
    """Count both checkouts section by section and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="the older checkout")
    parser.add_argument(
        "--only", default="inline,thread,uvicorn,tools,clients", metavar="SECTION", help="default: %(default)s"
    )
    options = parser.parse_args()
    print("| operation | before | after | before / after |\n|---|---:|---:|---:|")
    for section in options.only.split(","):
        before = dict(count(options.before.resolve(), section))
        for name, after in count(HERE.parent, section):
            print(f"| {name} | {before[name]:,.0f} | {after:,.0f} | {before[name] / after:.2f} |", flush=True)


if __name__ == "__main__":
    main()
