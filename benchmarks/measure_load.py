"""Sections that put servers under load: WebSocket sessions at rising levels, HTTP steps, tool calls, large messages.

All servers of a round run side by side and take turns, level by level, so that each ratio compares neighbours in time.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack

from configurations import BENCHMARKS
from interpreters import child_environment
from plan import MeasurementError, Plan, run_json
from samples import Sample

from servers import Server

HTTP_CONNECTIONS = 64
TOOL_SESSIONS = 64
STATELESS_CALLS = 16  # at once; each builds an environment
MESSAGE_SESSIONS = 8
MESSAGES = {"10 KB": 10_000, "1 MB": 1_000_000}
SETUP_TIMEOUT_S = 120.0


def load(server: Server, *, seconds: float, sessions: int, extra: tuple[str, ...] = ()) -> dict[str, float]:
    """Run the load generator against a server and return its figures.

    Raises:
        MeasurementError: no session could be opened or a reply was wrong.
    """
    if not server.running():
        raise MeasurementError(f"server died: {server.last_line()}")
    command = [sys.executable, str(BENCHMARKS / "loadgen.py"), "--url", server.url, "--pid", str(server.pid)]
    command += ["--sessions", str(sessions), "--seconds", str(seconds), "--setup-timeout", str(SETUP_TIMEOUT_S), *extra]
    limit = SETUP_TIMEOUT_S + seconds + 240
    values = run_json(command, environment=child_environment(os.environ), timeout=limit, cwd=BENCHMARKS)
    # a server that lives through the levels keeps memory of earlier ones: count from when it was fresh
    grown = values["server_rss_mb"] * 1024 - server.fresh_rss_kb
    return values | {"rss_kb_per_session": round(grown / sessions, 1)}


def sample(
    plan: Plan, server: Server, *, section: str, case: str, round_: int, sessions: int, subject: str = "",
    extra: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Take and record one sample, a failure included."""
    subject = subject or server.runnable.key
    try:
        values = load(server, seconds=plan.seconds, sessions=sessions, extra=extra)
        taken = Sample(section, subject, case, round_, values)
    except MeasurementError as error:
        taken = Sample(section, subject, case, round_, failure=str(error))
    plan.record(taken, shown="steps_per_s")


def measure_ws(plan: Plan) -> None:
    """Step WebSocket sessions; one process per configuration lives through all levels of a round."""
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            servers = plan.start_servers(stack, section="ws", round_=round_)
            for level in plan.levels:
                for server in servers:
                    sample(plan, server, section="ws", case=str(level), round_=round_, sessions=level)


def measure_http(plan: Plan) -> None:
    """POST /step: stateless on both sides, and with a session header on ours."""
    stateless, stateful = ("--mode", "http"), ("--mode", "http", "--http-session")
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            for server in plan.start_servers(stack, section="http", round_=round_):
                where = {"section": "http", "case": str(HTTP_CONNECTIONS)}
                if server.runnable.configuration.is_ours:
                    sample(plan, server, **where, round_=round_, sessions=HTTP_CONNECTIONS, extra=stateful)
                    subject = f"{server.runnable.key} stateless"
                else:
                    subject = server.runnable.key
                sample(
                    plan, server, **where, round_=round_, sessions=HTTP_CONNECTIONS, subject=subject, extra=stateless
                )


def measure_mcp(plan: Plan) -> None:
    """Call a tool: as a step and in an mcp message on /ws, and with POST /mcp with and without a session."""
    action = json.dumps({"type": "call_tool", "tool_name": "echo", "arguments": {"message": "x" * 100}})
    # One session first, as a server that has been up for a while has seen: it shows what a call costs, and the thread
    # runner places the others by that.
    cases = {
        "step on /ws, 1 session": (1, ("--action", action)),
        "step on /ws": (TOOL_SESSIONS, ("--action", action)),
        "mcp on /ws": (TOOL_SESSIONS, ("--mode", "mcp")),
        "POST /mcp": (TOOL_SESSIONS, ("--mode", "mcp-http", "--http-session")),
        "POST /mcp, no session": (STATELESS_CALLS, ("--mode", "mcp-http")),
    }
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            servers = plan.start_servers(stack, section="mcp", round_=round_, app="tool_app")
            for case, (sessions, extra) in cases.items():
                for server in servers:
                    sample(plan, server, section="mcp", case=case, round_=round_, sessions=sessions, extra=extra)


def measure_messages(plan: Plan) -> None:
    """Step a few WebSocket sessions with large messages."""
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            servers = plan.start_servers(stack, section="messages", round_=round_)
            for case, size in MESSAGES.items():
                for server in servers:
                    sample(
                        plan, server, section="messages", case=case, round_=round_, sessions=MESSAGE_SESSIONS,
                        extra=("--payload", str(size)),
                    )  # fmt: skip
