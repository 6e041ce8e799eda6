"""`openenv train --trainer trl`: TRL's `GRPOTrainer` as it is on PyPI makes the updates of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from environments import Tools
from openenv.cli.__main__ import build
from openenv.testing import serve
from tiny_policy import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_trl_trains_and_writes_a_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    out = tmp_path / "run"
    with serve(Tools) as served:
        arguments = ["train", "--trainer", "trl", "--model", model, "--env", served.url, "--out", str(out)]
        arguments += ["--updates", "1", "--groups", "1", "--samples", "2", "--context", "16", "--device", "cpu"]
        result = CliRunner().invoke(build(["train"]), arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip().splitlines()[-1] == str(out / "model")
        AutoModelForCausalLM.from_pretrained(out / "model")
        AutoTokenizer.from_pretrained(out / "model")

        again = CliRunner().invoke(build(["train"]), arguments)
        assert again.exit_code == 1
        assert "earlier run" in again.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--minutes", "1"), "TRL counts updates"),
        (("--updates", "1", "--algorithm", "rloo"), "TRL has no 'rloo'"),
    ],
)
def test_what_trl_cannot_do_is_refused(options: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    arguments = ["train", "--trainer", "trl", "--model", "tiny", "--env", "http://127.0.0.1:9", *options]
    result = CliRunner().invoke(build(["train"]), [*arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert reason in result.output
