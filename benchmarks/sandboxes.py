"""What it costs to start a sandbox: `local` beside Docker, in turns within one run.

    python benchmarks/sandboxes.py [--rounds N] [--into FILE.md]

A start is measured from the call until the first command in the sandbox has ended: `open()` and `exec(["true"])`, or
`docker run --rm IMAGE true`. A Docker engine of its own is started for it and ended afterwards; its image is the
smallest there is, one static program, which is imported and not pulled. Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from docker_engine import EngineUnavailable, docker_engine

from openenv.sandboxes import DockerSandboxes, LocalSandboxes, Sandboxes, SandboxPool

IMAGE = "openenv-bench:latest"
TITLE = "## Start of a sandbox"
GOAL_MS, GOAL_RATIO = 50.0, 10.0
Start = Callable[[], float]


def opened(backend: Sandboxes) -> Start:
    """Start a sandbox and run a command; closing it is not counted."""

    def start() -> float:
        began = time.perf_counter()
        sandbox = backend.open()
        sandbox.exec(["true"])
        seconds = time.perf_counter() - began
        sandbox.close()
        return seconds

    return start


def leased(pool: SandboxPool) -> Start:
    """Take a sandbox that waits and run a command."""

    def start() -> float:
        pool.wait_ready()
        began = time.perf_counter()
        with pool.lease() as sandbox:
            sandbox.exec(["true"])
            return time.perf_counter() - began

    return start


def ran(*command: str) -> Start:
    """Run a program to its end."""

    def start() -> float:
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    return start


def commands(sandboxes: Sandboxes, stack: ExitStack) -> Start:
    """Run another command in a sandbox that runs already."""
    sandbox = stack.enter_context(sandboxes.open())

    def start() -> float:
        began = time.perf_counter()
        sandbox.exec(["true"])
        return time.perf_counter() - began

    return start


def import_image(host: str) -> None:
    """Make an image of busybox alone."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise EngineUnavailable("busybox is not installed: apt-get install -y busybox-static")
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(busybox, "bin/busybox")
            for name in ("sh", "true"):
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        subprocess.run(["docker", "--host", host, "import", str(archive), IMAGE], check=True, capture_output=True)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of all values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(starts: dict[str, Start], rounds: int) -> dict[str, list[float]]:
    """Take turns; the first round is thrown away."""
    taken: dict[str, list[float]] = {name: [] for name in starts}
    for round_ in range(rounds + 1):
        for name, start in starts.items():
            seconds = start()
            if round_:
                taken[name].append(seconds * 1000)
        print(f"\rround {round_} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return taken


def report(taken: dict[str, list[float]], load: float) -> str:
    """Return the table."""
    rounds = len(next(iter(taken.values())))
    docker = percentile(taken["docker run --rm"], 0.5) if "docker run --rm" in taken else None
    local = percentile(taken["local"], 0.5)
    lines = [
        TITLE,
        "",
        f"`python benchmarks/sandboxes.py --rounds {rounds}`. From the call until the first command has ended; "
        f"{rounds} rounds in turns on {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, load {load:.1f} at the beginning.",
        "",
        "| start | p50 ms | p99 ms | min ms | p50 against docker run |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, values in taken.items():
        middle = percentile(values, 0.5)
        ratio = f"{docker / middle:.1f}x faster" if docker is not None and middle else "-"
        figures = " | ".join(f"{figure:.1f}" for figure in (middle, percentile(values, 0.99), min(values)))
        lines.append(f"| {name} | {figures} | {ratio} |")
    verdict = "**PASS**" if local < GOAL_MS else "**MISS**"
    lines += ["", f"local, p50 < {GOAL_MS:.0f} ms: {verdict}"]
    if docker is not None:
        verdict = "**PASS**" if docker / local >= GOAL_RATIO else "**MISS**"
        lines[-1] += f"; local >= {GOAL_RATIO:.0f}x faster than docker run: {verdict}"
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--into", type=Path, help="put the table into this file as well, as its last section")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        local = LocalSandboxes()
        local.check()
        pool = stack.enter_context(SandboxPool(local, size=1))
        starts: dict[str, Start] = {
            "local": opened(local),
            "local, from a warm pool": leased(pool),
            "local, another command": commands(local, stack),
        }
        try:
            host = stack.enter_context(docker_engine())
            import_image(host)
            docker = DockerSandboxes(IMAGE, engine="docker", host=host)
            docker.check()
            run = ("docker", "--host", host, "run", "--rm", "--network", "none", IMAGE, "/bin/true")
            starts |= {"docker run --rm": ran(*run), "docker": opened(docker)}
        except EngineUnavailable as error:
            print(f"without Docker: {error}", file=sys.stderr)
        text = report(measure(starts, arguments.rounds), load)
    print(text)
    if arguments.into is not None:
        before = arguments.into.read_text().partition(TITLE)[0].rstrip() if arguments.into.exists() else ""
        arguments.into.write_text(f"{before}\n\n{text}".lstrip())


if __name__ == "__main__":
    main()
