"""Facades re-export exactly the names of their table, and their packages import nothing heavy."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import facades  # noqa: E402

FACADES = {facade.module: facade for facade in facades.read_table()}
FOLDERS = ("core", "harbor", "auto", "discovery", "validation", "cli/commands")
HEAVY = "fastapi starlette uvicorn gradio fastmcp ray torch openai anthropic huggingface_hub"
LIGHT = ("openenv", "openenv.core", "openenv.harbor", "openenv.auto", "openenv.discovery", "openenv.validation")
PACKAGES = (*LIGHT, "openenv.core.env_server", "openenv.core.harness", "openenv.core.harness.capture")
# The only calls in a facade.
HELPERS = {"export_imports", "lazy_exports", "by_module", "submodules", "command_exports", "_sys.exit", "main"}


@pytest.fixture(autouse=True)
def _no_deprecation_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def test_the_table_describes_every_facade_file() -> None:
    root = ROOT / "src" / "openenv"
    files = {path for folder in FOLDERS for path in (root / folder).rglob("*.py")}
    assert {facade.path for facade in FACADES.values()} >= files
    assert all(facade.path.is_file() for facade in FACADES.values())


@pytest.mark.parametrize("module", FACADES)
def test_a_facade_contains_re_exports_only(module: str) -> None:
    tree = ast.parse(FACADES[module].path.read_text("utf-8"))
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With, ast.Lambda)
    assert not [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, defined)]
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls <= HELPERS


@pytest.mark.parametrize("module", FACADES)
def test_a_facade_has_exactly_the_names_of_the_table(module: str) -> None:
    facade, imported = FACADES[module], importlib.import_module(module)
    listed = list(getattr(imported, "__all__", []))
    if facade.options.get("command"):
        listed.remove("app")
    assert sorted(listed) == sorted(facade.listed), "run scripts/facades.py"
    for export in facade.exports:
        try:
            definition: Any = getattr(importlib.import_module(export.source), export.definition)
        except ImportError as exc:
            if "pip install" in str(exc) or exc.name == export.source:  # an optional package that is not installed
                continue
            raise
        assert getattr(imported, export.name) is definition, export.name
    for name in facade.submodules:
        assert getattr(imported, name) is importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("module", PACKAGES)
def test_a_package_of_facades_imports_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(set({HEAVY!r}.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
