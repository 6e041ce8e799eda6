#!/usr/bin/env python3
"""Measure everything on this machine, one program after the other, and write one report.

    python benchmarks/whole.py                       about an hour; writes .bench/CORES-cores/REPORT.md
    python benchmarks/whole.py --quick               the same tables in seven minutes, with fewer rounds
    python benchmarks/whole.py --quick --only sessions --ours PYTHON --published PYTHON

With four cores or more, servers get the first half of the cores and load generators the others. With fewer they share
them, which favours servers with few processes: then compare ratios only. Each part of the report names its command; the
head names the machine, the cores of both sides and the date. Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from interpreters import ROOT, SOURCE, child_environment, create_published_venv
from procfs import core_list, cores_of, sharing_warning, split_cores

OURS, PUBLISHED = "--ours", "--published"
MAIN = "published-uvloop,ours-thread,ours-inline,ours-uvicorn"


@dataclass(frozen=True, slots=True)
class Part:
    """A program, and how it is called.

    Args:
        program: The file.
        arguments: Of every run; {out} is the part's report, {folder} its folder.
        full: Of a full run.
        quick: Of a quick run.
        takes: The options for interpreters that the program has; `whole.py` passes its own on.
    """

    program: str
    arguments: str
    full: str = ""
    quick: str = ""
    takes: tuple[str, ...] = ()


PARTS = {
    "sessions": Part(
        "run.py",
        "--only ws,cores --out {out} --json {out}.json --plot {out}.png",
        quick=f"--rounds 2 --seconds 0.8 --configurations {MAIN}",
        takes=(OURS, PUBLISHED),
    ),
    "workers": Part(
        "workers.py",
        "--out {folder}",
        quick="--workers 8 --published-workers 8 --sessions 2048 --generators 8 --seconds 1.5 --held 0 --only",
        takes=(OURS, PUBLISHED),
    ),
    "vectors": Part("gymnasium_vector.py", "--out {out}", quick="--windows 5 --seconds 0.2"),
    "calls": Part(
        "run.py",
        "--out {out} --json {out}.json --plot {out}.png",
        full="--only import,start,clients,messages,http,mcp,vector",
        quick=f"--only http,mcp --rounds 1 --seconds 0.8 --configurations {MAIN}",
        takes=(OURS, PUBLISHED),
    ),
    "play": Part("play.py", "--into {out}"),
    "forks": Part("fork.py", "--only forks --into {out}", quick="--forks 8 --runner process"),
    "neighbours": Part("neighbours.py", "--into {out}", quick="--rounds 1 --seconds 1 --states warm"),
}
LEAST_CORES = {"workers": 4}
STOP_S = 20.0


def parts(text: str) -> list[str]:
    """Parse a comma-separated list of parts."""
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    return names


def head(cores: set[int]) -> str:
    """Return the head of the report."""
    servers, generators = split_cores(cores)
    lines = [
        f"# Benchmarks on {len(cores)} cores",
        "",
        "| what | value |",
        "| --- | --- |",
        f"| machine | {platform.machine()}, {len(cores)} of {os.cpu_count()} cores |",
        f"| Python | {platform.python_version()} |",
        f"| server cores | {core_list(servers)} |",
        f"| generator cores | {core_list(generators)} |",
        f"| date | {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} |",
        f"| load before | {os.getloadavg()[0]:.1f} |",
    ]
    warning = sharing_warning(servers, generators)
    return "\n".join([*lines, "", warning] if warning else lines)


def measure(name: str, folder: Path, options: argparse.Namespace, deadline: float) -> str:
    """Run a part, until the deadline at most; return its section of the report."""
    part, out = PARTS[name], folder / f"{name}.md"
    out.unlink(missing_ok=True)
    filled = f"{part.arguments} {part.quick if options.quick else part.full}".strip()
    shown = f"python benchmarks/{part.program} {filled.format(out=out.name, folder='.')}"
    if time.monotonic() > deadline:
        return f"## {name}\n\n`{shown}`\n\nLeft out: no time."
    print(shown, file=sys.stderr)
    pythons = {OURS: options.ours, PUBLISHED: options.published}
    interpreters = [text for key in part.takes if pythons[key] for text in (key, pythons[key])]
    command = [options.ours, str(ROOT / "benchmarks" / part.program), *interpreters]
    began = time.monotonic()
    command += shlex.split(filled.format(out=out, folder=folder))
    with subprocess.Popen(command, cwd=ROOT, env=child_environment(os.environ, source=SOURCE)) as process:
        try:
            process.wait(deadline - began if deadline < math.inf else None)
        except subprocess.TimeoutExpired:
            process.terminate()  # it writes what there is
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    failure = f"**Exit code {process.returncode}.**\n\n" if process.returncode else ""
    shown = f"`{shown}` ({time.monotonic() - began:.0f} s)"
    return f"## {name}\n\n{shown}\n\n{failure}{text.replace('# ', '### ', 1) if text.startswith('# ') else text}"


def main() -> None:
    """Run the parts and write the report after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="rough figures")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many; what is left is left out")
    parser.add_argument(
        "--ours", default=sys.executable, type=os.path.abspath, help="interpreter that runs the source tree"
    )
    parser.add_argument(
        "--published", default="", help="interpreter with the published package (default: run.py makes one)"
    )
    parser.add_argument("--into", type=Path, help="the folder of the report (default .bench/CORES-cores)")
    options = parser.parse_args()
    if not options.published and any(PUBLISHED in PARTS[name].takes for name in options.only):
        options.published = create_published_venv(os.environ)
    cores, deadline = cores_of(0), time.monotonic() + 60 * options.minutes
    folder = (options.into or ROOT / ".bench" / f"{len(cores)}-cores").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sections = [head(cores)]
    for name in options.only:
        if len(cores) < LEAST_CORES.get(name, 1):
            sections.append(f"## {name}\n\nLeft out: needs {LEAST_CORES[name]} cores.")
        else:
            sections.append(measure(name, folder, options, deadline))
        (folder / "REPORT.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(folder / "REPORT.md")


if __name__ == "__main__":
    main()
