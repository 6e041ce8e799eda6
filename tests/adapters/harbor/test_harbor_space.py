"""A Space of Harbor's tasks, pushed by the real `huggingface_hub` to a double of the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from hub_double import TOKEN, HubDouble, Repository
from openenv.packaging.hub.harbor_space import SpacePlan, push_space
from openenv.packaging.hub.spaces import HubError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubDouble]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # the double has LFS storage only
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with HubDouble() as double:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", double.url)
        yield double


def test_a_space_gets_files_variables_and_secrets(hub: HubDouble, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("KUBE=very-secret\n")
    hub.add(Repository("team/tasks", variables={"OLD": "1"}))
    plan = SpacePlan(
        repo_id="team/tasks",
        datasets=("team/data",),
        llm_url="https://models.example/v1",
        hardware="cpu-upgrade",
        switches={"rollouts": True, "add-datasets": False},
        api_key="also-secret",
        env_file=tmp_path / "env",
    )
    lines: list[str] = []
    assert push_space(plan, recreate=True, report=lines.append) == f"{hub.url}/spaces/team/tasks"
    space = hub.repositories["team/tasks"]
    assert space.variables == {"OPENENV_DATASETS": "team/data"}
    assert space.secrets == {"KUBE": "very-secret", "OPENENV_LLM_API_KEY": "also-secret"}
    assert space.hardware == "cpu-upgrade"
    assert b'"--no-add-datasets", "--rollouts"' in space.files["Dockerfile"]
    assert b"sdk: docker" in space.files["README.md"]
    assert b"secret" not in b"".join(space.files.values())
    assert "-secret" not in "".join(lines)
    assert "also-secret" not in repr(plan)


def test_what_the_hub_refuses_is_said_without_secrets(hub: HubDouble) -> None:
    plan = SpacePlan(repo_id="strangers/tasks", api_key="also-secret")
    with pytest.raises(HubError, match="may not do this") as caught:
        push_space(plan)
    assert "also-secret" not in str(caught.value)
