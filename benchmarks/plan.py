"""What one run measures, shared by all sections: configurations, rounds, duration, levels, progress."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from configurations import Runnable
from interpreters import Interpreter
from samples import Sample, Samples, numbers, without_directories

from servers import Server, ServerError


class MeasurementError(RuntimeError):
    """A measuring process failed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of a run and the samples it gathers."""

    runnables: Sequence[Runnable]
    stub: Runnable
    interpreters: Mapping[str, Interpreter | None]  # by side
    rounds: int
    seconds: float
    levels: Sequence[int]
    client_steps: int
    generators: int = 1  # processes that load a server together
    missing: str = ""
    samples: Samples = field(default_factory=Samples)

    def record(self, sample: Sample, *, shown: str = "") -> None:
        """Keep a sample and show it on stderr."""
        self.samples.add(sample)
        if sample.failure.startswith("not available"):
            return  # said once when the run was planned
        figure = f"failed: {sample.failure}" if sample.failure else f"{sample.values.get(shown, '')} {shown}"
        print(
            f"[{sample.section}] round {sample.round} {sample.subject:<24} {sample.case:<15} {figure}",
            file=sys.stderr,
        )

    def start_servers(
        self, stack: ExitStack, *, section: str, round_: int, app: str = "echo_app", only_ours: bool = False
    ) -> list[Server]:
        """Start one fresh server per configuration; those that fail are recorded and left out."""
        servers = []
        chosen = [one for one in self.runnables if one.configuration.is_ours or not only_ours]
        for runnable in (replace(runnable, app=app) for runnable in chosen):
            try:
                servers.append(stack.enter_context(Server(runnable)))
            except ServerError as error:
                self.record(Sample(section, runnable.key, "start", round_, failure=str(error)))
        return servers


def run_json(command: Sequence[str], *, environment: Mapping[str, str], timeout: float, cwd: Path) -> dict[str, float]:
    """Run a measuring process and return the figures in the JSON object it prints last.

    Raises:
        MeasurementError: it failed, ran too long or printed none.
    """
    try:
        done = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"timed out after {timeout:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise MeasurementError(without_directories(lines[-1])[:200])
    return numbers(json.loads(done.stdout.splitlines()[-1]))
