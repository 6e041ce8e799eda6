"""A server of Harbor's tasks and its client; rollouts here end before a container starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from harbor_folders import write_task
from openenv.adapters.harbor.capabilities import capabilities, check_sandbox, load_env_file, prepare
from openenv.adapters.harbor.client import HarborEnv, HarborRolloutResult
from openenv.adapters.harbor.environment import HarborEnvironment, is_private
from openenv.adapters.harbor.options import HarborPermissions
from openenv.adapters.harbor.rollout import run_rollout
from openenv.adapters.harbor.runner import run_batch
from openenv.adapters.harbor.serving import HarborService, build_app, space_public_url
from openenv.cli.__main__ import build
from openenv.testing import ScriptedModel, serve
from openenv.testing.scripted import Script, Turn


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_task(tmp_path / "data" / "tasks" / name, instruction=f"Do {name}.")
    return tmp_path / "data"


@pytest.fixture
def served(dataset: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Serve the dataset; the capture server and everything else ends with the test."""
    with ExitStack() as stack:

        def start(options: HarborPermissions | None = None, **service: Any) -> str:
            running = HarborService(datasets=[str(dataset)], capture_port=0, **service)
            running.start()
            stack.callback(running.stop)
            HarborService.set_current(running)
            app = build_app(datasets=[str(dataset)], options=options, trials_dir=tmp_path / "trials")
            stack.callback(HarborEnvironment.configure, datasets=())
            return stack.enter_context(serve(app)).url

        yield start


def test_a_client_lists_tasks_and_gets_results_of_rollouts_that_fail(served: Callable[..., str], dataset: Path) -> None:
    with HarborEnv(base_url=served()) as env:
        (split,) = env.splits()
        assert (split["name"], split["num_tasks"]) == (str(dataset), 2)
        assert env.num_tasks(str(dataset)) == 2
        assert env.get_task(str(dataset), 1).instruction == "Do two."
        assert [task.task_name for task in env.get_task_range(str(dataset), 0, 9)] == ["one", "two"]
        env.reset()
        result: Any = env.run_rollout(harness="nop", sandbox="local", task_index=1)
        assert isinstance(result, HarborRolloutResult)
        assert not result.ok
        assert "local starts no images" in str(result.error)
        assert (result.task_name, result.reward, result.exception_type) == ("two", None, "SandboxUnsupported")
        state: Any = env.state()
        assert (state.rollouts_completed, state.last_trial_name) == (1, result.trial_name)
        missing: Any = env.run_rollout(task_index=7)
        assert "out of range" in str(missing.error)
        about: Any = env.capabilities()
        assert {harness["name"] for harness in about["harnesses"]} >= {"opencode", "oracle", "nop"}
    assert HarborService.current() is not None


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        (HarborPermissions(runs_rollouts=False), {}, "--no-rollouts"),
        (HarborPermissions(shares_endpoint=False), {}, "--no-share-endpoint"),
        (HarborPermissions(takes_endpoints=False), {"llm_url": "http://x/v1"}, "--no-visitor-endpoints"),
        (HarborPermissions(takes_private_urls=False), {"llm_url": "http://127.0.0.1:1/v1"}, "--no-private-urls"),
    ],
)
def test_callers_may_do_what_the_options_say(
    served: Callable[..., str], options: HarborPermissions, arguments: dict[str, Any], words: str
) -> None:
    with HarborEnv(base_url=served(options)) as env:
        result: Any = env.run_rollout(harness="nop", **arguments)
    assert words in str(result.error)


def test_pages_of_other_sites_start_nothing(served: Callable[..., str]) -> None:
    url = served()
    with httpx2.Client(base_url=url) as client:
        refused = client.post("/web/reset", headers={"Origin": "http://elsewhere.example"})
        assert refused.status_code == 403
        own = client.post("/web/reset", headers={"Origin": url})
        assert own.status_code != 403


def test_arguments_that_mean_nothing_here_are_refused(dataset: Path, tmp_path: Path) -> None:
    service = HarborService(datasets=[str(dataset)], capture_port=0)
    service.start()

    def run(**arguments: Any) -> HarborRolloutResult:
        folder = dataset / "tasks" / "one"
        options: dict[str, Any] = {"harness": "nop", "sandbox": "docker", "task_dir": folder, **arguments}
        return asyncio.run(
            run_rollout(
                registry=service.capture.registry,
                intercept_url=service.capture.url,
                model="m",
                trials_dir=tmp_path / "trials",
                **options,
            )
        )

    try:
        assert "always closed" in str(run(keep_sandbox=True).error)
        assert "no profile" in str(run(harness_profile="x").error)
        assert "no harness" in str(run(harness="nothing").error)
        assert "eval purpose cannot" in str(run(purpose="eval", sampling={"temperature": 1.0}).error)
        assert "builds no images" in str(run(force_build=True, sandbox="local").error)
        assert "task.toml is missing" in str(run(task_dir=tmp_path).error)
        assert service.capture.registry.list_ids() == []
    finally:
        service.stop()


def test_what_can_run_here_is_shown_with_what_is_missing(dataset: Path, tmp_path: Path) -> None:
    assert not check_sandbox("local").available
    assert "starts no images" in check_sandbox("local").detail
    assert "unknown sandbox backend" in check_sandbox("nothing").detail
    found = capabilities(datasets=[str(dataset)], sandboxes=["local"])
    assert found.datasets[0]["num_tasks"] == 2
    assert "[--]  local" in found.render()
    assert "runs the task's solution" in found.render(verbose=True)
    with ScriptedModel(Script(name="m", turns=(Turn(text="hi"),) * 20)) as server:
        lines: list[str] = []
        ready = prepare(llm_url=server.model()["base_url"], datasets=[], sandboxes=(), report=lines.append)
        assert ready.llm["model"] == "scripted/m"
        assert "llm       scripted/m" in lines[0]
    with pytest.raises(RuntimeError, match="not usable"):
        prepare(llm_url="http://127.0.0.1:9/v1", model="m", datasets=[], sandboxes=(), quiet=True)
    with pytest.raises(RuntimeError, match="no LLM URL"):
        prepare(datasets=[], quiet=True)


def test_a_file_of_variables_sets_what_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST_A", "mine")
    monkeypatch.setenv("HARBOR_TEST_B", "x")
    monkeypatch.delenv("HARBOR_TEST_B")
    (tmp_path / "env").write_text("# note\nHARBOR_TEST_A=file\nexport HARBOR_TEST_B='two words'\nno line\n")
    assert load_env_file(tmp_path / "env") == ["HARBOR_TEST_B"]
    assert load_env_file(tmp_path / "env") == []
    with pytest.raises(OSError, match="nowhere"):
        load_env_file(tmp_path / "nowhere")


def test_a_space_knows_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert space_public_url() == ""
    monkeypatch.setenv("SPACE_ID", "Me/my_space.x")
    assert space_public_url() == "https://me-my-space-x.hf.space"
    monkeypatch.setenv("SPACE_HOST", "me.hf.space")
    assert space_public_url() == "https://me.hf.space"
    assert not HarborPermissions.of(is_local=False).keeps_rollouts
    assert is_private("http://127.0.0.1/v1")
    assert not is_private("http://8.8.8.8/v1")


def test_the_command_line_says_what_is_wrong(dataset: Path, tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(build(["harbor"]), ["harbor", *words])
        return done.exit_code, done.output

    code, text = run("info", "--dataset", str(dataset), "--json")
    assert code == (0 if any(one["available"] for one in json.loads(text)["sandboxes"]) else 1)
    assert json.loads(text)["datasets"][0]["num_tasks"] == 2
    code, text = run("info", "--dataset", str(tmp_path / "none"))
    assert (code, "unknown dataset" in text) == (1, True)
    assert run("rollout", "--dataset", str(dataset))[1].startswith("Error: no LLM URL given")
    code, text = run("rollout", "--dataset", str(dataset), "--harness", "oracle", "--task-index", "9")
    assert (code, "none of index 9" in text) == (1, True)
    assert "give exactly one --dataset" in run("rollout", "--harness", "oracle")[1]
    assert "give at least one --dataset" in run("serve")[1]
    assert "leave --hf-login out" in run("push", "--hf-login")[1]
    assert "a Space has no folders" in run("push", "--repo-id", "a/b", "--dataset", str(dataset), "--dry-run")[1]
    (tmp_path / "env").write_text("KUBECONFIG_TEXT=very-secret\n")
    code, text = run(
        *("push", "--repo-id", "me/some-tasks", "--dataset", "me/data", "--env-file", str(tmp_path / "env")),
        *("--dry-run", "--no-rollouts", "--api-key", "also-secret"),
    )
    assert code == 0
    assert "secret KUBECONFIG_TEXT" in text
    assert "secret OPENENV_LLM_API_KEY" in text
    assert "-secret" not in text
    assert '"--no-rollouts"' in text
    assert "variable OPENENV_DATASETS=me/data" in text


def test_a_batch_names_the_tasks_that_are_not_there(dataset: Path) -> None:
    with pytest.raises(IndexError, match="has 2 tasks"):
        asyncio.run(run_batch(llm_url="", dataset=str(dataset), task_indices=[5], harness="nop", port=0))
