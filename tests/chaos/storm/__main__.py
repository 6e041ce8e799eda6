"""`python -m storm`: run many episodes through faults, show what became of them, fail if anything lied.

Run with the published package's interpreter it measures that one; `--beside` runs both and writes the report.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from .report import EPISODES, NAMES, document, errors, left_behind, table
from .runner import Result, Run, Storm

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]


def main() -> int:
    """Run what the command line asks for."""
    options = _options()
    if options.beside is None:
        episodes = options.episodes or EPISODES[options.package]
        result = _run(Storm(options.package, episodes, options.seed, options.at_once))
        _show(options.package, result)
        if options.json:
            Path(options.json).write_text(json.dumps(result), encoding="utf-8")
        return 0 if result["is_clean"] else 1
    results = {package: _child(package, options) for package in options.only or NAMES}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if options.write:
        text = document(results, command="python -m storm --beside", date=today)
        Path(options.write).write_text(text, encoding="utf-8")
    return 0 if all(result["is_clean"] for package, result in results.items() if package != "published") else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m storm",
        description=__doc__,
        epilog="what can be put through it, and how many episodes that is by default:\n"
        + "\n".join(f"  {name:<14} {EPISODES[name]:>5}  {what}" for name, what in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--package", choices=list(NAMES), default="ours", metavar="WHAT", help="run this one; see below (default: ours)"
    )
    parser.add_argument("--episodes", type=int, metavar="N", help="how many, in place of the default")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first episode (default: 0)")
    parser.add_argument("--at-once", type=int, default=12, metavar="N", help="so many at the same time (default: 12)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument(
        "--beside",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="run all of them, one after the other; the published package with that interpreter, which is made if none "
        "is given",
    )
    parser.add_argument("--only", nargs="+", choices=list(NAMES), metavar="WHAT", help="with --beside: only these")
    parser.add_argument("--write", metavar="FILE", help="with --beside: write the report there")
    return parser.parse_args()


def _run(storm: Storm) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)  # broken connections are what this is about
    progress = _Progress(storm)
    with _own_place_for_files():
        result = Run(storm, progress.show).run()
    progress.end()
    return {
        **{name: value for name, value in vars(result).items() if not name.startswith("_")},
        "is_clean": result.is_clean,
        "episodes": storm.judged,
        "last_seed": storm.first_seed + storm.episodes - 1,
        "first_seed": storm.first_seed,
        "versions": _versions(storm.package),
    }


@contextlib.contextmanager
def _own_place_for_files() -> Iterator[None]:
    """Have temporary files in a folder of their own, where those that are left behind are seen."""
    with tempfile.TemporaryDirectory(prefix="storm") as folder:
        before = dict(os.environ)
        os.environ["TMPDIR"] = os.environ["STORM_TMPDIR"] = tempfile.tempdir = folder
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            tempfile.tempdir = None


def _versions(package: str) -> dict[str, str]:
    names = ("uvicorn", "websockets", "pydantic")
    openenv = {"openenv": metadata.version("openenv")} if package == "published" else {}
    return {**openenv, "Python": platform.python_version(), **{name: metadata.version(name) for name in names}}


class _Progress:
    """A line that says how far it is."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._is_terminal = sys.stderr.isatty()
        self._often = max(1, storm.judged // 10)

    def show(self, result: Result) -> None:
        done = sum(result.outcomes.values())
        if self._is_terminal or done % self._often == 0 or done == self._storm.judged:
            outcomes = ", ".join(f"{count} {name}" for name, count in result.outcomes.most_common())
            line = f"{NAMES[self._storm.package]}: {done}/{self._storm.judged} episodes, {outcomes}"
            sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else line + "\n")
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")


def _show(package: str, result: dict[str, Any]) -> None:
    lines = [f"\n{NAMES[package]}: {result['episodes']} episodes, {result['seconds']:.0f} s\n", table(result), ""]
    lines += [f"Left behind: {left_behind(result)}. Errors: {errors(result)}.", *result["violations"][:20], ""]
    sys.stdout.write("\n".join(lines))
    sys.stdout.flush()


def _published_python() -> str:
    """The interpreter that the benchmarks compare with; made when it is missing."""
    given = os.environ.get("OPENENV_PUBLISHED_PYTHON")
    if given:
        return given
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from interpreters import create_published_venv

    return create_published_venv(os.environ)


def _child(package: str, options: argparse.Namespace) -> dict[str, Any]:
    is_ours = package != "published"
    python = sys.executable if is_ours else options.beside or _published_python()
    path = [*([str(ROOT / "src")] if is_ours else []), str(HERE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [python, "-m", "storm", "--package", package, "--json", str(file)]
        command += ["--seed", str(options.seed), "--at-once", str(options.at_once)]
        command += ["--episodes", str(options.episodes)] if options.episodes else []
        subprocess.run(command, check=False, env=environment)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    sys.exit(main())
