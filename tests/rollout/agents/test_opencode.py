"""OpenCode: the real CLI in the local sandbox, against a scripted model; and its configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv import settings
from openenv.errors import AgentUnavailable
from openenv.rollout import (
    AgentRun,
    Installation,
    Model,
    Outcome,
    RolloutStore,
    Sampling,
    Task,
    run_many,
    run_rollout,
)
from openenv.rollout.agents import OpenCode
from openenv.rollout.agents.opencode import opencode_json
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedCall, ScriptedModel, StatusFailure, Turn

WRITE = Task(
    # It begins with a dash and is longer than an argument may be.
    instruction="--help is not what I want. Write 42 into answer.txt." + " Really." * 20_000,
    verify=("grep -qx 42 answer.txt",),
    agent_timeout_s=90,
)
SCRIPT = (
    Turn(
        text="I write it.",
        calls=(ScriptedCall(name="write", arguments={"filePath": "${cwd}/answer.txt", "content": "42\n"}),),
    ),
    Turn(text="It is written."),
)
LOOK = "env; cat ~/.config/opencode/*; [ -e ~/.local/state/opencode/locks ] || echo nothing-is-fetched"
Play = Callable[..., tuple[Outcome, ScriptedModel]]


def a_run(**fields: Any) -> AgentRun:
    defaults: dict[str, Any] = {
        "task": Task(instruction="x"),
        "base_url": "http://127.0.0.1:7000/v1",
        "api_key": "oe-key",
        "model": "Qwen/Qwen3-4B",
        "home": "/home/user",
        "workdir": "/home/user/workdir",
        "installation": Installation(),
    }
    return AgentRun(**{**defaults, **fields})


def test_the_model_keeps_its_whole_name() -> None:
    config = opencode_json(a_run())
    assert config["model"] == config["small_model"] == "intercepted/Qwen/Qwen3-4B"
    provider = config["provider"]["intercepted"]
    assert list(provider["models"]) == ["Qwen/Qwen3-4B"]
    assert provider["options"] == {"baseURL": "http://127.0.0.1:7000/v1", "apiKey": "oe-key", "timeout": 600_000}
    assert provider["npm"] == "@ai-sdk/openai-compatible"


def test_options_reach_the_configuration() -> None:
    options = {
        "disabled_tools": ["bash"],
        "enabled_tools": ["webfetch"],
        "request_timeout_ms": 5,
        "extra_opencode_json": {"agent": {"build": {"steps": 3}}, "share": "auto"},
    }
    config = opencode_json(a_run(options=options), system_path="/s.md")
    assert config["tools"] == {"bash": False, "webfetch": True}
    assert config["agent"] == {"title": {"disable": True}, "build": {"steps": 3}}
    assert config["share"] == "auto"
    assert config["instructions"] == ["/s.md"]
    assert opencode_json(a_run())["tools"] == {"webfetch": False, "question": False}


def test_a_list_of_models_is_read_only_where_another_provider_may_need_it(local: Sandboxes) -> None:
    others: dict[str, Any] = {"extra_opencode_json": {"provider": {"openai": {}}}}
    with local.open() as sandbox:
        mine = OpenCode().prepare(sandbox, a_run()).envs
        assert sandbox.read_text(mine["OPENCODE_MODELS_PATH"]) == "{}"
        assert "OPENCODE_MODELS_PATH" not in OpenCode().prepare(sandbox, a_run(options=others)).envs
        own = {"extra_env": {"OPENCODE_MODELS_PATH": "/mine.json"}}
        assert OpenCode().prepare(sandbox, a_run(options=own)).envs["OPENCODE_MODELS_PATH"] == "/mine.json"


def test_an_error_that_opencode_reports_is_a_failure() -> None:
    driver = OpenCode()
    assert driver.failure(0, '{"type":"text"}\n') is None
    assert driver.failure(0, "") is None
    assert driver.failure(0, '{"type":' * 50_000) is None
    assert "code 3" in (driver.failure(3, "") or "")
    assert "boom" in (driver.failure(0, '{"type":"text"}\n{"type":"error","error":{"message":"boom"}}\n') or "")


@pytest.fixture(scope="session")
def opencode() -> OpenCode:
    """OpenCode, installed."""
    driver = OpenCode()
    try:
        driver.install(settings.cache_dir(), lambda message: None)
    except AgentUnavailable as exc:
        if shutil.which("npm") is None:
            pytest.skip(f"no npm and no opencode here: {exc}")
        raise
    return driver


@pytest.fixture
def play(local: Sandboxes, opencode: OpenCode, leftovers: Callable[[], None]) -> Play:
    """Run a script through OpenCode."""

    def run(*turns: Turn, **arguments: Any) -> tuple[Outcome, ScriptedModel]:
        with ScriptedModel(Script(name="vendor", turns=turns), api_key="the-real-key") as server:
            model = Model.model_validate({**server.model(), "api_key": "the-real-key", "sampling": Sampling()})
            options: dict[str, Any] = {"agent": opencode, "sandbox": local, "model": model, **arguments}
            outcome = run_rollout(WRITE, **options)
        leftovers()
        return outcome, server

    return run


@pytest.mark.timeout(300)  # it may have to be installed first
def test_opencode_does_a_task_and_every_token_is_there(play: Play, tmp_path: Path) -> None:
    look = Turn(
        text="I look around.",
        calls=(ScriptedCall(name="bash", arguments={"command": LOOK, "description": "x"}),),
    )
    with RolloutStore(tmp_path / "store") as store:
        outcome, server = play(look, *SCRIPT, store=store)
        kept = store.file(outcome.rollout_id, "agent.log")
        assert kept is not None
        log = kept.read_text()
    assert (outcome.status, outcome.reward, outcome.agent_exit_code) == ("ok", 1.0, 0), outcome.agent_log_tail
    assert outcome.files == {"/home/user/workdir/answer.txt": "42\n"}
    played = server.played()
    assert [entry.model for entry in played] == ["scripted/vendor"] * 3
    assert len(outcome.turns) == 3
    for turn, entry in zip(outcome.turns, played, strict=True):
        assert turn.completion_token_ids == entry.token_ids
        assert turn.per_token_logps == pytest.approx(entry.logprobs)
        assert turn.not_trainable == []
        assert len(turn.per_token_logps) == len(turn.completion_tokens) == len(turn.completion_token_ids)
    assert "OPENCODE_CONFIG" in log  # it did look around
    assert "nothing-is-fetched\\n" in log  # an installation of npm packages would have taken a lock
    assert "the-real-key" not in log
    assert all(json.loads(line)["type"] for line in log.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_exit_code_is_opencodes_own(play: Play) -> None:
    failing = Turn(text="no", failures=(StatusFailure(status=400, attempts=None),))
    outcome, _ = play(SCRIPT[0], failing)
    assert (outcome.status, outcome.agent_exit_code) == ("policy_failed", 1)
    assert outcome.reward == 1.0  # the file was written before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_opencode_rollouts_at_once_are_not_mixed_up(
    local: Sandboxes, opencode: OpenCode, leftovers: Callable[[], None]
) -> None:
    number = {"filePath": "${cwd}/answer.txt", "content": "${task:number ([0-9]+)}\n"}
    turns = (Turn(text="I write it.", calls=(ScriptedCall(name="write", arguments=number),)), Turn(text="Done."))
    tasks = [
        Task(
            instruction=f"Write number {n} into answer.txt.", verify=(f"grep -qx {n} answer.txt",), agent_timeout_s=500
        )
        for n in range(20)
    ]
    with ScriptedModel(Script(name="numbers", turns=turns)) as server:
        outcomes = run_many(tasks, agent=opencode, sandbox=local, model=Model(**server.model()), concurrency=20)
    assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", 1.0)] * 20
    assert [outcome.files["/home/user/workdir/answer.txt"] for outcome in outcomes] == [f"{n}\n" for n in range(20)]
    leftovers()
