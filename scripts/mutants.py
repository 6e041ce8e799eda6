"""Find changes of the package that only slow tests notice, or no test.

usage: python scripts/mutants.py [--count 20] [--seed 1] [--source src/openenv/FOLDER] [--map FILE] TESTS [TESTS ...]

One run of the tests under coverage tells which tests run which lines. Then mutants are made one after the other: at a
random place in a covered line an operator, a condition, a constant, a returned value or a statement is changed. The
quick tests that run the line have to notice; if none does, the slow ones are asked.

Limits: lines that run at import or only in other processes are left alone. A mutant is tried on the tests that were
fastest, up to --tests of them and --seconds of their time. It is made in a copy of `src` that comes first on
PYTHONPATH; the working tree is not changed. Needs coverage: .venv/bin/python -m pip install coverage
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STARTUP_S = 90.0
"""How long pytest may take to begin on a busy machine."""

# A pytest plugin: names the running test to coverage, and writes down how long each took and whether it is slow.
PLUGIN = """
import json, os, time
import coverage, pytest

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    running = coverage.Coverage.current()
    running.switch_context(item.nodeid)
    began = time.perf_counter()
    yield
    running.switch_context("")
    row = {"test": item.nodeid, "slow": item.get_closest_marker("slow") is not None}
    row["seconds"] = time.perf_counter() - began
    with open(os.environ["MUTANTS_TESTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\\n")
"""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one node: the text from `start` to `end` becomes `text`. Offsets count bytes of the file."""

    file: Path
    line: int
    start: int
    end: int
    text: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """Return the place and the change in one line."""
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.file}:{self.line} {self.kind}: {before[:70]} -> {self.text[:70]}"


@dataclass(frozen=True)
class Test:
    """A test, as the run under coverage has seen it."""

    name: str
    slow: bool
    seconds: float


class LineMap:
    """Which tests run which lines.

    Args:
        document: What `measure` has written.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.tests = {row["test"]: Test(row["test"], row["slow"], row["seconds"]) for row in document["tests"]}
        self.lines: dict[str, dict[int, list[str]]] = {
            file: {int(line): tests for line, tests in lines.items()} for file, lines in document["lines"].items()
        }

    def of(self, file: Path, line: int) -> list[Test]:
        """Return the tests that run a line, the fastest first."""
        names = self.lines.get(str(file), {}).get(line, [])
        return sorted((self.tests[name] for name in names if name in self.tests), key=lambda test: test.seconds)


def measure(tests: list[str], folder: Path) -> dict[str, Any]:
    """Run tests under coverage; return their lines, times and marks."""
    import coverage  # type: ignore[import-not-found, unused-ignore]  # only this script needs it

    (folder / "mutants_plugin.py").write_text(PLUGIN, encoding="utf-8")
    rows = folder / "tests.jsonl"
    environment = {**os.environ, "MUTANTS_TESTS": str(rows), "COVERAGE_FILE": str(folder / "data")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "coverage", "run", f"--source={ROOT / 'src'}", "-m", "pytest"]
    subprocess.run([*command, "-q", "-p", "mutants_plugin", *tests], cwd=ROOT, env=environment, check=False)
    data = coverage.CoverageData(str(folder / "data"))
    data.read()
    lines = {}
    for file in data.measured_files():
        by_line = data.contexts_by_lineno(file)
        name = str(Path(file).relative_to(ROOT))
        lines[name] = {line: [one for one in tests if one] for line, tests in by_line.items() if any(tests)}
    return {"tests": [json.loads(row) for row in rows.read_text(encoding="utf-8").splitlines()], "lines": lines}


def mutants_of(file: Path, source: bytes, covered: set[int]) -> Iterator[Mutant]:
    """Yield each change that can be made in the covered lines of a file."""
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def mutant(node: ast.expr | ast.stmt, text: str, kind: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(file, node.lineno, start, end, text, kind)

    tree = ast.parse(source)
    ignored = _not_code(tree)
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) in covered and node not in ignored:
            for text, kind in changes(node):
                assert isinstance(node, ast.expr | ast.stmt)
                yield mutant(node, text, kind)


def _not_code(tree: ast.Module) -> set[ast.AST]:
    """Return nodes whose change is no other behaviour: types, docstrings, and the texts of f-strings and messages."""
    ignored: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            parts = [node.returns, *(argument.annotation for argument in every if argument is not None)]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.JoinedStr | ast.Assert) or (isinstance(node, ast.Expr) and _is_text(node.value)):
            parts = [node]
        for part in parts:
            ignored.update(ast.walk(part) if part is not None else ())
    return ignored


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the texts that may stand in place of a node, and of what kind each change is."""
    match node:
        case ast.Compare(left=left, ops=[one], comparators=[right]) if type(one) in COMPARISONS:
            yield f"({ast.unparse(ast.Compare(left, [COMPARISONS[type(one)]()], [right]))})", "comparison"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and not (
            _is_text(left) or _is_text(right)
        ):
            yield f"({ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})", "operator"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})", "condition"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})", "condition"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})", "condition"
        case ast.Constant(value=bool() as value):
            yield str(not value), "constant"
        case ast.Constant(value=int() | float() as value):
            yield str(value + 1), "constant"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None", "return"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield "pass", "removed statement"


class Trial:
    """Runs tests against one mutant after the other, in a copy of the sources.

    Args:
        folder: For the copy.
        line_map: Which tests run which lines.
        options: The command line.
    """

    def __init__(self, folder: Path, line_map: LineMap, options: argparse.Namespace) -> None:
        self._source = folder / "src"
        self._map = line_map
        self._options = options
        shutil.copytree(ROOT / "src", self._source, ignore=shutil.ignore_patterns("__pycache__"))

    def verdict(self, mutant: Mutant) -> tuple[str, str]:
        """Return who notices a mutant ("quick", "slow" or "nobody"), and what was run."""
        tests = self._map.of(mutant.file, mutant.line)
        target = self._source / mutant.file.relative_to("src")
        original = target.read_bytes()
        target.write_bytes(mutant.apply(original))
        try:
            counts = []
            for kind in ("quick", "slow"):
                chosen = self._affordable([test for test in tests if test.slow is (kind == "slow")])
                counts.append(f"{len(chosen)} {kind}")
                if chosen and not self._passes(chosen):
                    return kind, ", ".join(counts)
            return "nobody", ", ".join(counts)
        finally:
            target.write_bytes(original)

    def _affordable(self, tests: list[Test]) -> list[Test]:
        chosen: list[Test] = []
        seconds = 0.0
        for test in tests[: self._options.tests]:
            seconds += test.seconds
            if chosen and seconds > self._options.seconds:
                break
            chosen.append(test)
        return chosen

    def _passes(self, tests: list[Test]) -> bool:
        """Run tests; a mutant that makes them hang is noticed as well."""
        paths = [str(self._source), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        # Without `-W`, a warning about threads of a hanging test would count; `@` reads names from a file.
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
            names.write("\n".join(test.name for test in tests))
            names.flush()
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"@{names.name}"]
            running = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                return running.wait(STARTUP_S + 10 * sum(test.seconds for test in tests)) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def chosen_mutants(line_map: LineMap, options: argparse.Namespace) -> list[Mutant]:
    """Return so many mutants at random places; each place is as likely as any other."""
    every: list[Mutant] = []
    for name, lines in sorted(line_map.lines.items()):
        file = Path(name)
        if file.is_relative_to(options.source) and (ROOT / file).exists():
            every.extend(mutants_of(file, (ROOT / file).read_bytes(), set(lines)))
    return random.Random(options.seed).sample(every, min(options.count, len(every)))


def main() -> int:
    """Make mutants, try them, and print those that survive the quick tests."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="TESTS", help="folders or files of tests")
    parser.add_argument("--count", type=int, default=20, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", type=Path, default=Path("src/openenv"), help="change only these files")
    parser.add_argument("--map", type=Path, help="where to keep the map of lines; it is used again if it is there")
    parser.add_argument("--tests", type=int, default=60, help="most tests of each kind for a mutant")
    parser.add_argument("--seconds", type=float, default=30.0, help="most time for them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openenv-mutants-") as name:
        folder = Path(name)
        if options.map is not None and options.map.exists():
            document = json.loads(options.map.read_text(encoding="utf-8"))
        else:
            document = measure(options.paths, folder)
            if options.map is not None:
                options.map.write_text(json.dumps(document), encoding="utf-8")
        line_map = LineMap(document)
        trial = Trial(folder, line_map, options)
        verdicts: Counter[str] = Counter()
        for mutant in chosen_mutants(line_map, options):
            began = time.monotonic()
            verdict, ran = trial.verdict(mutant)
            verdicts[verdict] += 1
            line = mutant.describe((ROOT / mutant.file).read_bytes())
            print(f"{verdict:6s} {line} ({ran}; {time.monotonic() - began:.0f} s)", flush=True)
    quick, slow, nobody = (verdicts[who] for who in ("quick", "slow", "nobody"))
    print(f"noticed by quick tests {quick}, by slow ones only {slow}, by none {nobody}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
