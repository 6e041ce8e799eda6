"""Section on client round trips: each side's async and sync client, one session, against several servers.

The stub costs next to nothing and so shows the client alone; the published server is the same for both clients; each
client against its own server is what a user gets.
"""

from __future__ import annotations

from contextlib import ExitStack

from configurations import BEFORE, BENCHMARKS, OURS, PUBLISHED
from interpreters import Interpreter
from plan import MeasurementError, Plan, run_json
from samples import Sample

from servers import Server, ServerError

KINDS = ("async", "sync")
OWN_SERVERS = {PUBLISHED: "published-uvloop", OURS: "ours-thread", BEFORE: "before-thread"}


def round_trips(interpreter: Interpreter, server: Server, *, kind: str, steps: int) -> dict[str, float]:
    """Step one session with a side's client and return its figures.

    Raises:
        MeasurementError: the client failed.
    """
    command = [interpreter.python, str(BENCHMARKS / "clients" / "round_trip.py"), "--url", server.url]
    command += ["--kind", kind, "--steps", str(steps), "--warmup", str(max(steps // 10, 20))]
    return run_json(command, environment=interpreter.environment, timeout=300, cwd=BENCHMARKS)


def measure_clients(plan: Plan) -> None:
    """Measure every client against every server of the section, in turns."""
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            servers: dict[str, Server] = {}
            failures: dict[str, str] = {}
            for runnable in (plan.stub, *plan.runnables):
                if runnable.key in (plan.stub.key, *OWN_SERVERS.values()):
                    try:
                        servers[runnable.key] = stack.enter_context(Server(runnable))
                    except ServerError as error:
                        failures[runnable.key] = str(error)
            for kind in KINDS:
                measure_round(plan, servers, failures=failures, kind=kind, round_=round_)


def measure_round(plan: Plan, servers: dict[str, Server], *, failures: dict[str, str], kind: str, round_: int) -> None:
    """Measure one kind of client once in each case."""
    cases = {
        "stub": dict.fromkeys(plan.interpreters, plan.stub.key),
        "published": dict.fromkeys(plan.interpreters, OWN_SERVERS[PUBLISHED]),
        "own": OWN_SERVERS,
    }
    for case, keys in cases.items():
        for side, interpreter in plan.interpreters.items():
            key = keys[side]
            server = servers.get(key)
            values: dict[str, float] = {}
            failure = ""
            if interpreter is None:
                failure = f"not available: {plan.missing}"
            elif server is None:
                failure = failures.get(key, "no server")
            else:
                try:
                    values = round_trips(interpreter, server, kind=kind, steps=plan.client_steps)
                except MeasurementError as error:
                    failure = str(error)
            plan.record(Sample("clients", side, f"{kind} {case}", round_, values, failure), shown="median_us")
