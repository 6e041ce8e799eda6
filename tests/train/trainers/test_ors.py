"""The Open Reward Standard with its own SDK, as it is on PyPI; `make test-trainers` sets its environment up."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ors", reason="it has an environment of its own: make test-trainers")

from typer.testing import CliRunner

from openenv import MCPToolClient, create_app
from openenv.adapters.ors import ServedORS, ors_environment
from openenv.cli.__main__ import build
from openenv.client.task_client import TaskClient
from openenv.errors import ExecutionError
from openenv.packaging.validate.rules import Level
from openenv.packaging.validate.runner import run_validation
from openenv.protocol.tool_messages import CallToolAction, ListToolsAction, ToolErrorType
from openenv.testing import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SOURCE = Path(__file__).parent / "packages" / "ors_sums"
SNIPPETS = Path(__file__).parents[3] / "docs_src"


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> type[ServedORS]:
    monkeypatch.syspath_prepend(str(SOURCE))
    source = import_module("sums").Sums
    source.ended.clear()
    return ors_environment(source)


@pytest.fixture
def url(sums: type[ServedORS]) -> Iterator[str]:
    app = create_app(
        sums,
        sums.action_cls,
        sums.observation_cls,
        reset_observation_cls=sums.reset_observation_cls,
        env_name="sums",
        max_concurrent_envs=8,
    )
    with serve(app) as served:
        yield served.url


def call(name: str, **arguments: Any) -> CallToolAction:
    return CallToolAction(tool_name=name, arguments=arguments)


def test_an_episode_is_a_task_whose_tools_pay(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as env, MCPToolClient(base_url=url).sync() as other:
        first = env.reset(split="test", index=0).observation
        assert (first.prompt, first.split, first.index) == ("What is 7 + 8?", "test", 0)
        assert first.blocks[1] == {"type": "image", "data": "AAAA", "mimeType": "image/png"}
        assert other.reset(seed=4).observation.prompt == "What is 3 + 4?"  # of train, 4 modulo 3
        assert [tool.name for tool in env.list_tools()] == ["crash", "submit"]
        assert [tool.name for tool in other.list_tools()] == ["crash", "submit", "peek"]
        wrong = env.step(call("submit", answer=3))
        assert (wrong.reward, wrong.done, wrong.observation.result["data"]) == (0.0, False, "wrong")
        assert wrong.metadata == {"tries": 1}
        right = env.step(call("submit", answer=15))
        assert (right.reward, right.done) == (1.0, True)
        assert other.step(call("peek")).reward == -0.5
        assert env.state().step_count == 2
        with pytest.raises(ExecutionError, match="reset begins one"):
            env.step(call("submit", answer=15))
        assert env.reset(task_spec={"one": 20, "other": 1}).observation.prompt == "What is 20 + 1?"
        assert env.call_tool("submit", answer=21) == "right"


def test_what_a_tool_refuses_is_an_error_of_its_kind_and_the_episode_goes_on(url: str) -> None:
    with MCPToolClient(base_url=url).sync() as env:
        with pytest.raises(ExecutionError, match="reset begins an episode"):
            env.step(call("submit", answer=1))
        env.reset(seed=0)
        errors = [env.step(action).observation.error for action in (call("nope"), call("submit"), call("crash"))]
        assert [error.error_type for error in errors] == [
            ToolErrorType.TOOL_NOT_FOUND,
            ToolErrorType.INVALID_ARGS,
            ToolErrorType.EXECUTION_ERROR,
        ]
        assert "crash, submit" in errors[0].message
        assert "the disk is full" in errors[2].message
        assert env.step(call("submit", answer=3)).reward == 1.0


def test_tasks_are_a_catalogue(url: str, sums: type[ServedORS]) -> None:
    with TaskClient(url) as tasks:
        assert tasks.splits() == [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]
        assert tasks.num_tasks("train") == 3
        assert tasks.task("test", 0) == {"one": 7, "other": 8}
    env = sums()
    try:
        assert env.get_task_range("train", -2) == [{"one": 3, "other": 4}, {"one": 5, "other": 6}]
        with pytest.raises(IndexError, match="has 1 tasks"):
            env.get_task("test", 1)
        with pytest.raises(ValueError, match="train, test"):
            env.reset(split="dev")
        with pytest.raises(ValueError, match="not both"):
            env.reset(task_spec={"one": 1}, split="test")
        assert [tool.name for tool in env.step(ListToolsAction()).tools] == ["crash", "submit"]
    finally:
        env.close()


def test_every_episode_is_torn_down_once(sums: type[ServedORS]) -> None:
    env = sums()
    env.reset(split="test")
    env.reset(split="train", index=2)
    assert sums.source.ended == ["{'one': 7, 'other': 8}"]
    env.close()
    env.close()
    assert sums.source.ended[1:] == ["{'one': 5, 'other': 6}"]


def test_the_snippet_of_the_page() -> None:
    env = runpy.run_path(str(SNIPPETS / "serve_ors.py"))["SumsEnvironment"]()
    try:
        assert env.reset(seed=1).prompt == "What is 3 + 4?"
        assert env.step(call("submit", answer=7)).reward == 1.0
    finally:
        env.close()


def test_only_classes_of_ors_are_taken() -> None:
    with pytest.raises(TypeError, match="list_splits"):
        ors_environment(dict)


def test_an_imported_package_is_served_tested_and_valid(tmp_path: Path) -> None:
    done = CliRunner().invoke(build(["import"]), ["import", str(SOURCE), "-n", "sums_env", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "sums_env"
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(folder)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert tests.returncode == 0, tests.stdout
    (folder / "validation").mkdir()
    plan = '{"actions": [{"type": "call_tool", "tool_name": "submit", "arguments": {"answer": 1}}]}'
    (folder / "validation" / "runtime.json").write_text(plan)
    report = run_validation(folder, max_level=Level.RUNTIME)
    failed = {result.check_id for result in report.results if result.status.value in ("fail", "error")}
    assert failed == set()
    assert report.manifest is not None
    assert report.manifest.capabilities.declared_tools == ["crash", "submit"]  # `peek` is a tool of some tasks only
