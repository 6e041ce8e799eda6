"""Lazy exports: every name resolves, nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import openenv
from openenv._lazy import lazy_exports


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", openenv.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(openenv, name) is not None
    assert name in dir(openenv)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = openenv.nonsense
    with pytest.raises(ImportError):
        from openenv import nonsense  # noqa: F401


def test_importing_the_package_loads_nothing_else() -> None:
    modules = loaded_after("import openenv")
    assert not {"pydantic", "asyncio", "websockets", "fastapi"} & modules


def test_a_client_needs_no_web_framework() -> None:
    modules = loaded_after("from openenv import GenericEnvClient, SyncEnvClient, Action, LocalEnv, Environment")
    assert not {"fastapi", "starlette", "uvicorn", "typer", "httpx2"} & modules


def test_a_resolved_name_is_kept_on_the_module() -> None:
    first = openenv.Action
    assert vars(openenv)["Action"] is first


def test_the_version_is_that_of_the_distribution_or_zero() -> None:
    assert openenv.__version__.split(".")[0].isdigit()


def test_a_table_may_export_a_module_itself() -> None:
    import openenv.errors as errors

    getattr_, dir_, names = lazy_exports("openenv", {"errors": "openenv.errors:", "Action": "openenv.types"})
    assert getattr_("errors") is errors
    assert names == ["errors", "Action"]
    assert {"errors", "Action"} <= set(dir_())


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("openenv.not_in_this_distribution", "Name is not part of openenv-client; run: pip install openenv=="),
        ("httpx2", r"Name needs an HTTP client; run: pip install 'openenv-client\[http\]'"),
        ("somebody_elses", "No module named 'somebody_elses'"),
    ],
)
def test_a_part_that_is_not_installed_is_reported_with_the_command_that_installs_it(
    missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [])  # nothing can be found, as in a distribution without the module
    monkeypatch.delitem(sys.modules, missing, raising=False)
    getattr_, _, _ = lazy_exports("openenv", {"Name": missing})
    with pytest.raises(ModuleNotFoundError, match=message) as caught:
        getattr_("Name")
    assert caught.value.name == missing
