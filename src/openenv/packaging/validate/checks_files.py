"""Checks of a package's files. They read and parse files, and never import the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from openenv.env.manifest import DEFAULT_APP, ManifestError
from openenv.server.folders import FolderApp, FolderError, find_app

from .rules import CheckEvidence, CheckFailed

# The files of the template: importing, connecting, reading and installing need them.
_ALWAYS = ("__init__.py", "client.py", "README.md", "pyproject.toml")
# Regular expressions instead of parsers: a broken file should give this check's message.
_SERVER_SCRIPT = re.compile(r"""(?m)^\s*server\s*=\s*["']([\w.]+):main["']""")
_DEPENDENCY = re.compile(r"""(?m)(?:["']|^)openenv(?:[-_]core)?\s*(?:\[[^\]]*\])?\s*(?:[<>=!~@;][^"'\n]*)?(?:["']|$)""")


def layout(folder: Path, app: FolderApp | None) -> CheckEvidence:
    """All files are there that serving, building and sharing the package need."""
    # The package may be the folder itself, or a folder inside of a project.
    places = [folder] if app is None else [folder, app.package]
    missing = [name for name in _ALWAYS if not any((place / name).is_file() for place in places)]
    if app is None or app.file is None or app.note is not None:
        module = DEFAULT_APP.partition(":")[0] if app is None else app.module
        missing.append(f"{module.replace('.', '/')}.py (of `app: {_entry(app)}`)")
    # Either place works with `openenv build`.
    if not any((folder / name).is_file() for name in ("server/Dockerfile", "Dockerfile")):
        missing.append("server/Dockerfile")
    if missing:
        fix = "`openenv init` makes a package that has them, to copy from"
        raise CheckFailed(f"missing: {', '.join(missing)}", fix=fix)
    # Optional, but it makes the image's build repeatable.
    has_lock = (folder / "uv.lock").is_file()
    text = "all files are there" if has_lock else "all files are there, except uv.lock, which `uv lock` makes"
    return CheckEvidence(text, {"uv_lock": has_lock})


def entry_point(folder: Path, app: FolderApp | None) -> CheckEvidence:
    """The package's command `server` and the application's file both run `main`."""
    problems = []
    project = _text(folder / "pyproject.toml")
    if _SERVER_SCRIPT.search(project) is None:
        problems.append('pyproject.toml has no script server = "...:main"')
    # An image may install openenv although the project does not require it.
    images = "\n".join(_text(folder / name) for name in ("server/Dockerfile", "Dockerfile"))
    dependency = _DEPENDENCY.search(project + "\n" + _text(folder / "server" / "requirements.txt"))
    if dependency is None and "openenv" not in images:
        problems.append("openenv is not among the dependencies")
    # Both ways to start the server are documented, so both must work.
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


def app_of(folder: Path) -> FolderApp | None:
    """Find the application of a folder; None if the folder has none or its manifest is unreadable."""
    try:
        return find_app(folder)
    except (ManifestError, FolderError, OSError):
        return None


def _entry(app: FolderApp | None) -> str:
    return DEFAULT_APP if app is None else str(app.manifest.get("app") or DEFAULT_APP)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
