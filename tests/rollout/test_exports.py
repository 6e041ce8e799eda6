"""What can be imported from the packages: every listed name is there, and importing the package alone loads little."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["openenv.rollout", "openenv.rollout.agents", "openenv.testing"])
def test_every_listed_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_importing_the_package_starts_no_server_and_no_sandbox() -> None:
    code = "import sys, openenv.rollout; print([name for name in ('uvicorn', 'fastapi') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
