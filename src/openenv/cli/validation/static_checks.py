"""Checks of a package's files, without running any of them. Knows where things lie; must not import the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .manifest import SIGNATURE, Manifest, Unreadable
from .probe import Fault
from .rules import BOUNDS
from .runtime_checks import Seen

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
