"""Run the MCP project's conformance suite against a served environment and write docs/topics/mcp_conformance.md.

Needs npm; the suite and the Node it wants are installed into `.cache/mcp_conformance`. Fails when a scored scenario
fails that is not listed in `NOT_OFFERED`, or when one that is listed there passes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "mcp_conformance"
PAGE = ROOT / "docs" / "topics" / "mcp_conformance.md"
SUITE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE = "node@22"
REVISIONS = ("2025-11-25", "2026-07-28")

SAMPLING = "the server sends no requests to the client, so tools cannot sample"
ELICITATION = "the server sends no requests to the client, so tools cannot ask the user"
SUBSCRIPTIONS = "resource subscriptions are neither offered nor announced"
INPUT = "no `input_required` results"
NOT_OFFERED = {
    "tools-call-sampling": SAMPLING,
    "tools-call-elicitation": ELICITATION,
    "elicitation-sep1034-defaults": ELICITATION,
    "elicitation-sep1330-enums": ELICITATION,
    "resources-subscribe": SUBSCRIPTIONS,
    "resources-unsubscribe": SUBSCRIPTIONS,
    "server-stateless": "three of its checks need tools that sample or ask the user; all others pass",
    "input-required-result-basic-elicitation": INPUT,
    "input-required-result-basic-sampling": INPUT,
    "input-required-result-basic-list-roots": INPUT,
    "input-required-result-request-state": INPUT,
    "input-required-result-multiple-input-requests": INPUT,
    "input-required-result-multi-round": INPUT,
    "input-required-result-non-tool-request": INPUT,
    "input-required-result-result-type": INPUT,
    "input-required-result-tampered-state": INPUT,
    "input-required-result-capability-check": INPUT,
}
NOT_SCORED = {
    "tasks-": "no tasks extension",
    "http-custom-header-server-validation": "arguments mirrored in headers (`x-mcp-header`) are not offered",
}

_SCENARIO = re.compile(r"^([✓✗]) (\S+): (\d+) passed, (\d+) failed$")
_UNSCORED = re.compile(r"^  [✓✗] (\S+) \(([\w-]+)\)$")


@dataclass
class Results:
    """What came of one revision's scenarios."""

    revision: str
    passed: dict[str, tuple[int, int]] = field(default_factory=dict)
    unscored: dict[str, str] = field(default_factory=dict)

    def is_pass(self, name: str) -> bool:
        """Whether all of a scenario's checks passed."""
        return self.passed[name][1] == 0

    @property
    def scored(self) -> list[str]:
        """The scenarios that count."""
        return [name for name in self.passed if name not in self.unscored]

    @property
    def surprises(self) -> list[str]:
        """Scored scenarios that did not end as expected."""
        return [name for name in self.scored if self.is_pass(name) == (name in NOT_OFFERED)]


def install() -> tuple[str, str]:
    """Install Node and the suite; return the interpreter and the suite's program."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is needed to install the conformance suite")
    CACHE.mkdir(parents=True, exist_ok=True)
    modules = CACHE / "node_modules"
    suite = modules / "@modelcontextprotocol" / "conformance"
    if not (suite / "package.json").exists() or not (modules / ".bin" / "node").exists():
        command = [npm, "install", "--prefix", str(CACHE), "--no-audit", "--no-fund", "--loglevel=error", NODE, SUITE]
        subprocess.run(command, check=True)
    return str(modules / ".bin" / "node"), str(suite / "dist" / "index.js")


@contextmanager
def served(log: Path) -> Iterator[str]:
    """Serve the suite's environment; the address of its MCP endpoint."""
    command = [sys.executable, "-m", "openenv", "serve", "conformance_env:app", "--port", "0"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "mcp")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=CACHE, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{_port(process, log)}/mcp"
    finally:
        process.terminate()
        process.wait(30)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        match = re.search(r"ws://127\.0\.0\.1:(\d+)/ws", log.read_text(encoding="utf-8", errors="replace"))
        if match:
            return int(match.group(1))
        time.sleep(0.05)
    sys.exit(f"the server did not start:\n{log.read_text()}")


def run(node: str, suite: str, url: str, revision: str) -> Results:
    """Run one revision's scenarios."""
    out = CACHE / f"results-{revision}"
    shutil.rmtree(out, ignore_errors=True)
    command = [node, suite, "server", "--url", url, "--requirements", revision, "-o", str(out)]
    done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=600, check=False)
    (CACHE / f"{revision}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    results = Results(revision)
    for line in done.stdout.splitlines():
        if match := _SCENARIO.match(line):
            results.passed[match.group(2)] = (int(match.group(3)), int(match.group(4)))
        elif match := _UNSCORED.match(line):
            results.unscored[match.group(1)] = match.group(2)
    if not results.passed:
        sys.exit(f"the suite did not run:\n{done.stdout}{done.stderr}")
    return results


def page(all_results: list[Results]) -> str:
    """Write the page."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fastmcp", "mcp"))
    lines = [
        "# MCP conformance",
        "",
        "The conformance suite of the MCP project runs against a served environment with all required tools, resources",
        "and prompts (`tests/mcp/conformance_env.py`). `make conformance` repeats it and writes this page; it fails if",
        "a scored result changes.",
        "",
        f"- Suite: `{SUITE}`, `server --requirements REVISION`",
        f"- Server: this package, with {versions}, Python {sys.version.split()[0]}",
        f"- Date: {datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()}",
        "",
        "| revision | scored scenarios passed | checks passed | failing |",
        "|---|---|---|---|",
    ]
    for results in all_results:
        scored = results.scored
        passed = sum(results.is_pass(name) for name in scored)
        good = sum(results.passed[name][0] for name in scored)
        checks = good + sum(results.passed[name][1] for name in scored)
        row = f"{passed} of {len(scored)} | {good} of {checks} | {len(scored) - passed}"
        lines.append(f"| {results.revision} | {row} |")
    lines += ["", *_REASONS]
    for results in all_results:
        lines += ["", f"## {results.revision}", "", *_table(results, results.scored)]
        lines += ["", "Not scored by the suite:", "", *_table(results, list(results.unscored))]
    return "\n".join(lines) + "\n"


_REASONS = [
    "Each failing scored scenario needs a feature that the server neither offers nor announces: requests from the",
    "server to its client, results that ask for input, or subscriptions. The tables name it. Some scenarios about",
    "input pass for the same reason: they require that the server asks for nothing.",
]


def _table(results: Results, names: list[str]) -> list[str]:
    rows = ["| scenario | result | checks | |", "|---|---|---|---|"]
    for name in names:
        good, bad = results.passed[name]
        word = "pass" if bad == 0 else "fail"
        checks = f"{good} of {good + bad}" if good + bad else "not applicable"
        rows.append(f"| {name} | {word} | {checks} | {'' if bad == 0 else _reason(name)} |")
    return rows


def _reason(name: str) -> str:
    for prefix, reason in NOT_SCORED.items():
        if name.startswith(prefix):
            return reason
    return NOT_OFFERED.get(name, "**unexpected**")


def main() -> None:
    """Run both revisions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-page", action="store_true", help="only report, do not write the page")
    arguments = parser.parse_args()
    node, suite = install()
    with served(CACHE / "server.log") as url:
        all_results = [run(node, suite, url, revision) for revision in REVISIONS]
    for results in all_results:
        passed = sum(results.is_pass(name) for name in results.scored)
        print(f"{results.revision}: {passed} of {len(results.scored)} scored scenarios passed")
        for name in results.surprises:
            print(f"  unexpected {'pass' if results.is_pass(name) else 'failure'}: {name}")
    if not arguments.no_page:
        PAGE.write_text(page(all_results), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    sys.exit(any(results.surprises for results in all_results))


if __name__ == "__main__":
    main()
