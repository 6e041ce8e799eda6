"""Tasks from files: short to write, and clear about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openenv.errors import RolloutError
from openenv.rollout import load_task


def test_a_task_is_read_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test_it.py").write_text("assert True")
    (tmp_path / "sum.yaml").write_text(
        "instruction: write sum.py\nverify: python3 test_it.py\nverify_files_from: hidden\nsetup: [a, b]\n"
        "limits: {memory_mb: 256}\n"
    )
    task = load_task(tmp_path / "sum.yaml")
    assert task.task_id == "sum"
    assert task.verify == ("python3 test_it.py",)
    assert task.setup == ("a", "b")
    assert task.verify_files == {"test_it.py": "assert True"}
    assert task.limits.memory_mb == 256


def test_a_task_is_read_from_json(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"instruction": "x", "task_id": "other"}))
    assert load_task(tmp_path / "t.json").task_id == "other"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("verify: [x]", "instruction"),
        ("instruction: x\nverfy: [x]", "verfy"),
        ("[1, 2]", "mapping"),
        ("instruction: [", "cannot be read"),
        ("instruction: x\nfiles_from: nowhere", "no folder"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(RolloutError, match=problem):
        load_task(tmp_path / "t.yaml")


def test_a_task_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="cannot be read"):
        load_task(tmp_path / "t.yaml")
