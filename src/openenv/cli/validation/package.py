"""All checks of a package: first those of its files, then, served by a process of its own, those of its behaviour."""

from __future__ import annotations

import ast
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...errors import message_of
from ...folders import FolderApp, FolderError, find_app
from ...manifest import DEFAULT_APP, ManifestError
from . import runtime_checks
from .manifest import SIGNATURE, Manifest, read_validation
from .probe import Probe, last_line
from .report import Report, Result
from .rules import BOUNDS, LEVELS, RULE, RULES, CheckEvidence, CheckFailed, CheckNotApplicable, CheckSkipped, Rule
from .served_package import NotServed, ServedPackage

Listener = Callable[[Result], None]
_STARTUP = "runtime.startup"
_REPLY_S = 60.0
_ALWAYS = ("__init__.py", "client.py", "README.md", "pyproject.toml")
_SERVER_SCRIPT = re.compile(r"""(?m)^\s*server\s*=\s*["']([\w.]+):main["']""")
_DEPENDENCY = re.compile(r"""(?m)(?:["']|^)openenv(?:[-_]core)?\s*(?:\[[^\]]*\])?\s*(?:[<>=!~@;][^"'\n]*)?(?:["']|$)""")


class NoPackage(Exception):
    """There is no package at that path; the text says what is missing."""


def check_package(
    folder: Path, *, level: str, policy: str, may_run: bool = True, token: str | None = None, listen: Listener
) -> Report:
    """Run the checks of a package up to a level.

    Args:
        folder: The package, or a Python file with an environment.
        level: The last level: static, runtime or semantic.
        policy: The version of the rules that the report names.
        may_run: Whether the package may be served; if not, checks that need it are skipped.
        token: What its server will ask for.
        listen: Called with each result as it comes.

    Raises:
        NoPackage: The folder holds none.
    """
    is_file = folder.is_file() and folder.suffix == ".py"
    if not is_file and not folder.is_dir():
        raise NoPackage(f"there is no folder or Python file {folder}")
    app = None if is_file else _app_of(folder)
    folder = folder if app is None else app.folder
    promises = CheckNotApplicable("a file declares nothing") if is_file else _read_promises(folder)
    manifest = promises if isinstance(promises, Manifest) else None
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        listen(result)

    rules = [rule for rule in RULES if rule.level <= LEVELS[level] and _applies(rule, manifest)]
    static = _static_checks(app, folder, promises)
    for rule in rules:
        if rule.id in static:
            add(_run(rule.id, static[rule.id]))
    served = [rule.id for rule in rules if rule.id not in static and rule.id != _STARTUP]
    if LEVELS[level] > LEVELS["static"]:
        if may_run:
            _check_served(folder, manifest, served, token, add, declares=not is_file)
        else:
            add(Result(_STARTUP, "skip", ("--skip-build: the package is not run",)))
            _skip(served, add)
    return Report(folder, policy, tuple(results), manifest)


def _static_checks(
    app: FolderApp | None, folder: Path, promises: Manifest | CheckFailed | CheckNotApplicable
) -> dict[str, Callable[[], CheckEvidence]]:
    """Return the checks of a package's files; a file by itself is no package."""
    if isinstance(promises, CheckNotApplicable):
        aside = promises

        def none() -> CheckEvidence:
            raise aside

        return dict.fromkeys(("static.manifest", "static.layout", "static.entry_point"), none)
    return {
        "static.manifest": lambda: _check_manifest(promises),
        "static.layout": lambda: _check_layout(folder, app),
        "static.entry_point": lambda: _check_entry_point(folder, app),
    }


def check(check_id: str, probe: Probe) -> Result:
    """Run one check of a served environment."""
    rule = RULE[check_id]
    if rule.skipped is not None:
        declared = None if probe.manifest is None or rule.needs is None else probe.manifest.capabilities
        is_declared = declared is not None and bool(getattr(declared, str(rule.needs)))
        reason = rule.skipped if is_declared or rule.needs is None else f"{rule.needs} is not declared"
        return Result(check_id, "skip", (reason,), applies=is_declared)
    function = getattr(runtime_checks, check_id.partition(".")[2])
    return _run(check_id, lambda: function(probe))


def _run(check_id: str, function: Callable[[], CheckEvidence]) -> Result:
    """Run a check and turn what it returns or raises into a result."""
    started = time.monotonic()
    try:
        evidence = function()
        result = Result(check_id, "pass", (evidence.text,), None, evidence.measured)
    except CheckFailed as failure:
        result = Result(check_id, "fail", failure.problems, failure.fix, failure.measured)
    except CheckSkipped as skip:
        result = Result(check_id, "skip", (str(skip),), applies=not isinstance(skip, CheckNotApplicable))
    except Exception as error:  # one check that breaks is a result, not the end of the others
        result = Result(check_id, "error", (f"{type(error).__name__}: {message_of(error)}",))
    return replace(result, duration_s=time.monotonic() - started)


def _read_promises(folder: Path) -> Manifest | CheckFailed:
    try:
        return read_validation(folder)
    except CheckFailed as failure:
        return failure


def _applies(rule: Rule, manifest: Manifest | None) -> bool:
    """Leave out checks of features that a package does not claim to have."""
    if manifest is None:
        return True
    if rule.id in ("runtime.rubric_introspectable", "runtime.reward_attribution"):
        return manifest.capabilities.rubric_tree
    return rule.id != "runtime.task_declaration_accuracy" or manifest.capabilities.task_api


def _check_served(
    folder: Path, manifest: Manifest | None, ids: list[str], token: str | None, add: Listener, *, declares: bool
) -> None:
    reply_s = _REPLY_S if manifest is None else max(5.0, manifest.resources.episode_timeout_s)
    package = ServedPackage(folder)
    probe = Probe(
        url="", token=token, reply_s=reply_s, manifest=manifest, folder=folder, package=package, declares=declares
    )
    with contextlib.ExitStack() as stack:

        def start() -> CheckEvidence:
            try:
                stack.enter_context(package)
            except NotServed as error:
                output = str(error).splitlines()
                fix = f"`openenv serve {folder}` shows the whole of it"
                raise CheckFailed(last_line(str(error)), *output[-12:-1], fix=fix) from error
            probe.url = package.url
            return runtime_checks.startup(probe)

        add(startup := _run(_STARTUP, start))
        if startup.status != "pass":
            _skip(ids, add)
            return
        for check_id in ids:
            add(check(check_id, probe))


def _skip(ids: list[str], add: Listener) -> None:
    for check_id in ids:
        add(Result(check_id, "skip", (f"unmet dependency: {_STARTUP}",)))


# Checks of the files: they read and parse, and never import the package.


def _check_manifest(promises: Manifest | CheckFailed) -> CheckEvidence:
    """The promises are complete, and not more generous than they may be."""
    if isinstance(promises, CheckFailed):
        raise CheckFailed(*promises.problems, fix=promises.fix, measured={"schema_errors": len(promises.problems)})
    reward, resources = promises.reward, promises.resources
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
        raise CheckFailed(*problems, fix="declare values within these bounds", measured=measured)
    return CheckEvidence("complete, and within the bounds", measured)


def _check_layout(folder: Path, app: FolderApp | None) -> CheckEvidence:
    """All files are there that serving, building and sharing the package need."""
    places = [folder] if app is None else [folder, app.package]
    missing = [name for name in _ALWAYS if not any((place / name).is_file() for place in places)]
    if app is None or app.file is None or app.note is not None:
        module = DEFAULT_APP.partition(":")[0] if app is None else app.module
        missing.append(f"{module.replace('.', '/')}.py (of `app: {_entry(app)}`)")
    if not any((folder / name).is_file() for name in ("server/Dockerfile", "Dockerfile")):
        missing.append("server/Dockerfile")
    if missing:
        fix = "`openenv init` makes a package that has them, to copy from"
        raise CheckFailed(f"missing: {', '.join(missing)}", fix=fix)
    has_lock = (folder / "uv.lock").is_file()
    text = "all files are there" if has_lock else "all files are there, except uv.lock, which `uv lock` makes"
    return CheckEvidence(text, {"uv_lock": has_lock})


def _check_entry_point(folder: Path, app: FolderApp | None) -> CheckEvidence:
    """`server` is a command of the package that runs `main`, and so does the application's file."""
    problems = []
    project = _text(folder / "pyproject.toml")
    if _SERVER_SCRIPT.search(project) is None:
        problems.append('pyproject.toml has no script server = "...:main"')
    images = "\n".join(_text(folder / name) for name in ("server/Dockerfile", "Dockerfile"))
    dependency = _DEPENDENCY.search(project + "\n" + _text(folder / "server" / "requirements.txt"))
    if dependency is None and "openenv" not in images:
        problems.append("openenv is not among the dependencies")
    problems += _main_problems(folder / "server/app.py" if app is None or app.file is None else app.file)
    if problems:
        raise CheckFailed(*problems, fix="see pyproject.toml and server/app.py of a package that `openenv init` makes")
    return CheckEvidence("`server` and `python -m` run main")


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


def _app_of(folder: Path) -> FolderApp | None:
    """Find the application; None where the manifest cannot be read, which is a fault of its own.

    Raises:
        NoPackage: There is neither a manifest nor an application.
    """
    try:
        return find_app(folder)
    except ManifestError:
        return None
    except FolderError as error:
        if (folder / SIGNATURE).is_file():
            return None
        raise NoPackage(f"{folder} is no environment package: {error}") from error


def _entry(app: FolderApp | None) -> str:
    return DEFAULT_APP if app is None else str(app.manifest.get("app") or DEFAULT_APP)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
