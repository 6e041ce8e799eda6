"""Backends that are named by module and class, in Python and on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openenv.cli.sandboxes import _try_backend, import_from_here, sandboxes
from openenv.sandboxes import ProcessSandboxes, backend

SOURCE = """
from openenv.sandboxes import ProcessSandboxes

class Mine(ProcessSandboxes):
    name = "mine"
    def __init__(self):
        super().__init__(i_know_there_is_no_isolation=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_boxes_for_a_test.py").write_text(SOURCE)
    (tmp_path / "my_broken_boxes.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_backend_is_named_by_module_and_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    chosen = backend("my_boxes_for_a_test:Mine")
    assert isinstance(chosen, ProcessSandboxes)
    assert chosen.name == "mine"


def register(folder: Path, group: str, name: str, target: str) -> None:
    """Write the metadata that pip writes for a package with one entry point.

    Each test needs a name of its own: a plugin is loaded once per process.
    """
    metadata = folder / "boxes_for_a_test-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: boxes-for-a-test\nVersion: 1.0\n")
    with (metadata / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n{name} = {target}\n")


def test_an_installed_package_adds_a_backend_that_runs_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(folder, "openenv.sandboxes", "mine", "my_boxes_for_a_test:Mine")
    monkeypatch.syspath_prepend(str(folder))
    with backend("mine").open() as sandbox:
        assert sandbox.exec("echo $((6 * 7))").stdout == "42\n"
    done = CliRunner().invoke(sandboxes, ["check", "mine", "--only", "exec.exit-code"])
    assert "mine: 1 passed" in done.output
    with pytest.raises(ValueError, match="did you mean 'mine'"):
        backend("mines")


def test_an_installed_package_cannot_replace_a_built_in_backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(folder, "openenv.sandboxes", "process", "my_boxes_for_a_test:Mine")
    monkeypatch.syspath_prepend(str(folder))
    assert type(backend("process", i_know_there_is_no_isolation=True)) is ProcessSandboxes


def test_a_broken_plugin_is_listed_with_its_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(folder, "openenv.sandboxes", "half", "my_boxes_for_a_test:Missing")
    monkeypatch.syspath_prepend(str(folder))
    runs_here, _, reason = _try_backend("half")
    assert "no" in runs_here
    assert "Missing" in reason


def test_a_registered_object_that_is_not_a_backend_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(folder, "openenv.sandboxes", "joined", "os.path:join")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ValueError, match="joined is not a sandbox backend"):
        backend("joined")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_module_that_nobody_has:Mine", "cannot import 'a_module_that_nobody_has'"),
        ("openenv.nothing.here:Mine", "cannot import 'openenv.nothing.here'"),
        ("openenv.sandboxes:nothing", "is not a sandbox backend"),
        ("os.path:join", "is not a sandbox backend"),
    ],
)
def test_a_name_that_leads_nowhere_says_so(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend(name)


def test_a_module_that_misses_another_one_says_which(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        backend("my_broken_boxes:Mine")


def test_the_command_line_finds_a_backend_in_the_folder_one_is_in(folder: Path) -> None:
    assert str(folder) not in sys.path
    done = CliRunner().invoke(sandboxes, ["check", "my_boxes_for_a_test:Mine", "--only", "exec.exit-code"])
    assert done.exit_code == 0, done.output
    assert "mine: 1 passed" in done.output


def test_our_own_names_put_nothing_on_the_path(folder: Path) -> None:
    before = list(sys.path)
    assert import_from_here("local") == "local"
    assert sys.path == before
