"""The folder of an environment: finds its application, and the names that its code may import itself by.

Reads files and imports nothing, so that `openenv validate --level static` can use it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv.env.manifest import DEFAULT_APP, MANIFEST, read_manifest

ABOVE = 3
"""How many parent folders a package may include in the names of its modules: `src.envs.my_env.models`."""
_APP = "app"
_FACTORIES = ("create_app", "make_app", "build_app", "get_app", "application")
_PLACES = (
    *("server/app.py", "app.py", "main.py", "server/main.py", "server/server.py", "server/__init__.py"),
    *("src/server/app.py", "src/app.py", "src/main.py"),
)
"""The places to look for an application, in this order. Then look one folder deeper, which must have only one."""
_DEEPER = ("*/server/app.py", "src/*/server/app.py", "*/app.py", "src/*/app.py", "*/main.py", "src/*/main.py")
_MANIFESTS = (f"*/{MANIFEST}", f"*/*/{MANIFEST}", f"*/*/*/{MANIFEST}")
_NOT_CODE = frozenset({"tests", "test", "docs", "examples", "scripts", "build", "dist", "node_modules", "venv"})
_PROJECT_NAME = re.compile(r"""(?m)^\s*name\s*=\s*["']([^"'\n]+)["']""")
_PACKAGE_HERE = re.compile(r"""["']?\b([A-Za-z_]\w*)["']?\s*=\s*["']\.["']""")  # package-dir = {"my_env" = "."}


class FolderError(Exception):
    """No application was found in a folder; the text says what to do."""


@dataclass(frozen=True, slots=True)
class FolderApp:
    """The application of a folder.

    Args:
        folder: The environment's folder; it has the manifest, if there is one.
        module: The module's name, from the manifest or derived from its file.
        name: The application's name in the module; None if unknown.
        file: The module's file; None if it is not in the folder, but perhaps installed.
        manifest: The manifest's contents.
        note: A note about the choice, for the user.
    """

    folder: Path
    module: str
    name: str | None
    file: Path | None
    manifest: dict[str, Any]
    note: str | None = None

    @property
    def label(self) -> str:
        """Its name in messages: the manifest that names it, or its file."""
        if self.manifest.get("app") or self.file is None:
            return f"{self.folder.name}/{MANIFEST}"
        return f"{self.folder.name}/{self.file.relative_to(self.folder)}"

    @property
    def package(self) -> Path:
        """The folder of the environment's package: the parent of `server`, or the file's folder."""
        if self.file is None:
            return self.folder
        inside = self.file.parent
        return inside.parent if inside.name == "server" and inside != self.folder else inside

    def own_names(self) -> list[str]:
        """Return the names that the package may import itself by, the likeliest first."""
        texts = [self.package.name, *self.module.split(".")[:-1][:1], str(self.manifest.get("name", ""))]
        try:
            project = (self.folder / "pyproject.toml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            project = ""
        texts += _PACKAGE_HERE.findall(project)
        texts += [name.removeprefix("openenv-").removeprefix("openenv_") for name in _PROJECT_NAME.findall(project)[:1]]
        names = [re.sub(r"\W", "_", text.strip()) for text in texts if text.strip()]
        return [name for name in dict.fromkeys(names) if name.isidentifier() and name not in ("server", "src")]


def find_app(folder: Path) -> FolderApp:
    """Find the application of a folder: the one named in its manifest, or one at a usual place.

    If a folder has neither, use the only folder below it that has a manifest.

    Raises:
        FolderError: No application was found, or several.
        ManifestError: The manifest cannot be read.
    """
    folder = folder.resolve()
    if (folder / MANIFEST).is_file():
        return _named(folder, read_manifest(folder / MANIFEST))
    file = _search(folder, _PLACES)
    below = [path.parent for pattern in _MANIFESTS for path in _glob(folder, pattern)] if file is None else []
    if len(below) == 1:
        return find_app(below[0])
    if below:
        raise FolderError(_several(folder, below))
    file = file or _search(folder, _DEEPER)
    if file is not None:
        return FolderApp(folder, dotted_name(file, folder), _name_in(file), file, {})
    raise FolderError(
        f"{folder} has no {MANIFEST}, and no application in server/app.py, app.py or main.py; "
        "name a file or a module to serve a class"
    )


def _named(folder: Path, manifest: dict[str, Any]) -> FolderApp:
    is_named = bool(manifest.get("app"))
    entry = str(manifest["app"] if is_named else DEFAULT_APP)
    place, _, name = entry.partition(":")
    module = re.sub(r"[/\\]", ".", place.strip().removeprefix("./").removesuffix(".py"))
    if not all(part.isidentifier() for part in module.split(".")):
        raise FolderError(f"{folder.name}/{MANIFEST} says that the application is {entry!r}; write it as module:name")
    file = _file_of(folder, module)
    if file is not None:
        return FolderApp(folder, module, name or None if is_named else _name_in(file), file, manifest)
    try:
        other = _search(folder, _PLACES) or _search(folder, _DEEPER)
    except FolderError:
        if not is_named:
            raise
        other = None  # the module in the manifest may be installed
    if other is None:
        return FolderApp(folder, module, name or None, None, manifest)
    if not is_named:
        return FolderApp(folder, dotted_name(other, folder), _name_in(other), other, manifest)
    note = (
        f"{folder.name}/{MANIFEST} says that the application is {entry!r}, but the folder has no such module; "
        f"{other.relative_to(folder)} is served, unless {module.partition('.')[0]} is installed"
    )
    return FolderApp(folder, module, name or _name_in(other), other, manifest, note)


def _file_of(folder: Path, module: str) -> Path | None:
    """Find a module's file in a folder, in its `src`, or in the folder as the package that the name begins with."""
    parts = module.split(".")
    # `my_env.server.app` in a folder that is my_env itself, `envs.my_env.server.app` in one two levels below
    for dropped in range(min(3, len(parts))):
        for root in (folder, folder / "src"):
            if (file := _module_file(root, parts[dropped:])) is not None:
                return file
    below = _glob(folder, "/".join(["*", *parts]) + ".py")
    return below[0] if len(below) == 1 else None


def _module_file(root: Path, parts: list[str]) -> Path | None:
    place = root.joinpath(*parts)
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None


def _search(folder: Path, places: tuple[str, ...]) -> Path | None:
    """Return the first file at these places that has an application, or else a function that makes one."""
    for names in ({_APP}, set(_FACTORIES)):
        for place in places:
            files = [path for path in _glob(folder, place) if names & _defined(path)]
            if len(files) > 1:
                raise FolderError(_several(folder, files))
            if files:
                return files[0]
    return None


def _several(folder: Path, paths: list[Path]) -> str:
    names = ", ".join(str(path.relative_to(folder)) for path in paths)
    return f"{folder} has several environments; name one of {names}"


def _name_in(file: Path) -> str | None:
    defined = _defined(file)
    return next((name for name in (_APP, *_FACTORIES) if name in defined), None)


def _defined(file: Path) -> set[str]:
    """Return the names defined at a file's top level, including those under `if` and `try`."""
    try:
        tree = ast.parse(file.read_bytes(), filename=file.name)
    except (OSError, SyntaxError, ValueError):
        return set()
    return set(_names(tree.body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            # create_app is imported by those who call it, not by those who define it
            yield from (_APP for alias in node.names if (alias.asname or alias.name) == _APP)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _names(node.body)
            yield from _names([*getattr(node, "orelse", []), *getattr(node, "finalbody", [])])
            for handler in getattr(node, "handlers", []):
                yield from _names(handler.body)


def _glob(folder: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(folder.glob(pattern)) if path.is_file() and _is_code(path, folder)]


def _is_code(path: Path, folder: Path) -> bool:
    parents = path.relative_to(folder).parts[:-1]
    return not any(part in _NOT_CODE or part.startswith((".", "_")) for part in parents)


def dotted_name(file: Path, root: Path) -> str:
    """Return the module name of a file, if `root` is on the path."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
