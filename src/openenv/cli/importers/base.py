"""What importers share: source trees, their dependencies and environments, and writing a package.

Source code is parsed and copied, never run.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..init import Names, Variant, write_package

# The result of an import:
#
#   gsm8k_env/
#     openenv.yaml, server/, ...        from template/, templates/common and templates/KIND
#     vendor/gsm8k/                     the source, copied without secrets
VENDOR = "vendor"
_TEMPLATES = Path(__file__).parent / "templates"
_NOT_CODE = frozenset(
    {
        *("__pycache__", ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", "node_modules", "build", "dist"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".idea", ".vscode"),
    }
)
# Files that must not reach an image or the Hub, although they lie beside the code.
_SECRET = (
    *(".env", ".env.*", ".netrc", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*", "credentials.json"),
    *("secrets.*", "*_secret.*", "*_secrets.*", ".pypirc"),
)
_BINARY = ("*.pyc", "*.pyo", "*.pyd", "*.so", "*.dll", "*.dylib")
# The text of the table [project], up to the next table: `[project.scripts]` or `[tool.ruff]`.
_PROJECT = re.compile(r"(?ms)^\[project\]\s*$(.*?)(?=^\[[\w.\"-]+\]\s*$|\Z)")
# dependencies = [
_DEPENDENCIES = re.compile(r"(?m)^dependencies\s*=\s*\[")
_PLAIN_MODULE = re.compile(r"[\w-]+")  # `import_module` takes `Sum-Game`
_PLAIN_FOLDER = re.compile(r"[\w. -]+")
# numpy, numpy>=1.26, openreward[all] @ git+https://..., pytest; python_version < "3.12"
# Not: -r other.txt, ./folder
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\])?\s*([<>=!~;@ ].*)?$")


class ImportProblem(Exception):
    """A source cannot be imported; the text has the reason and the advice."""


@dataclass(frozen=True)
class DetectedEnvironment:
    """An environment that was found in source code."""

    source_type: str
    class_name: str
    module_path: str
    file_path: Path

    @property
    def qualified_name(self) -> str:
        """Its module and name, as `--env-class` takes them."""
        return f"{self.module_path}:{self.class_name}"


@runtime_checkable
class EnvironmentImporter(Protocol):
    """Finds environments of one kind, and writes packages of them."""

    source_type: str

    def detect(self, source: Path) -> list[DetectedEnvironment]:
        """Return the environments in a source tree."""
        ...

    def generate(self, *, source: Path, destination: Path, env_name: str, detected: DetectedEnvironment) -> None:
        """Write a package of one of them into a folder, which must be empty or not there."""
        ...


class ImporterRegistry:
    """The importers, in order of precedence."""

    def __init__(self, importers: list[EnvironmentImporter]) -> None:
        self._importers = {importer.source_type: importer for importer in importers}

    @property
    def supported_types(self) -> list[str]:
        """The kinds of environments that can be imported."""
        return [*self._importers]

    def get(self, source_type: str) -> EnvironmentImporter:
        """Return the importer of a kind.

        Raises:
            ImportProblem: There is none.
        """
        try:
            return self._importers[source_type]
        except KeyError:
            kinds = ", ".join(self.supported_types)
            raise ImportProblem(f"{source_type!r} is not a kind of environment; choose from {kinds}") from None

    def detect(
        self, source: Path, source_type: str | None = None
    ) -> list[tuple[EnvironmentImporter, DetectedEnvironment]]:
        """Return the environments in a source tree, each with its importer."""
        # Without --type every importer looks: a tree may contain environments of both kinds.
        importers = self._importers.values() if source_type is None else [self.get(source_type)]
        return [(importer, one) for importer in importers for one in importer.detect(source)]

    def choose(
        self, source: Path, *, source_type: str | None = None, env_class: str | None = None
    ) -> tuple[EnvironmentImporter, DetectedEnvironment]:
        """Return the one environment in a source tree that is meant.

        Raises:
            ImportProblem: There is none, or several.
        """
        matches = self.detect(source, source_type)
        if not matches:
            kinds = " or ".join([source_type] if source_type else self.supported_types)
            raise ImportProblem(f"found no environment of {kinds} in {source}")
        names = {one.qualified_name: (importer, one) for importer, one in matches}
        if env_class is not None:
            # --env-class takes `Maze` or `pkg.module:Maze`.
            chosen = [name for name, (_, one) in names.items() if env_class in (name, one.class_name)]
            if not chosen:
                near = difflib.get_close_matches(env_class, [*names, *(one.class_name for _, one in matches)], 1)
                hint = f"; did you mean {near[0]}?" if near else f": there are {', '.join(names)}"
                raise ImportProblem(f"no environment {env_class} in {source}{hint}")
            names = {name: names[name] for name in chosen}
        # The message lists module:class, which can be copied into --env-class.
        if len(names) > 1:
            raise ImportProblem(f"choose one of several environments with --env-class: {', '.join(names)}")
        return next(iter(names.values()))


# -- source trees ------------------------------------------------------------------------------------------------------


def iter_python_files(source: Path) -> list[Path]:
    """Return the Python files of a source tree, without tests' caches and virtual environments."""
    if source.is_file():
        return [source]
    return sorted(path for path in _files_of(source) if path.suffix == ".py")


def parse(path: Path) -> ast.Module | None:
    """Parse a Python file; return None if its syntax is wrong."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # the last two: it is nested too deeply
        return None


def import_root(source: Path, path: Path) -> Path:
    """Return the folder that must be on the import path for a file: the first one above it that is not a package.

    If the source itself is a package, this is the source's parent.
    """
    folder = path.parent
    top = source if source.is_dir() else source.parent
    while (folder / "__init__.py").is_file():
        if folder == top:
            return folder.parent
        folder = folder.parent
    return folder


def module_path(source: Path, file_path: Path) -> str:
    """Return a file's module name."""
    parts = file_path.relative_to(import_root(source, file_path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def copy_source_tree(source: Path, destination: Path) -> None:
    """Copy source code without version control, caches, binaries, links and secrets."""
    if source.is_file():
        destination.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination / source.name)
        return
    for path in _files_of(source):
        if not _is_secret(path):
            target = destination / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def secrets_in(source: Path) -> list[str]:
    """Return the files of a source tree that look like secrets, and so are not copied."""
    every = [] if source.is_file() else _files_of(source)
    return [path.relative_to(source).as_posix() for path in every if _is_secret(path)]


def _is_secret(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in _SECRET)


def _files_of(source: Path) -> Iterator[Path]:
    """Yield the files of a tree that are code or data; links may lead out of it, so they are not followed."""
    for place, folders, files in os.walk(source):
        # Changing the list in place keeps `os.walk` out of these folders; sorting makes copies reproducible.
        folders[:] = sorted(name for name in folders if name not in _NOT_CODE and not name.endswith(".egg-info"))
        folders[:] = [name for name in folders if not Path(place, name).is_symlink()]
        for name in sorted(files):
            path = Path(place, name)
            if path.is_file() and not path.is_symlink() and not any(fnmatch(name, one) for one in _BINARY):
                yield path


def collect_source_dependencies(source: Path) -> list[str]:
    """Return the declared requirements of a source tree, from its `pyproject.toml` and `requirements.txt`."""
    folder = source if source.is_dir() else source.parent
    project = folder / "pyproject.toml"
    lines = _project_dependencies(project.read_text(encoding="utf-8", errors="replace")) if project.is_file() else []
    for name in ("requirements.txt", "server/requirements.txt"):
        if (folder / name).is_file():
            lines += (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
    # requirements.txt may have comments behind a requirement; a # without a blank belongs to an address.
    return merged_requirements(line.split(" #")[0].strip() for line in lines)


def _project_dependencies(text: str) -> list[str]:
    """Return `dependencies` of the table `project`. A list of texts is the same in TOML and in Python."""
    table = _PROJECT.search(text)
    start = None if table is None else _DEPENDENCIES.search(table.group(1))
    if table is None or start is None:
        return []
    rest = table.group(1)[start.end() :]
    for end in (match.end() for match in re.finditer(r"\]", rest)):  # a text may have brackets: extras
        # Cut too early, `["a[b` is not valid Python; try the next bracket.
        with contextlib.suppress(SyntaxError, ValueError):
            return [str(one) for one in ast.literal_eval("[" + rest[:end])]
    raise ImportProblem("the dependencies in pyproject.toml cannot be read: write a list of strings")


def merged_requirements(lines: Iterator[str] | list[str]) -> list[str]:
    """Return the first requirement of each package; skip options and paths of pip."""
    requirements: dict[str, str] = {}
    for line in map(str.strip, lines):
        match = _REQUIREMENT.match(line) if line.isprintable() else None
        if match is not None and not line.startswith("#"):
            # numpy and NumPy are one package, as are a_b, a-b and a.b.
            requirements.setdefault(re.sub(r"[-_.]+", "-", match.group(1)).lower(), line)
    return [*requirements.values()]


# -- packages ----------------------------------------------------------------------------------------------------------


def write_import(
    *,
    kind: str,
    source: Path,
    destination: Path,
    env_name: str,
    detected: DetectedEnvironment,
    requirements: list[str],
    values: Mapping[str, str],
) -> None:
    """Write a package that serves an imported environment: a small wrapper, and the source code beside it.

    Raises:
        ScaffoldError: The folder holds something already, or cannot be written.
    """
    base = source if source.is_dir() else source.parent
    vendored = safe_vendor_dir_name(source)
    root = import_root(source, detected.file_path)
    # A source that is a package itself is imported from the folder above it, so that its name must stay.
    is_package = root == base.parent
    place = Path(VENDOR) if is_package else Path(VENDOR, vendored, root.relative_to(base))
    if is_package:
        vendored = base.name
    _check_names(detected, place)
    needs = merged_requirements([*collect_source_dependencies(source), *requirements])
    # The package's own template requires openenv and its server; an older pin of the source would conflict.
    needs = [one for one in needs if not re.match(r"(?i)(openenv([-_]core)?|uvicorn)\b(?![-_])", one)]

    def finish(folder: Path) -> None:
        copy_source_tree(source, folder / VENDOR / vendored)

    every = {
        "__SOURCE_PATH__": place.as_posix(),
        "__SOURCE_MODULE__": detected.module_path,
        "__SOURCE_NAME__": detected.class_name,
        "__SOURCE_FOLDER__": f"{VENDOR}/{vendored}",
        "__DEPENDENCIES__": "".join(f'\n  "{_quoted(one)}",' for one in needs),
        "__REQUIREMENTS__": "".join(f"\n{one}" for one in needs),
        **values,
    }
    templates = (_TEMPLATES / "common", _TEMPLATES / kind)
    variant = Variant(templates, without=frozenset({"models.py"}), values=every, finish=finish)
    write_package(Names.of(env_name), destination, variant)


# Templates put these names into Python, YAML and Markdown. A file may be called `x"); import os; os.system("id.py`.
def _check_names(detected: DetectedEnvironment, place: Path) -> None:
    """Raise `ImportProblem` unless the names of modules, classes and folders are plain."""
    odd = [name for name in detected.module_path.split(".") if not _PLAIN_MODULE.fullmatch(name)]
    odd += [] if detected.class_name.isidentifier() else [detected.class_name]
    odd += [part for part in place.parts if not _PLAIN_FOLDER.fullmatch(part)]
    if odd:
        raise ImportProblem(f"{odd[0]!r} cannot be part of an import; rename it to letters, digits and underscores")


def safe_vendor_dir_name(source: Path) -> str:
    """Return the name of a source's folder in the package."""
    name = source.resolve().stem if source.is_file() else source.resolve().name
    return re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_") or "source"


def _quoted(requirement: str) -> str:
    return requirement.replace("\\", "\\\\").replace('"', "'")
