"""A package through all checks: its files first, then, served by a process of its own, its behaviour.

Knows order and what depends on what; the checks themselves are elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import message_of
from . import runtime_checks
from .manifest import SIGNATURE, Manifest, Unreadable, read_validation
from .probe import Bench, Door, Fault, Skip, last_line
from .report import Report, Result
from .rules import BOUNDS, LEVELS, RULES, Rule
from .runtime_checks import Seen
from .served_package import NotServed, Subject

Listener = Callable[[Result], None]
_STARTUP = "runtime.startup"
_NOT_DONE = {
    "runtime.rubric_introspectable": "a rubric cannot be seen from outside",
    "runtime.reward_attribution": "what a reward is for cannot be seen from outside",
    "runtime.host_containment": "the package runs here as a process, not in a container",
    "runtime.oracle_containment": "no oracle is run here",
    "semantic.oracle_max": "no oracle is run here",
    "semantic.canary_floor": "no canaries are run here",
    "semantic.no_solution_leakage": "no oracle is run here",
}
_REPLY_S = 60.0


class NoPackage(Exception):
    """There is no package at that place; the text says what is missing."""


def check_package(
    folder: Path, *, level: str, policy: str, may_run: bool = True, token: str | None = None, listen: Listener
) -> Report:
    """Run the checks of a package up to a level.

    Args:
        folder: The package.
        level: The last level: static, runtime or semantic.
        policy: The version of the rules that the report names.
        may_run: Whether the package may be served; if not, what needs that is skipped.
        token: What its server will ask for.
        listen: Is told each result as it comes.

    Raises:
        NoPackage: The folder holds none.
    """
    if not folder.is_dir():
        raise NoPackage(f"there is no folder {folder}")
    if not (folder / SIGNATURE).is_file():
        raise NoPackage(f"{folder} is no environment package: it has no {SIGNATURE}")
    found = _promises(folder)
    manifest = found if isinstance(found, Manifest) else None
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        listen(result)

    rules = [rule for rule in RULES if rule.level <= LEVELS[level] and _applies(rule, manifest)]
    app = app_of(folder)
    static: dict[str, Callable[[], Seen]] = {
        "static.manifest": lambda: manifest(found),
        "static.layout": lambda: layout(folder, app),
        "static.entry_point": lambda: entry_point(folder, app),
    }
    for rule in rules:
        if rule.level == LEVELS["static"]:
            add(run(rule.id, static[rule.id]))
    served = [rule for rule in rules if rule.level > LEVELS["static"]]
    if served and not may_run:
        add(Result(_STARTUP, "skip", ("--skip-build: the package is not run",)))
        _skip(served, add)
    elif served:
        _check_served(folder, manifest, served, token, add)
    return Report(folder, policy, tuple(results), manifest)


def _promises(folder: Path) -> Manifest | Unreadable:
    try:
        return read_validation(folder)
    except Unreadable as error:
        return error


def _applies(rule: Rule, manifest: Manifest | None) -> bool:
    """Leave out what a package does not claim to have."""
    if manifest is None:
        return True
    if rule.id in ("runtime.rubric_introspectable", "runtime.reward_attribution"):
        return manifest.capabilities.rubric_tree
    return rule.id != "runtime.task_declaration_accuracy" or manifest.capabilities.task_api


def _check_served(folder: Path, manifest: Manifest | None, rules: list[Rule], token: str | None, add: Listener) -> None:
    reply_s = _REPLY_S if manifest is None else max(5.0, manifest.resources.episode_timeout_s)
    with contextlib.ExitStack() as stack:
        bench: Bench | None = None

        def start() -> Seen:
            nonlocal bench
            subject = stack.enter_context(_served(folder))
            bench = Bench(Door(subject.url, token, reply_s), manifest=manifest, folder=folder, subject=subject)
            return runtime_checks.startup(bench)

        add(first := run(_STARTUP, start))
        if first.status != "pass" or bench is None:
            _skip(rules, add)
            return
        for rule in rules:
            if rule.id != _STARTUP:
                add(check(rule.id, bench))


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[Subject]:
    try:
        with Subject(folder) as subject:
            yield subject
    except NotServed as error:
        said = str(error).splitlines()
        mend = f"`openenv serve {folder}` shows the whole of it"
        raise Fault(last_line(str(error)), *said[-12:-1], mend=mend) from error


def _skip(rules: list[Rule], add: Listener) -> None:
    for rule in rules:
        if rule.id != _STARTUP:
            add(Result(rule.id, "skip", (f"unmet dependency: {_STARTUP}",)))


def check(check_id: str, bench: Bench) -> Result:
    """Run one check of a served environment."""
    if check_id in _NOT_DONE:
        return Result(check_id, "skip", (_NOT_DONE[check_id],))
    function = getattr(runtime_checks, check_id.partition(".")[2])
    return run(check_id, lambda: function(bench))


def run(check_id: str, function: Callable[[], Seen]) -> Result:
    """Run a check and turn what comes of it into a result."""
    started = time.monotonic()

    def result(status: Any, evidence: tuple[str, ...], mend: str | None = None, measured: Any = None) -> Result:
        return Result(check_id, status, evidence, mend, measured or {}, time.monotonic() - started)

    try:
        seen = function()
    except Fault as fault:
        return result("fail", fault.problems, fault.mend, fault.measured)
    except Skip as skip:
        return result("skip", (str(skip),))
    except Exception as error:  # a check that cannot cope is a result, not the end of the others
        return result("error", (f"{type(error).__name__}: {message_of(error)}",))
    return result("pass", (seen.evidence,), None, seen.measured)


# static_checks: Checks of a package's files, without running any of them. Knows where things lie; must not import the package.


_ALWAYS = ("__init__.py", "client.py", "README.md", "pyproject.toml")
_SERVER_SCRIPT = re.compile(r"""(?m)^\s*server\s*=\s*["']([\w.]+):main["']""")
_DEPENDENCY = re.compile(r"""(?m)(?:["']|^)openenv(?:[-_]core)?\s*(?:\[[^\]]*\])?\s*(?:[<>=!~@;][^"'\n]*)?(?:["']|$)""")


def manifest(found: Manifest | Unreadable) -> Seen:
    """The promises are complete, and not more generous than they may be."""
    if isinstance(found, Unreadable):
        raise Fault(*found.problems, mend=found.mend, measured={"schema_errors": len(found.problems)})
    reward, resources = found.reward, found.resources
    measured = {
        "oracle_tolerance": reward.oracle_tolerance,
        "floor_margin": reward.floor_margin,
        "variance_tolerance": reward.variance_tolerance,
        "episode_timeout_s": resources.episode_timeout_s,
        "bounds": dict(BOUNDS),
    }
    problems = []
    for name, value, bound, is_low in (
        ("reward.oracle_tolerance", reward.oracle_tolerance, "max_oracle_tolerance", False),
        ("reward.floor_margin", reward.floor_margin, "min_floor_margin", True),
        ("reward.variance_tolerance", reward.variance_tolerance, "max_variance_tolerance", False),
        ("resources.episode_timeout_s", resources.episode_timeout_s, "max_episode_timeout_s", False),
    ):
        if value is not None and (value < BOUNDS[bound] if is_low else value > BOUNDS[bound]):
            problems.append(f"{name} is {value:g}, and may be {BOUNDS[bound]:g} at {'least' if is_low else 'most'}")
    if problems:
        raise Fault(*problems, mend="declare values within these bounds", measured=measured)
    return Seen("complete, and within the bounds", measured)


def layout(folder: Path, app: str) -> Seen:
    """All files are there that serving, building and sharing the package need."""
    missing = [name for name in _ALWAYS if not (folder / name).is_file()]
    module = app_file(app)
    if not (folder / module).is_file():
        missing.append(f"{module} (of `app: {app}`)")
    if not any((folder / name).is_file() for name in ("server/Dockerfile", "Dockerfile")):
        missing.append("server/Dockerfile")
    if missing:
        raise Fault(f"missing: {', '.join(missing)}", mend="`openenv init` makes a package that has them, to copy from")
    has_lock = (folder / "uv.lock").is_file()
    text = "all files are there" if has_lock else "all files are there, but for uv.lock, which `uv lock` makes"
    return Seen(text, {"uv_lock": has_lock})


def entry_point(folder: Path, app: str) -> Seen:
    """`server` is a command of the package that runs `main`, and so does the application's file."""
    problems = []
    project = _text(folder / "pyproject.toml")
    if _SERVER_SCRIPT.search(project) is None:
        problems.append('pyproject.toml has no script server = "...:main"')
    images = "\n".join(_text(folder / name) for name in ("server/Dockerfile", "Dockerfile"))
    required = _DEPENDENCY.search(project + "\n" + _text(folder / "server" / "requirements.txt"))
    if required is None and "openenv" not in images:
        problems.append("openenv is not among the dependencies")
    problems += _main_problems(folder / app_file(app))
    if problems:
        mend = "see pyproject.toml and server/app.py of a package that `openenv init` makes"
        raise Fault(*problems, mend=mend)
    return Seen("`server` and `python -m` run main")


def app_file(app: str) -> str:
    """Return where the module of `server.app:app` lies in a package."""
    return app.partition(":")[0].replace(".", "/") + ".py"


def _main_problems(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
    except OSError:
        return [f"{path.name} cannot be read"]
    except (SyntaxError, ValueError) as error:
        return [f"{path.name} is no Python: {error}"]
    if not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "main" for node in tree.body):
        return [f"{path.name} has no main()"]
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_guard(node.test)]
    calls = [node for guard in guards for part in guard.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    if not any(isinstance(call.func, ast.Name) and call.func.id == "main" for call in calls):
        return [f'{path.name} does not call main() under `if __name__ == "__main__":`']
    return []


def _is_guard(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or len(test.comparators) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = {ast.unparse(test.left), ast.unparse(test.comparators[0])}
    return sides == {"__name__", "'__main__'"}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def app_of(folder: Path) -> str:
    """Return what the manifest says the application is."""
    from ...server.loading import TargetError, read_manifest

    try:
        return str(read_manifest(folder / SIGNATURE).get("app", "server.app:app"))
    except (TargetError, OSError, UnicodeDecodeError):
        return "server.app:app"
