#!/usr/bin/env python3
"""Measure everything on this machine, one program after the other, and write one report.

    python benchmarks/whole.py                       about an hour; writes .bench/CORES-cores/REPORT.md
    python benchmarks/whole.py --quick --only main   some minutes

With four cores or more, servers get the first half of the cores and load generators the others. With fewer they share
them, which favours servers with few processes: then compare ratios only. Each part of the report names its command; the
head names the machine, the cores of both sides and the date. Run with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

from procfs import core_list, cores_of, sharing_warning, split_cores

ROOT = Path(__file__).resolve().parent.parent
# Each part: its program, its arguments, and those of a quick run; {out} is the part's report.
PARTS: dict[str, tuple[str, str, str]] = {
    "main": ("run.py", "--out {out} --json {out}.json --plot {out}.png", "--quick"),
    "vectors": ("gymnasium_vector.py", "--out {out}", "--windows 3 --sizes 8 128"),
    "neighbours": ("neighbours.py", "--into {out}", "--rounds 1 --seconds 1 --states warm"),
    "forks": ("fork.py", "--only forks --into {out}", "--forks 8"),
    "workers": ("workers.py", "--out {folder}", "--workers 1 2 --generators 1 --seconds 1 --held 500"),
}
SEVERAL_CORES = frozenset({"workers"})


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


def measure(name: str, folder: Path, *, quick: bool) -> str:
    """Run a part; return its section of the report."""
    program, arguments, quicker = PARTS[name]
    out = folder / f"{name}.md"
    out.unlink(missing_ok=True)
    filled = f"{arguments} {quicker}" if quick else arguments
    shown = f"python benchmarks/{program} {filled.format(out=out.name, folder='.')}"
    print(shown, file=sys.stderr)
    command = [sys.executable, str(ROOT / "benchmarks" / program)]
    done = subprocess.run([*command, *shlex.split(filled.format(out=out, folder=folder))], check=False, cwd=ROOT)
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    failure = f"**Exit code {done.returncode}.**\n\n" if done.returncode else ""
    return f"## {name}\n\n`{shown}`\n\n{failure}{text.replace('# ', '### ', 1) if text.startswith('# ') else text}"


def main() -> None:
    """Run the parts and write the report after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="rough figures")
    parser.add_argument("--into", type=Path, help="the folder of the report (default .bench/CORES-cores)")
    options = parser.parse_args()
    cores = cores_of(0)
    folder = (options.into or ROOT / ".bench" / f"{len(cores)}-cores").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sections = [head(cores)]
    for name in options.only:
        if name in SEVERAL_CORES and len(cores) < 4:
            sections.append(f"## {name}\n\nLeft out: needs four cores.")
        else:
            sections.append(measure(name, folder, quick=options.quick))
        (folder / "REPORT.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(folder / "REPORT.md")


if __name__ == "__main__":
    main()
