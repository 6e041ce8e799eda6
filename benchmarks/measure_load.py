"""Sections that put servers under load: WebSocket sessions at rising levels, HTTP steps, tool calls, large messages.

All servers of a round run side by side and take turns, level by level, so that each ratio compares neighbours in time.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace

from generators import LOADGEN, GeneratorError, merged, parts, together
from interpreters import child_environment
from plan import MeasurementError, Plan
from procfs import cores_of
from samples import Sample, numbers, without_directories

from servers import Server

CORES = (1, 2, 8)
CORE_LEVELS = (64, 256, 1000)
CORE_SUBJECTS = frozenset({"ours-thread", "ours-inline", "before-thread", "before-inline"})
HTTP_CONNECTIONS = 64
TOOL_SESSIONS = 64
STATELESS_CALLS = 16  # at once; each builds an environment
MESSAGE_SESSIONS = 8
MESSAGES = {"10 KB": 10_000, "1 MB": 1_000_000}
SETUP_TIMEOUT_S = 120.0
RAMP = 32  # sessions being opened at once, by all generators together


def load(
    server: Server, *, seconds: float, sessions: int, generators: int = 1, extra: tuple[str, ...] = ()
) -> dict[str, float]:
    """Load a server from one or more generators, each on a core of this process, and return the figures.

    Raises:
        MeasurementError: no session could be opened or a reply was wrong.
    """
    if not server.running():
        raise MeasurementError(f"server died: {server.last_line()}")
    shared = [*LOADGEN, "--url", server.url, "--pid", str(server.pid), "--seconds", str(seconds), "--in-step"]
    shared += ["--setup-timeout", str(SETUP_TIMEOUT_S), "--ramp", str(max(1, RAMP // generators)), *extra]
    commands = [[*shared, "--sessions", str(part)] for part in parts(sessions, generators)]
    limit = SETUP_TIMEOUT_S + seconds + 240
    environment = child_environment(os.environ)
    try:
        reports = together(commands, sorted(cores_of(0)), words=2, environment=environment, timeout=limit)
    except GeneratorError as error:
        raise MeasurementError(without_directories(str(error))[:200]) from error
    values = numbers(merged(reports))
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
        values = load(server, seconds=plan.seconds, sessions=sessions, generators=plan.generators, extra=extra)
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


def measure_cores(plan: Plan) -> None:
    """Step WebSocket sessions of the same servers on few and on many cores, all in turns."""
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            servers = []
            for count in CORES:
                chosen = [one for one in plan.runnables if one.key in CORE_SUBJECTS and len(one.cores) >= count]
                for runnable in chosen:
                    pinned = replace(runnable, cores=frozenset(sorted(runnable.cores)[:count]))
                    servers.append((count, stack.enter_context(Server(pinned))))
            for level in CORE_LEVELS:
                for count, server in servers:
                    case = f"{level} sessions, {count} core{'s' if count > 1 else ''}"
                    sample(plan, server, section="cores", case=case, round_=round_, sessions=level)


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
