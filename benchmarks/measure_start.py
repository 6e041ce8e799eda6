"""Sections about what it costs to begin: importing the client, and starting a server until /health answers."""

from __future__ import annotations

from configurations import BENCHMARKS
from plan import MeasurementError, Plan, run_json
from samples import Sample

from servers import Server, ServerError

IMPORTS = 5


def measure_import(plan: Plan) -> None:
    """Import the client in fresh interpreters; the first import of each side is thrown away (it writes bytecode)."""
    for turn in range(IMPORTS + 1):
        for side, interpreter in plan.interpreters.items():
            if interpreter is None:
                values, failure = {}, f"not available: {plan.missing}"
            else:
                command = [interpreter.python, str(BENCHMARKS / "clients" / "import_cost.py")]
                try:
                    values = run_json(command, environment=interpreter.environment, timeout=120, cwd=BENCHMARKS)
                    failure = ""
                except MeasurementError as error:
                    values, failure = {}, str(error)
            if turn:
                plan.record(Sample("import", side, "client", turn, values, failure), shown="cpu_s")


def measure_start(plan: Plan) -> None:
    """Start each server alone and note when it is healthy."""
    for round_ in range(1, plan.rounds + 1):
        for runnable in plan.runnables:
            try:
                with Server(runnable) as server:
                    values = {
                        "wall_s": round(server.start_wall_s, 3),
                        "cpu_s": round(server.start_cpu_s, 3),
                        "rss_mb": round(server.fresh_rss_kb / 1024, 1),
                    }
                taken = Sample("start", runnable.key, "healthy", round_, values)
            except ServerError as error:
                taken = Sample("start", runnable.key, "healthy", round_, failure=str(error))
            plan.record(taken, shown="wall_s")
