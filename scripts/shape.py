"""Print the figures of the tree that say how hard it is to read, and fail above the limits of `[tool.shape]`.

usage: python scripts/shape.py [--trace] [--table] [--list FIGURE]

The figures come from the syntax trees of `src/openenv`. --trace also runs a step over WebSocket v2 and a rollout with
the agent `noop`, and counts the files of the package that they call. --table prints Markdown, with the figures of
earlier trees. --list prints the places behind one figure. `[tool.shape.comments]` has limits for single folders.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tempfile
import threading
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "openenv"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Tree:
    """The modules of the package: source, syntax tree, and the imports between them."""

    def __init__(self) -> None:
        self.files = {_module(file): file for file in sorted(PACKAGE.rglob("*.py"))}
        self.sources = {name: file.read_text(encoding="utf-8") for name, file in self.files.items()}
        self.trees = {name: ast.parse(source) for name, source in self.sources.items()}
        self.lines = sum(source.count("\n") for source in self.sources.values())
        self.code_lines = sum(len(_code_lines(self.sources[name], tree)) for name, tree in self.trees.items())
        self.imports = {name: set(self._imports(name)) for name in self.trees}

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
        """Yield the module and the node of each node of some kinds."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, kinds):
                    yield name, node

    def place(self, name: str, node: Any) -> str:
        """Return file, line and name of a node."""
        return f"{self.files[name].relative_to(ROOT)}:{node.lineno} {getattr(node, 'name', '')}".rstrip()

    def _imports(self, name: str) -> Iterator[str]:
        """Yield the modules of the package that a module imports, anywhere in it, also for types only."""
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package.split(".")
                    above = ".".join(parts[: len(parts) - node.level + 1])
                    base = f"{above}.{base}" if base else above
                for alias in node.names:
                    target = f"{base}.{alias.name}"
                    if target in self.files:
                        yield target
                    elif base in self.files:
                        yield base


def _module(file: Path) -> str:
    return ".".join(("openenv", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def _code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines with code: neither blank, nor comment, nor docstring."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


# -- figures: each returns the places that it counts ------------------------------------------------------------------


def long_functions(tree: Tree, limit: int) -> list[str]:
    """Return the functions with more lines than a limit."""
    return [
        tree.place(name, node)
        for name, node in tree.nodes(*FUNCTIONS)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > limit
    ]


def wide_functions(tree: Tree) -> list[str]:
    """Return the functions with more than six parameters; self and cls do not count."""
    found = []
    for name, node in tree.nodes(*FUNCTIONS):
        arguments = node.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if len([one for one in names if one not in ("self", "cls")]) > 6:
            found.append(tree.place(name, node))
    return found


def classes_of_one_user(tree: Tree) -> list[str]:
    """Return the classes at the top of a module that exactly one other module names."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, source in tree.sources.items():
        for word in set(re.findall(r"\b[A-Za-z]\w+", source)):
            users[word].add(name)
    return [
        tree.place(name, node)
        for name, module in tree.trees.items()
        for node in module.body
        if isinstance(node, ast.ClassDef) and len(users[node.name] - {name}) == 1
    ]


def modules_of_one_importer(tree: Tree) -> list[str]:
    """Return the modules, not packages, that exactly one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in tree.imports.items():
        for target in targets - {name}:
            importers[target].add(name)
    return [
        f"{file.relative_to(ROOT)} <- {next(iter(importers[name]))}"
        for name, file in tree.files.items()
        if file.name not in ("__init__.py", "__main__.py") and len(importers[name]) == 1
    ]


def comments(tree: Tree) -> list[str]:
    """Return the lines with a comment, without directives for tools."""
    found = []
    for name, source in tree.sources.items():
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# pragma", "#!")):
                found.append(f"{tree.files[name].relative_to(ROOT)}:{token.start[0]}")
    return found


def anys(tree: Tree) -> list[str]:
    """Return the uses of `Any`."""
    return [tree.place(name, node) for name, node in tree.nodes(ast.Name) if node.id == "Any"]


def conditional_expressions(tree: Tree) -> list[str]:
    """Return the expressions `a if b else c`."""
    return [tree.place(name, node) for name, node in tree.nodes(ast.IfExp)]


def nested_conditional_expressions(tree: Tree) -> list[str]:
    """Return the conditional expressions with another one inside, also below a call or an f-string."""
    return [
        tree.place(name, node)
        for name, node in tree.nodes(ast.IfExp)
        if any(isinstance(inner, ast.IfExp) for part in ast.iter_child_nodes(node) for inner in ast.walk(part))
    ]


def wrong_way_imports(tree: Tree) -> list[str]:
    """Return the imports from a lower to a higher layer of import-linter's contract for the whole package."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(
        contract["layers"]
        for contract in config["contracts"]
        if contract["type"] == "layers" and contract.get("containers") == ["openenv"]
    )
    # `a | b` are siblings that must not import each other; `a : b` may. Both share a layer here.
    heights = {
        part.strip(" ()"): height for height, layer in enumerate(reversed(layers)) for part in re.split(r"[|:]", layer)
    }
    found = []
    for name, targets in tree.imports.items():
        for target in sorted(targets):
            importer, imported = (heights.get([*one.split("."), ""][1]) for one in (name, target))
            if importer is not None and imported is not None and importer < imported:
                found.append(f"{name} -> {target}")
    return found


def top_entries(tree: Tree) -> list[str]:
    """Return the folders and modules at the top of the package."""
    return sorted(
        path.name
        for path in PACKAGE.iterdir()
        if (path.is_dir() and (path / "__init__.py").exists()) or path.suffix == ".py"
    )


def sleeps_of_tests(tree: Tree) -> list[str]:
    """Return the sleeps in tests and in the programs that they write, apart from the two modules that tests share.

    `sleep(0)` only lets others run. `waiting` looks again after each of its sleeps, and `slow_steps` is the work of an
    environment that takes its time.
    """
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "envs").glob("*/tests/**/*.py")]
    return [
        f"{file.relative_to(ROOT)}:{number} {line.strip()}"
        for file in sorted(files)
        if file.name not in ("waiting.py", "slow_steps.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"sleep\((?!0\))", line)
    ]


# -- traces: the files of the package that a run calls -----------------------------------------------------------------


class Trace:
    """Records the files of the package in which functions are called, in all threads that start afterwards.

    Module bodies do not count: they run once, at the import. Only calls between `start` and `stop` count.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_on = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self._is_on and event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(PACKAGE)):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))

    def of(self, run: Callable[[], object]) -> list[str]:
        """Return the files of one run; it must have run before, so that everything is loaded."""
        self.files.clear()
        self._is_on = True
        try:
            run()
        finally:
            self._is_on = False
        return sorted(self.files)


def traced_step() -> list[str]:
    """Return the files that a typed client and its server call for one step over WebSocket v2."""
    trace = Trace()
    from openenv import Action, EnvClient, Environment, Observation, State
    from openenv.testing.serving import serve

    class Add(Action):
        number: int

    class Sum(Observation):
        total: int = 0

    class Adder(Environment[Add, Sum, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()

        def reset(self, seed: int | None = None, episode_id: str | None = None) -> Sum:
            return Sum()

        def step(self, action: Add) -> Sum:
            return Sum(total=action.number, reward=1.0)

        @property
        def state(self) -> State:
            return self._state

    # The classes are local, so texts in annotations cannot be resolved.
    Adder.reset.__annotations__["return"] = Adder.step.__annotations__["return"] = Sum
    Adder.step.__annotations__["action"] = Add

    class AdderClient(EnvClient[Add, Sum, State]):
        pass

    with serve(Adder) as server, AdderClient(base_url=server.url).sync() as client:
        client.reset()
        client.step(Add(number=1))
        return trace.of(lambda: client.step(Add(number=2)))


def traced_rollout() -> list[str]:
    """Return the files that a rollout with the agent `noop` calls, in a local sandbox with one plain check."""
    trace = Trace()
    from openenv.rollout import RolloutStore, Task, run_rollout

    task = Task(instruction="Do nothing.", verify=["true"])
    with tempfile.TemporaryDirectory() as folder, RolloutStore(Path(folder) / "store") as store:

        def run() -> None:
            run_rollout(task, agent="noop", sandbox="local", store=store)

        run()
        return trace.of(run)


# -- the table ---------------------------------------------------------------------------------------------------------

# Figure, places, and whether to show it per 1,000 lines of code.
_FIGURES: dict[str, tuple[Callable[[Tree], list[str]], bool]] = {
    "modules": (lambda tree: [str(file) for file in tree.files.values()], False),
    "top_entries": (top_entries, False),
    "functions_over_100_lines": (lambda tree: long_functions(tree, 100), False),
    "functions_over_60_lines": (lambda tree: long_functions(tree, 60), False),
    "functions_over_6_parameters": (wide_functions, False),
    "classes_of_one_user": (classes_of_one_user, False),
    "modules_of_one_importer": (modules_of_one_importer, False),
    "comments_per_1000_lines": (comments, True),
    "any_per_1000_lines": (anys, True),
    "conditional_expressions_per_1000_lines": (conditional_expressions, True),
    "nested_conditional_expressions": (nested_conditional_expressions, False),
    "wrong_way_imports": (wrong_way_imports, False),
    "sleeps_of_tests": (sleeps_of_tests, False),
}
_TRACES = {"files_of_a_v2_step": traced_step, "files_of_a_noop_rollout": traced_rollout}
_AT_LEAST = {"comments_per_1000_lines"}

# Rows of the table: a name, the figures before the first redesign, after it and before the second one, counted by an
# earlier version of this script, and the figures of this tree.
_ROWS = (
    ("modules, lines", "452, 62,788", "272, 56,025", "532, 113,500", "{modules}, {lines:,}"),
    ("entries at the top of the package", "28", "29", "55", "{top_entries}"),
    (
        "functions > 100 / > 60 lines", "1 / 6", "1 / 6", "6 / 32",
        "{functions_over_100_lines} / {functions_over_60_lines}",
    ),
    ("functions with > 6 parameters", "39", "31", "93", "{functions_over_6_parameters}"),
    (
        "classes of one user; modules of one importer", "199; 139", "182; 49", "299; 81",
        "{classes_of_one_user}; {modules_of_one_importer}",
    ),
    (
        "comments / `Any` per 1,000 lines", "18 / 51", "37 / 51", "34 / 44",
        "{comments_per_1000_lines:.0f} / {any_per_1000_lines:.0f}",
    ),
    (
        "conditional expressions per 1,000 lines, nested ones", "", "27, 9", "29, 33",
        "{conditional_expressions_per_1000_lines:.0f}, {nested_conditional_expressions}",
    ),
    (
        "files on the way of a v2 step; of a noop rollout", "27; -", "14; 21", "14; 29",
        "{files_of_a_v2_step}; {files_of_a_noop_rollout}",
    ),
    ("imports that point the wrong way", "", "", "59 of 2,366", "{wrong_way_imports} of {imports:,}"),
)  # fmt: skip


def comments_of_folders(tree: Tree, folders: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Yield folders of the package, and their comments per 1,000 lines of code."""
    files = [place.rpartition(":")[0] for place in comments(tree)]
    for folder in folders:
        start = f"{(PACKAGE / folder).relative_to(ROOT)}/"
        names = [name for name, file in tree.files.items() if str(file.relative_to(ROOT)).startswith(start)]
        lines = sum(len(_code_lines(tree.sources[name], tree.trees[name])) for name in names)
        yield folder, round(1000 * sum(file.startswith(start) for file in files) / lines, 1)


def markdown(figures: Mapping[str, float]) -> str:
    """Return the table of earlier and present figures."""
    lines = ["| | before the first redesign | after it | before the second | now |", "|---|---:|---:|---:|---:|"]
    for name, *earlier, now in _ROWS:
        lines.append(f"| {' | '.join((name, *earlier, now.format(**figures)))} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if a figure is beyond its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="also count the files of a step and of a rollout")
    parser.add_argument(
        "--list", choices=[*_FIGURES, *_TRACES], metavar="FIGURE", help="print the places of one figure"
    )
    parser.add_argument("--table", action="store_true", help="print Markdown with earlier figures; implies --trace")
    arguments = parser.parse_args()
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"].get("shape", {})
    tree = Tree()
    figures: dict[str, float] = {"lines": tree.lines, "code_lines": tree.code_lines}
    places: dict[str, list[str]] = {}
    for name, (count, per_line) in _FIGURES.items():
        places[name] = count(tree)
        figures[name] = round(1000 * len(places[name]) / tree.code_lines, 1) if per_line else len(places[name])
    if arguments.trace or arguments.table:
        for name, traced in _TRACES.items():
            places[name] = traced()
            figures[name] = len(places[name])
    failed = False
    folders = {f"comments of {folder}": limit for folder, limit in limits.get("comments", {}).items()}
    figures |= {f"comments of {name}": value for name, value in comments_of_folders(tree, limits.get("comments", {}))}
    for name, figure in figures.items():
        limit = limits.get(name, folders.get(name))
        is_minimum = name in _AT_LEAST or name in folders
        is_beyond = limit is not None and (figure < limit if is_minimum else figure > limit)
        failed |= is_beyond
        word = "at least" if is_minimum else "at most"
        bound = "" if limit is None else f"{word} {limit:g}{'  <- beyond' if is_beyond else ''}"
        print(f"{name:40}{figure:>10g}  {bound}".rstrip())
    if arguments.table:
        print(markdown({**figures, "imports": sum(map(len, tree.imports.values()))}))
    if arguments.list is not None:
        print(*places.get(arguments.list, []), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
