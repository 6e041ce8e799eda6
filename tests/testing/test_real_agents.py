"""The real coding agents do a tool turn against a scripted model, each in its own dialect and words.

The programs are looked for in the folders of `OPENENV_AGENT_BIN` (separated as a PATH is) and then on the PATH; an
agent that is not there is skipped. Each runs with an empty environment and a home of its own, without a sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from openenv.rollout.capture import CaptureServer
from openenv.rollout.tasks.task import Model
from openenv.testing import CutFailure, Script, ScriptedModel, StatusFailure, Turn
from openenv.testing.scripted import agent_scripts as scripts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Start = Callable[..., ScriptedModel]
TASK = "Write binary_search.py"
PROGRAMS = {"opencode": "opencode", "claude-code": "claude", "codex": "codex", "mini-swe-agent": "mini"}
DIALECTS = {"opencode": "openai_chat", "claude-code": "anthropic", "codex": "openai_responses"}


def program(agent: str) -> str:
    """Return where an agent is, or skip."""
    path = os.pathsep.join(filter(None, (os.environ.get("OPENENV_AGENT_BIN"), os.environ.get("PATH"))))
    executable = shutil.which(PROGRAMS[agent], path=path)
    if executable is None:
        pytest.skip(f"{agent} is not here: no {PROGRAMS[agent]} on the PATH or in OPENENV_AGENT_BIN")
    return executable


@dataclass(frozen=True)
class Endpoint:
    """Where an agent finds its model."""

    root_url: str
    name: str
    key: str = "key"

    @property
    def url(self) -> str:
        """The address with `/v1`."""
        return f"{self.root_url}/v1"


def command(agent: str, model: Endpoint, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return how an agent is started, and its own part of the environment."""
    path = program(agent)
    if agent == "opencode":
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "here",
            "options": {"baseURL": model.url, "apiKey": model.key},
            "models": {model.name: {"name": "here", "tool_call": True, "limit": {"context": 100_000, "output": 4000}}},
        }
        config = {
            "provider": {"here": provider},
            "model": f"here/{model.name}",
            "small_model": f"here/{model.name}",
            "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
            "autoupdate": False,
            "share": "disabled",
        }
        (home / ".config" / "opencode").mkdir(parents=True)
        (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(config))
        off = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return [path, "run", "--format", "json", TASK], {f"OPENCODE_DISABLE_{name}": "1" for name in off}
    if agent == "claude-code":
        options = ["--model", model.name, "--permission-mode", "acceptEdits", "--output-format", "json"]
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
        return [path, "-p", TASK, *options], {
            "ANTHROPIC_BASE_URL": model.root_url,
            "ANTHROPIC_API_KEY": model.key,
            **quiet,
        }
    if agent == "codex":
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(
            f'model = "{model.name}"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
            f'base_url = "{model.url}"\nenv_key = "HERE_KEY"\nwire_api = "responses"\n'
        )
        return [path, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK], {"HERE_KEY": model.key}
    own = {"OPENAI_API_BASE": model.url, "OPENAI_API_KEY": model.key, "MSWEA_CONFIGURED": "true"}
    own |= {"MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
    trajectory = str(home / "trajectory.json")
    return [path, "-y", "--exit-immediately", "-o", trajectory, "-m", f"openai/{model.name}", "-t", TASK], own


def run(agent: str, model: Endpoint, folder: Path) -> str:
    """Run an agent to its end, and return what it has written."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    argv, own = command(agent, model, home)
    folders = {f"XDG_{name.upper()}_HOME": str(home / f".{name}") for name in ("config", "data", "cache", "state")}
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], **folders, **own}
    done = subprocess.run(
        argv, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return (work / "binary_search.py").read_text()


@pytest.mark.parametrize("agent", sorted(scripts.AGENTS))
def test_an_agent_writes_what_the_script_says_and_its_prompts_extend_each_other(
    scripted: Start, tmp_path: Path, agent: str
) -> None:
    model = scripted(scripts.binary_search(agent))
    assert run(agent, Endpoint(model.root_url, model.name), tmp_path) == scripts.BINARY_SEARCH
    turns = [one for one in model.played() if one.turn >= 0]
    assert [one.turn for one in turns] == [0, 1]
    assert {one.dialect for one in turns} == {DIALECTS.get(agent, "openai_chat")}
    history = turns[0].prompt_ids + turns[0].token_ids
    assert turns[1].prompt_ids[: len(history)] == history


@pytest.mark.parametrize("agent", ["opencode", "claude-code", "codex"])
@pytest.mark.parametrize("failure", [StatusFailure(status=500), CutFailure(after_chunks=30)])
def test_an_agent_retries_after_a_failure_and_the_script_goes_on(
    scripted: Start, tmp_path: Path, agent: str, failure: StatusFailure | CutFailure
) -> None:
    first, *rest = scripts.binary_search(agent).turns
    flaky = Script(name="flaky", turns=(Turn(calls=first.calls, failures=(failure,)), *rest))
    model = scripted(flaky)
    assert run(agent, Endpoint(model.root_url, model.name), tmp_path) == scripts.BINARY_SEARCH
    assert [one.finished for one in model.played() if one.turn == 0] == [False, True]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("agent", sorted(scripts.AGENTS))
def test_what_the_proxy_captures_of_an_agent_is_what_was_sent(
    scripted: Start, tmp_path: Path, agent: str, engine: str
) -> None:
    model = scripted(scripts.binary_search(agent), engine=engine, api_key="the real key")
    with CaptureServer(tmp_path / "records") as server:
        address = model.model()
        capture = server.open("one", Model(**address, api_key="the real key"))
        assert run(agent, Endpoint(server.url, model.name, capture.key), tmp_path) == scripts.BINARY_SEARCH
        capture.revoke()
        played, calls, turns = model.played(), capture.calls(), capture.turns()
        sequences = [one for one in capture.sequences() if one.role == "agent"]
    assert len(played) == len(calls) == len(turns) >= 2
    for sent, call, turn in zip(played, calls, turns, strict=True):
        assert list(call.completion.prompt_ids or ()) == sent.prompt_ids
        assert turn.completion_token_ids == sent.token_ids
        assert turn.per_token_logps == sent.logprobs
    (sequence,) = sequences
    last = [one for one in played if one.turn >= 0][-1]
    assert sequence.n_turns == 2
    assert sequence.input_ids == last.prompt_ids + last.token_ids
    assert sequence.n_trainable == sum(len(one.token_ids) for one in played if one.turn >= 0)
    assert "the real key" not in "".join(path.read_text() for path in (tmp_path / "home").rglob("*.json"))
