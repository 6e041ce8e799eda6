"""The model calls of a Harbor rollout: one capture server proxies them, for the store and for the session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asking_agent import AskingAgent
from harbor_folders import write_task
from openenv.adapters.harbor.contract import to_training_trace
from openenv.adapters.harbor.rollout import run_rollout
from openenv.core.harness.capture import CaptureServer
from openenv.errors import SandboxUnavailable
from openenv.rollout import RolloutStore
from openenv.rollout.capture import read
from openenv.rollout.capture.outbound import Endpoints
from openenv.sandboxes import Sandbox, SandboxSpec
from openenv.sandboxes.local import LocalSandboxes
from openenv.testing import Script, ScriptedModel, Turn


class HostSandboxes(LocalSandboxes):
    """Sandboxes with the host's programs, whichever image and folders a task names."""

    def require(self, spec: SandboxSpec) -> None:
        super().require(_without_image(spec))

    def open(self, spec: SandboxSpec | None = None, **options: Any) -> Sandbox:  # type: ignore[override]
        return super().open(_without_image(spec or SandboxSpec()), **options)


def _without_image(spec: SandboxSpec) -> SandboxSpec:
    return replace(spec, image=None, build=None, workdir=None, folders=())


@pytest.fixture
def backend() -> HostSandboxes:
    sandboxes = HostSandboxes()
    try:
        sandboxes.check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    return sandboxes


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    turns = (Turn(text="I look."), Turn(text="I am done."))
    with ScriptedModel(Script(name="two", turns=turns)) as scripted:
        yield scripted


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of all model calls that capture servers of this process send."""
    addresses: list[str] = []
    send = Endpoints.send

    async def counted(self: Endpoints, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        if method == "POST":
            addresses.append(url)
        return await send(self, method, url, *args, **kwargs)

    monkeypatch.setattr(Endpoints, "send", counted)
    return addresses


@pytest.mark.parametrize("sampling", [None, {"temperature": 0.7}])
def test_each_model_call_of_a_rollout_is_proxied_once(
    backend: HostSandboxes, model: ScriptedModel, sends: list[str], tmp_path: Path, sampling: dict[str, float] | None
) -> None:
    base_url = model.model()["base_url"]
    with CaptureServer(llm_url=base_url, model="scripted/two", port=0, admin_key="the-admin-key") as server:
        seen: list[str] = []
        result = asyncio.run(
            run_rollout(
                task_dir=write_task(tmp_path / "sum", dockerfile="FROM scratch\n"),
                harness=AskingAgent(),
                sandbox=backend,
                registry=server.registry,
                intercept_url=server.url,
                model="scripted/two",
                trials_dir=tmp_path / "trials",
                agent_step_limit=5,
                sampling=sampling,
                on_session_created=seen.append,
            )
        )
        assert server.registry.list_ids() == []
        assert result.n_turns == 2, (result.error, result.agent_log_tail)
    played = model.played()
    assert len(played) == 2
    assert sends == [f"{base_url}/chat/completions"] * 2
    # The session has the sampled tokens, and so has the store.
    assert result.rollout_type == "train"
    assert seen == [result.session_id]
    assert [turn.completion_token_ids for turn in result.turns] == [entry.token_ids for entry in played]
    assert len(to_training_trace(result).turns) == 2
    with RolloutStore(tmp_path / "trials") as store:
        calls = read(store.captures / result.trial_name).calls
    assert [list(call.completion.sampled.ids) for call in calls] == [entry.token_ids for entry in played]
    assert {call.sent["temperature"] for call in calls} == {0.1 if sampling is None else 0.7}
