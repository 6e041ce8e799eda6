"""Every module path of the published package, and every public name in it: importable here, or a clear ImportError."""

from __future__ import annotations

import ast
import importlib
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from program_interpreters import Interpreter

pytestmark = pytest.mark.published

# Names that are no interface: what a module uses itself.
INNER = {"logger", "console", "T"}
INNER_OF = {
    "openenv.auto.auto_env": "OPENENV_TRUST_REMOTE_CODE",
    "openenv.core.env_client": "EnvClientT ResultT",
    "openenv.core.env_server.mcp_environment": "VALID_MODES",
    "openenv.core.harness.capture.compat": "BEHAVIOUR_ALTERING BEHAVIOUR_WARNINGS LEGACY_ALIASES MAX_FIXES PROTECTED",
    "openenv.core.harness.capture.contract": "BUDGET_STOP_MESSAGE",
    "openenv.core.harness.capture.server": "AUX_ROUTES SAMPLING_KEYS",
    "openenv.core.harness.capture.sse": "KEEPALIVE KEEPALIVE_INTERVAL_S SSE_HEADERS",
    "openenv.core.harness.capture.upstream": "CAPTURE_LEVELS NON_POLICY_SAMPLING",
    "openenv.core.harness.capture.validate_llm": "ENGINE_HINT",
    "openenv.cli.commands.push": "DEFAULT_PUSH_IGNORE_PATTERNS",
    "openenv.cli.commands.skills": "CENTRAL_GLOBAL CENTRAL_LOCAL DEFAULT_SKILL_ID GLOBAL_TARGETS LOCAL_TARGETS",
    "openenv.cli.commands.validate": "EXIT_FAIL EXIT_INTERNAL EXIT_PASS EXIT_UNSUPPORTED",
    "openenv.cli.importers.base": "ImportPackageContext append_dependency_files ensure_vendor_package "
    "prepare_import_package render_importer_template write_text",
    "openenv.cli.importers.ors": "detect_ors_dependencies detect_ors_environments",
    "openenv.cli.importers.verifiers": "detect_verifiers_environments",
    "openenv.core.containers.runtime.uv_provider": "GIT_URL_PREFIX",
    "openenv.harbor.install_fixes": "MODELS_JSON",
    "openenv.harbor.seams": "ATIF_AGENTS PI_PROVIDER PRIORITY",
    "openenv.harbor.serving": "CAPTURE_MOUNT",
}
NOT_MODULES = {"openenv.core.containers.test_local_docker_provider"}  # a program that tries a provider out
# Parts of Harbor's own page and of its agents, which no other program imports.
NOT_MODULES |= {f"openenv.harbor.{name}" for name in ("e2b_stream", "nemo_profile", "ui_data", "ui_icons", "ui_pages")}
NOT_MODULES |= {f"openenv.harbor.{name}" for name in ("ui_runs", "ui_settings", "ui_trace")}


@pytest.fixture(scope="module")
def modules(published: Interpreter) -> dict[str, set[str]]:
    """The published modules, each with its public names, read from the sources."""
    command = [published.python, "-c", "import importlib.util as u; print(u.find_spec('openenv').origin)"]
    root = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).parent
    return {
        name: set(_public(path))
        for path in sorted(root.rglob("*.py"))
        if (name := _name(path.relative_to(root.parent))) is not None and name not in NOT_MODULES
    }


def _name(path: Path) -> str | None:
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if any(part.startswith("_") or part == "templates" for part in parts):
        return None
    return ".".join(parts)


def _public(path: Path) -> Iterator[str]:
    """The names that a module lists, or else those that it defines."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    defined: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names == ["__all__"] and isinstance(node.value, ast.List | ast.Tuple):
                yield from (str(ast.literal_eval(name)) for name in node.value.elts if isinstance(name, ast.Constant))
                return
            defined += names
    yield from (name for name in defined if not name.startswith("_") and name not in INNER)


def test_every_published_module_can_be_imported(modules: dict[str, set[str]]) -> None:
    assert len(modules) > 100
    failed = {}
    for module in modules:
        try:
            _import(module)
        except ImportError as exc:
            failed[module] = str(exc)
    assert failed == {}


def test_every_public_name_is_there(modules: dict[str, set[str]]) -> None:
    missing = []
    for module, names in modules.items():
        for name in sorted(names - set(INNER_OF.get(module, "").split())):
            try:
                getattr(_import(module), name)
            except AttributeError:
                missing.append(f"{module}.{name}")
            except ImportError as exc:
                if "pip install" not in str(exc):  # which an optional package that is not installed brings
                    missing.append(f"{module}.{name}: {exc}")
    assert missing == []


def _import(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(module)
