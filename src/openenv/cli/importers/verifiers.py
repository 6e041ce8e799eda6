"""Imports environments of verifiers': tasksets of 0.4 and newer, which a module exports by `__all__`."""

from __future__ import annotations

import ast
from pathlib import Path

from .base import DetectedEnvironment, ImportProblem, iter_python_files, module_path, parse, write_import

_REQUIREMENT = "verifiers>=0.4"
# The function by which environments before 0.4 were loaded.
_LOADER = "load_environment"


class VerifiersImporter:
    """Finds and wraps tasksets."""

    source_type = "verifiers"

    def detect(self, source: Path) -> list[DetectedEnvironment]:
        """Return the tasksets of a source tree, and the loaders of environments from before 0.4."""
        trees = {path: tree for path in iter_python_files(source) if (tree := parse(path)) is not None}
        # The exporting module counts, not the defining one:
        #
        #   maze/tasks.py       class MazeTasks(Taskset)
        #   maze/__init__.py    from .tasks import MazeTasks; __all__ = ["MazeTasks"]     <- this module is loaded
        tasksets = {name for tree in trees.values() if _imports_verifiers(tree) for name in _tasksets(tree)}
        exports = {path: [name for name in _exported(tree) if name in tasksets] for path, tree in trees.items()}
        environments = []
        for path, names in exports.items():
            # A package re-exports names of its modules; verifiers loads them from the package.
            is_repeated = path.name != "__init__.py" and names and names == exports.get(path.with_name("__init__.py"))
            if not is_repeated:
                environments += [self._detected(source, path, name) for name in names]
        if environments:
            return environments
        # Only without tasksets: `generate` then explains the migration instead of "found no environment".
        return [
            self._detected(source, path, _LOADER)
            for path, tree in trees.items()
            if _imports_verifiers(tree) and any(getattr(node, "name", None) == _LOADER for node in tree.body)
        ]

    def _detected(self, source: Path, path: Path, name: str) -> DetectedEnvironment:
        return DetectedEnvironment(self.source_type, name, module_path(source, path), path)

    def generate(self, *, source: Path, destination: Path, env_name: str, detected: DetectedEnvironment) -> None:
        """Write a package of a taskset.

        Raises:
            ImportProblem: The environment is from before verifiers 0.4.
            ScaffoldError: The folder holds something already, or cannot be written.
        """
        if detected.class_name == _LOADER:
            raise ImportProblem(
                f"{detected.qualified_name} is an environment from before verifiers 0.4, which no longer loads it: "
                "make it a Taskset (verifiers.v1), exported by __all__, and import that"
            )
        if detected.module_path != detected.module_path.lower():
            raise ImportProblem(f"verifiers does not find modules with capital letters; rename {detected.module_path}")
        write_import(
            kind=self.source_type,
            source=source,
            destination=destination,
            env_name=env_name,
            detected=detected,
            requirements=[_REQUIREMENT],
            values={},
        )


def _imports_verifiers(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        # verifiers, verifiers.v1
        if any(name.partition(".")[0] == "verifiers" for name in names):
            return True
    return False


def _tasksets(tree: ast.Module) -> list[str]:
    """Return the classes of a module on `Taskset`."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            if any((getattr(base, "attr", None) or getattr(base, "id", None)) == "Taskset" for base in bases):
                names.append(node.name)
    return names


def _exported(tree: ast.Module) -> list[str]:
    """Return what `__all__` of a module lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == "__all__" for target in node.targets):
            try:
                return [str(name) for name in ast.literal_eval(node.value)]
            # `__all__` is computed, for example `[*base.__all__]`; the code is not run, so its names stay unknown.
            except (ValueError, TypeError):
                return []
    return []
