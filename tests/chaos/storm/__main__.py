"""`python -m storm`: run many episodes through faults, show what became of them, fail if anything lied.

Run with the published package's interpreter it measures that one; `--beside` runs both and writes the report.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from .report import NAMES, document, errors, left_behind, table
from .runner import Result, Run, Storm

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]


def main() -> int:
    """Run what the command line asks for."""
    options = _options()
    if options.beside is None:
        result = _run(Storm(options.package, options.episodes, options.seed, options.at_once))
        _show(options.package, result)
        if options.json:
            Path(options.json).write_text(json.dumps(result), encoding="utf-8")
        return 0 if result["is_clean"] else 1
    results = {
        "ours": _child(sys.executable, "ours", options.episodes, options),
        "vector": _child(sys.executable, "vector", options.vector_episodes, options),
        "http": _child(sys.executable, "http", options.http_episodes, options),
        "tools": _child(sys.executable, "tools", options.tools_episodes, options),
        "published": _child(options.beside or _published_python(), "published", options.published_episodes, options),
    }
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if options.write:
        text = document(results, command="python -m storm --beside", date=today)
        Path(options.write).write_text(text, encoding="utf-8")
    return 0 if all(results[package]["is_clean"] for package in NAMES if package != "published") else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m storm", description=__doc__)
    parser.add_argument("--package", choices=list(NAMES), default="ours", help="which package this interpreter has")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first episode")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--json", help="write the result there")
    parser.add_argument(
        "--beside",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="run the published package as well, with that interpreter",
    )
    parser.add_argument("--vector-episodes", type=int, default=200)
    parser.add_argument("--http-episodes", type=int, default=300)
    parser.add_argument("--tools-episodes", type=int, default=300)
    parser.add_argument("--published-episodes", type=int, default=1000)
    parser.add_argument("--write", metavar="FILE", help="write the report there")
    return parser.parse_args()


def _run(storm: Storm) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)  # broken connections are what this is about
    progress = _Progress(storm)
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


def _versions(package: str) -> dict[str, str]:
    names = ("uvicorn", "websockets", "pydantic")
    openenv = {"openenv": metadata.version("openenv")} if package == "published" else {}
    return {**openenv, "Python": platform.python_version(), **{name: metadata.version(name) for name in names}}


class _Progress:
    """A line that says how far it is."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._is_terminal = sys.stderr.isatty()

    def show(self, result: Result) -> None:
        done = sum(result.outcomes.values())
        if self._is_terminal or done % 100 == 0 or done == self._storm.judged:
            told = ", ".join(f"{count} {name}" for name, count in result.outcomes.most_common())
            line = f"{NAMES[self._storm.package]}: {done}/{self._storm.judged} episodes, {told}"
            sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else line + "\n")
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")


def _show(package: str, result: dict[str, Any]) -> None:
    told = [f"\n{NAMES[package]}: {result['episodes']} episodes, {result['seconds']:.0f} s\n", table(result), ""]
    told += [f"Left behind: {left_behind(result)}. Errors: {errors(result)}.", *result["violations"][:20], ""]
    sys.stdout.write("\n".join(told))
    sys.stdout.flush()


def _published_python() -> str:
    """The interpreter that the benchmarks compare with; made when it is missing."""
    given = os.environ.get("OPENENV_PUBLISHED_PYTHON")
    if given:
        return given
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from interpreters import create_published_venv

    return create_published_venv(os.environ)


def _child(python: str, package: str, episodes: int, options: argparse.Namespace) -> dict[str, Any]:
    path = [str(HERE)] if package == "published" else [str(ROOT / "src"), str(HERE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [python, "-m", "storm", "--package", package, "--episodes", str(episodes), "--json", str(file)]
        command += ["--seed", str(options.seed), "--at-once", str(options.at_once)]
        subprocess.run(command, check=False, env=environment)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    sys.exit(main())
