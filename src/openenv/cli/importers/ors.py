"""Imports environments of the Open Reward Standard: classes on `Environment` of `ors` (ors-sdk) or `openreward`."""

from __future__ import annotations

import ast
from pathlib import Path

from .base import DetectedEnvironment, iter_python_files, module_path, parse, write_import

_DISTRIBUTIONS = {"ors": "ors-sdk", "openreward": "openreward", "openrewardstandard": "openrewardstandard"}
"""The modules that have the base class, and the package on PyPI of each."""
# Matches in source code:
#
#   from ors import Environment            class Maze(Environment): ...
#   import openreward as o                 class Maze(o.environments.Environment[Config]): ...
#   class Hard(Maze): ...                  a class on another one of the same module
_BASE = "Environment"


class ORSImporter:
    """Finds and wraps ORS environments."""

    source_type = "ors"

    def detect(self, source: Path) -> list[DetectedEnvironment]:
        """Return the environment classes of a source tree."""
        return [
            DetectedEnvironment(self.source_type, node.name, module_path(source, path), path)
            for path in iter_python_files(source)
            if (tree := parse(path)) is not None
            for node in ors_classes(tree)
        ]

    def generate(self, *, source: Path, destination: Path, env_name: str, detected: DetectedEnvironment) -> None:
        """Write a package of an environment class.

        Raises:
            ScaffoldError: The folder holds something already, or cannot be written.
        """
        tree = parse(detected.file_path)
        assert tree is not None
        (node,) = (one for one in ors_classes(tree) if one.name == detected.class_name)
        write_import(
            kind=self.source_type,
            source=source,
            destination=destination,
            env_name=env_name,
            detected=detected,
            requirements=[_DISTRIBUTIONS[root] for root in sorted(_ors_modules(tree).values())][:1],
            values={"__DECLARED_TOOLS__": ", ".join(tool_names(node))},
        )


def ors_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """Return the classes of a module that are environments: on the base class of ORS, or on another one of them."""
    modules = _ors_modules(tree)
    bases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _ors_root(node) is not None
        for alias in node.names
        if alias.name == _BASE
    }
    classes = []
    # Top level only, in order: a base class stands above the classes on it.
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(_is_base(base, bases, modules) for base in node.bases):
            classes.append(node)
            bases.add(node.name)
    return classes


def tool_names(node: ast.ClassDef) -> list[str]:
    """Return the methods of a class that are tools of every task, in the order of their names."""
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted(method.name for method in methods if any(_is_tool(one) for one in method.decorator_list))


def _is_tool(decorator: ast.expr) -> bool:
    """Say whether a decorator is `tool`; with `shared=False` only some tasks have it."""
    function: ast.expr = decorator
    if isinstance(decorator, ast.Call):
        function = decorator.func
        # `@tool(shared=False)`
        if any(one.arg == "shared" and getattr(one.value, "value", True) is False for one in decorator.keywords):
            return False
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name == "tool"


def _ors_modules(tree: ast.Module) -> dict[str, str]:
    """Return a module's names for ORS, each with its top-level package."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root in _DISTRIBUTIONS:
                    names[alias.asname or root] = root
        elif isinstance(node, ast.ImportFrom) and (package := _ors_root(node)) is not None:
            # The key contains a blank, so it never matches a name such as `ors` in `ors.Environment`.
            names.setdefault(f"from {package}", package)
    return names


def _ors_root(node: ast.ImportFrom) -> str | None:
    """Return the package of ORS that names are imported from; None for another package."""
    root = (node.module or "").partition(".")[0]
    return root if root in _DISTRIBUTIONS and not node.level else None


def _is_base(base: ast.expr, bases: set[str], modules: dict[str, str]) -> bool:
    # `Environment[Config]` counts as `Environment`.
    if isinstance(base, ast.Subscript):
        base = base.value
    if isinstance(base, ast.Name):
        return base.id in bases
    root: ast.expr = base
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(base, ast.Attribute) and base.attr == _BASE and getattr(root, "id", None) in modules
