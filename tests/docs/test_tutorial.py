"""The tutorial, done as its page says: Connect Four is tested, served, played and checked, in fewer than 60 lines."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openenv.testing import serve

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "docs_src" / name for name in ("connect_four.py", "test_connect_four.py", "play_connect_four.py")]
RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with what a reader has written."""
    for source in SOURCES:
        (tmp_path / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def run(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_fewer_than_60_lines() -> None:
    lines = [line for source in SOURCES for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) < 60


def test_its_tests_pass(project: Path) -> None:
    assert "2 passed" in run("-m", "pytest", "-q", "test_connect_four.py", folder=project)


def test_it_is_played(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.delitem(sys.modules, "connect_four", raising=False)
    import connect_four  # type: ignore[import-not-found]

    play = project / "play_connect_four.py"
    with serve(connect_four.ConnectFour) as served:
        play.write_text(play.read_text(encoding="utf-8").replace("http://localhost:8000", served.url), encoding="utf-8")
        *board, reward = run(play.name, folder=project).split()
    assert len(board) == 6
    assert all(re.fullmatch("[XO.]{7}", row) for row in board)
    assert reward in ("0.0", "1.0")
    monkeypatch.delitem(sys.modules, "connect_four")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["connect_four.py", "guess.py"])
def test_what_newcomers_are_shown_first_passes_every_check(file: str) -> None:
    shown = run("-m", "openenv", "validate", file, folder=ROOT / "docs_src")
    assert shown.rstrip().endswith("Verdict: pass"), shown
    assert ", 0 failed" in shown
