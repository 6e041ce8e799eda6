"""Backends by name, what importing them costs, and the backend without isolation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import openenv
from openenv.errors import SandboxUnavailable, SandboxUnsupported
from openenv.sandboxes import (
    LocalSandboxes,
    Mount,
    ProcessSandboxes,
    SandboxBackend,
    SandboxHandle,
    SandboxSpec,
    backend,
)


def test_backends_are_found_by_name() -> None:
    assert isinstance(backend("local"), LocalSandboxes)
    assert isinstance(backend("local", require_cgroup=False), LocalSandboxes)
    assert backend("docker").name == "docker"


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"choose from .*docker, e2b, kubernetes, local, process, or pass"):
        backend("vm")
    with pytest.raises(ValueError, match="did you mean 'kubernetes'"):
        backend("kubernets")


def test_the_backend_without_isolation_has_to_be_asked_for() -> None:
    with pytest.raises(SandboxUnavailable, match="isolates nothing"):
        backend("process")
    assert isinstance(backend("process", i_know_there_is_no_isolation=True), ProcessSandboxes)


def test_sandboxes_have_the_shapes_that_existing_code_asks_for(process: ProcessSandboxes) -> None:
    assert isinstance(process, SandboxBackend)
    with process.create(timeout_s=60) as box:
        assert isinstance(box, SandboxHandle)


def test_importing_the_package_imports_no_backend() -> None:
    code = (
        "import sys, openenv.sandboxes\n"
        "print([name for name in sys.modules if name.startswith('openenv.sandboxes.') or name == 'docker'])"
    )
    source = str(Path(openenv.__file__).parents[1])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source})
    assert result.stdout.strip() == "[]", result.stderr


def test_a_process_sandbox_refuses_what_it_cannot_give(process: ProcessSandboxes, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnsupported):
        process.open(SandboxSpec(mounts=(Mount(tmp_path, "/opt/x"),)))
    with pytest.raises(SandboxUnsupported):
        process.open(SandboxSpec(home="/somewhere"))


def test_a_process_sandbox_lives_in_a_folder_that_goes_with_it(process: ProcessSandboxes) -> None:
    with process.open() as box:
        home = Path(box.home)
        assert home.is_dir()
        assert box.exec('printf "%s" "$TMPDIR"').stdout == str(home.parent / "tmp")
    assert not home.parent.exists()
    assert process.leftovers() == []
