"""Backends that are named by module and class, in Python and on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openenv.cli.sandboxes import import_from_here, sandboxes
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_module_that_nobody_has:Mine", "There is no module 'a_module_that_nobody_has'"),
        ("openenv.nothing.here:Mine", "There is no module 'openenv.nothing.here'"),
        ("openenv.sandboxes:nothing", "is no sandbox backend"),
        ("os.path:join", "is no sandbox backend"),
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
