"""A source that was saved with a mistake while `--reload` watches it: one report, no traceback of ours."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from openenv.server.run import app_from_environment


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "walk_with_a_mistake.py"
    monkeypatch.setenv("OPENENV_SERVE_TARGET", path.name)
    return path


@pytest.mark.parametrize(
    ("source", "said"),
    [("def f(:\n", "SyntaxError"), ("import a_module_that_nobody_has\n", "No module named"), ("x = 1\n", "neither")],
)
def test_a_mistake_is_told_without_our_own_frames(
    target: Path, source: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    target.write_text(source)
    with caplog.at_level(logging.ERROR, "uvicorn.error"), pytest.raises(SystemExit) as stop:
        app_from_environment()
    assert stop.value.code == 1
    (record,) = caplog.records
    assert said in record.getMessage()
    assert target.name in record.getMessage()
    assert "loading.py" not in record.getMessage()
    assert record.exc_info is None
