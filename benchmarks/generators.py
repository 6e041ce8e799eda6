"""Several load generators that begin together, and their reports as one.

One generator is one Python process: it makes some 70,000 steps/s, less than a fast server. So a machine with enough
cores runs several, each pinned to a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from configurations import BENCHMARKS

LOADGEN = [sys.executable, str(BENCHMARKS / "loadgen.py")]
ALL_CORES = sorted(os.sched_getaffinity(0))
DONE_S = 120.0
Row = dict[str, Any]


class GeneratorError(RuntimeError):
    """A load generator failed; the text is its last line."""


def parts(total: int, count: int) -> list[int]:
    """Split a number of sessions among generators."""
    size, more = divmod(total, count)
    return [part for part in (size + (index < more) for index in range(count)) if part]


def together(
    commands: Sequence[list[str]],
    cores: Sequence[int],
    *,
    words: int,
    environment: Mapping[str, str],
    timeout: float = DONE_S,
) -> list[Row]:
    """Run load generators that begin together; return their reports.

    Args:
        commands: One for each.
        cores: Each is pinned to one of them, in turn.
        words: How often each of them waits for the others.
        environment: Their environment.
        timeout: The most seconds for each step on the way.

    Raises:
        GeneratorError: One of them failed.
    """
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=partial(os.sched_setaffinity, 0, {cores[number % len(cores)]}),
        )
        for number, command in enumerate(commands)
    ]
    try:
        for _ in range(words):
            for process in running:
                assert process.stdout is not None
                if not process.stdout.readline():
                    assert process.stderr is not None
                    raise GeneratorError((process.stderr.read().strip().splitlines() or ["no output"])[-1])
            for process in running:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        outputs = [process.communicate(timeout=timeout) for process in running]
    except subprocess.TimeoutExpired as error:
        raise GeneratorError(f"timed out after {timeout:.0f} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise GeneratorError((errors.strip().splitlines() or ["no output"])[-1])
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def merged(reports: Sequence[Row]) -> Row:
    """Return the report of generators that loaded the same server, as one generator would have written it.

    The latency quantiles are those of the generator that waited longest.
    """
    first = reports[0]
    if len(reports) == 1:
        return first
    steps = max(1, sum(report["steps"] for report in reports))
    opened = sum(report["opened"] for report in reports)
    busy = [report["loadgen_busy"] for report in reports]
    row = dict(first)
    for name in ("sessions", "steps", "errors", "opened"):
        row[name] = sum(report[name] for report in reports)
    for name in ("p50_ms", "p99_ms", "max_ms", "setup_s", "seconds", "loadgen_busy"):
        row[name] = max(report[name] for report in reports)
    row["first_error"] = next((report["first_error"] for report in reports if report["first_error"]), "")
    row["steps_per_s"] = round(sum(report["steps_per_s"] for report in reports), 1)
    row["setup_per_s"] = round(opened / row["setup_s"], 1)
    row["close_per_s"] = round(sum(report["close_per_s"] for report in reports), 1)
    if "server_busy" in first:
        # Each has read the CPU of the whole server, and divided it by its own steps.
        row["server_cpu_us_per_step"] = round(first["server_cpu_us_per_step"] * first["steps"] / steps, 1)
        row["server_setup_cpu_us"] = round(first["server_setup_cpu_us"] * first["opened"] / opened)
        row["foreign_cores"] = round(max(0.0, first["foreign_cores"] - sum(busy[1:])), 2)
    return row
