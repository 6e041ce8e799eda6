"""Adapters for trainers by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenv.train import trainers


def test_every_adapter_in_the_folder_is_registered() -> None:
    folder = Path(trainers.__file__).parent
    assert trainers.trainer_names() == sorted(path.stem for path in folder.glob("[a-z]*.py"))


def test_an_adapter_is_imported_by_name() -> None:
    assert trainers.load_trainer("trl").__name__ == "openenv.train.trainers.trl"
    with pytest.raises(LookupError, match="choose from sb3, skyrl, trl"):
        trainers.load_trainer("nothing")


def test_another_package_adds_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other_trainer-1.0.dist-info"
    info.mkdir()
    (tmp_path / "other_trainer.py").write_text("LOSS = 'grpo'\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-trainer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[openenv.trainers]\nother = other_trainer\nnumber = other_trainer:LOSS\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert trainers.load_trainer("other").LOSS == "grpo"
    with pytest.raises(TypeError, match="must be a module, not str"):
        trainers.load_trainer("number")
