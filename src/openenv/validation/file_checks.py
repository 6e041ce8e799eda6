"""The checks of a package's files: they read and parse, and never import the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from openenv.manifest import DEFAULT_APP, MANIFEST, ManifestError, read_manifest

from .rules import CheckEvidence, CheckFailed

_ALWAYS = ("__init__.py", "client.py", "README.md", "pyproject.toml")
_SERVER_SCRIPT = re.compile(r"""(?m)^\s*server\s*=\s*["']([\w.]+):main["']""")
_DEPENDENCY = re.compile(r"""(?m)(?:["']|^)openenv(?:[-_]core)?\s*(?:\[[^\]]*\])?\s*(?:[<>=!~@;][^"'\n]*)?(?:["']|$)""")


def layout(folder: Path, app: str) -> CheckEvidence:
    """All files are there that serving, building and sharing the package need."""
    missing = [name for name in _ALWAYS if not (folder / name).is_file()]
    module = _app_file(app)
    if not (folder / module).is_file():
        missing.append(f"{module} (of `app: {app}`)")
    if not any((folder / name).is_file() for name in ("server/Dockerfile", "Dockerfile")):
        missing.append("server/Dockerfile")
    if missing:
        fix = "`openenv init` makes a package that has them, to copy from"
        raise CheckFailed(f"missing: {', '.join(missing)}", fix=fix)
    has_lock = (folder / "uv.lock").is_file()
    text = "all files are there" if has_lock else "all files are there, except uv.lock, which `uv lock` makes"
    return CheckEvidence(text, {"uv_lock": has_lock})


def entry_point(folder: Path, app: str) -> CheckEvidence:
    """`server` is a command of the package that runs `main`, and so does the application's file."""
    problems = []
    project = _text(folder / "pyproject.toml")
    if _SERVER_SCRIPT.search(project) is None:
        problems.append('pyproject.toml has no script server = "...:main"')
    images = "\n".join(_text(folder / name) for name in ("server/Dockerfile", "Dockerfile"))
    dependency = _DEPENDENCY.search(project + "\n" + _text(folder / "server" / "requirements.txt"))
    if dependency is None and "openenv" not in images:
        problems.append("openenv is not among the dependencies")
    problems += _main_problems(folder / _app_file(app))
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


def app_of(folder: Path) -> str:
    """Return the application that the manifest names, such as `server.app:app`."""
    try:
        return str(read_manifest(folder / MANIFEST).get("app", DEFAULT_APP))
    except (ManifestError, OSError):
        return DEFAULT_APP


def _app_file(app: str) -> str:
    return app.partition(":")[0].replace(".", "/") + ".py"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
