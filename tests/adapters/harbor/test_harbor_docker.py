"""Harbor's tasks through the server, the client and the command line, on a real Docker engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harbor_folders import import_base, write_task
from openenv import settings
from openenv.adapters.harbor.client import HarborEnv
from openenv.adapters.harbor.contract import to_training_trace
from openenv.adapters.harbor.environment import HarborEnvironment
from openenv.adapters.harbor.serving import HarborService, build_app
from openenv.cli.__main__ import build
from openenv.errors import AgentUnavailable
from openenv.rollout.agents.opencode import OpenCode
from openenv.testing import Script, ScriptedModel, Turn, serve
from openenv.testing.scripted import ScriptedCall

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def opencode() -> Path:
    """The program of OpenCode."""
    try:
        installed = OpenCode().install(settings.cache_dir(), lambda message: None)
    except AgentUnavailable as exc:
        if shutil.which("npm") is None:
            pytest.skip(f"no npm and no opencode here: {exc}")
        raise
    return installed.mounts[0].source


@pytest.fixture(scope="module")
def engine(docker_engines: Any, busybox_archive: Callable[..., Path], opencode: Path) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        import_base(host, busybox_archive("tmp", "app"), programs=(opencode,))
        yield host


@pytest.fixture
def dataset(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_HOST", engine)
    write_task(tmp_path / "data" / "sum")
    return tmp_path / "data"


def test_a_server_runs_the_oracle_and_opencode(dataset: Path, tmp_path: Path) -> None:
    command = {"command": "awk '{t += $1} END {print t}' numbers.txt > sum.txt", "description": "sum"}
    turns = (Turn(text="I sum.", calls=(ScriptedCall(name="bash", arguments=command),)), Turn(text="Done."))
    with contextlib.ExitStack() as stack:
        script = stack.enter_context(ScriptedModel(Script(name="sum", turns=turns)))
        service = HarborService(
            llm_url=script.model()["base_url"], model="scripted/sum", datasets=[str(dataset)], capture_port=0
        )
        service.start()
        stack.callback(service.stop)
        HarborService.set_current(service)
        app = build_app(datasets=[str(dataset)], trials_dir=tmp_path / "trials")
        stack.callback(HarborEnvironment.configure, datasets=())
        env_url = stack.enter_context(serve(app)).url
        env = stack.enter_context(HarborEnv(base_url=env_url))
        oracle: Any = env.run_rollout(harness="oracle", sandbox="docker")
        nothing: Any = env.run_rollout(harness="nop", sandbox="docker", force_build=True)
        agent: Any = env.run_rollout(
            harness="opencode", sandbox="docker", sampling={"temperature": 1.0}, agent_step_limit=5
        )
        played = script.played()
        assert run_snippet("use_harbor_client.py", env_url) == "sum\n1.0 True\n"
        assert service.capture.registry.list_ids() == []
    assert (oracle.ok, oracle.reward, oracle.findings) == (True, 1.0, []), oracle.error
    assert (nothing.ok, nothing.reward) == (True, 0.0), nothing.error
    assert (agent.ok, agent.reward, agent.n_turns) == (True, 1.0, 2), (agent.error, agent.agent_log_tail)
    assert agent.rollout_type == "train"
    assert [turn.completion_token_ids for turn in agent.turns] == [entry.token_ids for entry in played]
    assert agent.turns[0].tool_calls[0]["name"] == "bash"
    assert agent.conversations[0].messages[-1]["content"] == "Done."
    assert agent.n_trainable_tokens == sum(len(entry.token_ids) for entry in played)
    assert len(to_training_trace(agent).turns) == 2


def run_snippet(file: str, argument: str) -> str:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, str(root / "docs_src" / file), argument]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_prints_what_its_page_says(dataset: Path) -> None:
    assert run_snippet("use_harbor.py", str(dataset)) == "oracle [1.0]\nnoop [0.0]\n"


def test_the_command_lines_run_the_oracle(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    words = ["harbor", "rollout", "--dataset", str(dataset), "--harness", "oracle"]
    done = CliRunner().invoke(build(["harbor"]), [*words, "--trials-dir", str(tmp_path / "trials"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert [result["reward"] for result in json.loads(out.read_text())] == [1.0]
    words = ["rollouts", "run", f"harbor:{dataset}", "--store", str(tmp_path / "store"), "--json"]
    for agent, reward in (("oracle", 1.0), ("noop", 0.0)):
        done = CliRunner().invoke(build(["rollouts"]), [*words, "--agent", agent])
        assert done.exit_code == 0, done.output
        (outcome,) = json.loads(done.stdout)
        assert outcome["reward"] == reward
