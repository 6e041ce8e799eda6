"""CPU, memory, threads and limits of processes, from /proc (Linux). Knows nothing of what the processes do."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """What a process and its descendants use."""

    cpu_s: float = 0.0
    rss_kb: int = 0
    threads: int = 0


def process_tree(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    pids = [pid]
    for parent in pids:  # grows while it is walked
        try:
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        except OSError:
            continue
    return pids


def process_stats(pid: int) -> ProcessStats:
    """Return what the process tree uses now; all zero for pid 0."""
    ticks = rss = threads = 0
    for member in process_tree(pid) if pid else []:
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
        threads += int(fields[17])
        rss += int(fields[21]) * PAGE_KB
    return ProcessStats(cpu_s=ticks / TICKS_PER_S, rss_kb=rss, threads=threads)


def cores_of(pid: int) -> set[int]:
    """Return the cores that a process may use; 0 is this process."""
    return os.sched_getaffinity(pid)


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def core_list(cores: set[int]) -> str:
    """Write cores as `taskset` takes them."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def sharing_warning(server: set[int], generator: set[int]) -> str:
    """Return a warning if a server and its load generator compete for cores, else an empty string."""
    if not server & generator:
        return ""
    return (
        f"warning: the server (cores {core_list(server)}) and the load generator (cores {core_list(generator)}) share "
        f"cores {core_list(server & generator)}. This favours servers with few processes and threads: compare ratios "
        "only, and pin the two to different cores."
    )


def split_cores(cores: set[int]) -> tuple[set[int], set[int]]:
    """Return cores for the servers and for everything else: halves, or both sets whole with fewer than four."""
    if len(cores) < 4:
        return cores, cores
    ordered = sorted(cores)
    half = len(ordered) // 2
    return set(ordered[:half]), set(ordered[half:])


def machine_cpu_s() -> float:
    """Return the CPU seconds the whole machine has spent, without idle, wait and steal."""
    with open("/proc/stat", encoding="ascii") as stat:
        fields = [int(field) for field in stat.readline().split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / TICKS_PER_S


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the hard one; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
