"""Served environments and rollouts in Inspect AI as it is on PyPI; `make test-inspect` sets its environment up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slow_steps import take

pytest.importorskip("inspect_ai", reason="it has an environment of its own: make test-inspect")

from inspect_ai import eval as run_eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes

from asking_agent import AskingAgent
from environments import Shelf
from gridworld_env import GridworldAction, GridworldEnv
from gridworld_env.server.app import app as gridworld_app
from guess_environment import Guess, Hint, Word
from inspect_models import mock
from openenv import GenericEnvClient, create_app
from openenv.adapters.inspect.tasks import InspectTask, env_reward, play_env, rollout, run_agent, served_env
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.rollout import RolloutStore
from openenv.rollout.agents.builtin import Shell
from openenv.sandboxes.local import LocalSandboxes
from openenv.testing import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = """
instruction: Write the word hello into greeting.txt.
solution: echo hello > greeting.txt
verify:
  - grep -qx 'hello' greeting.txt
"""


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=8)) as served:
        yield served.url


@pytest.fixture(scope="module")
def gridworld() -> Iterator[str]:
    with serve(gridworld_app) as served:
        yield served.url


@pytest.fixture
def hello(tmp_path: Path) -> str:
    path = tmp_path / "hello.yaml"
    path.write_text(HELLO)
    return str(path)


def evaluate(task: InspectTask, model: Any, tmp_path: Path, **options: Any) -> Any:
    """Run an evaluation and return its log."""
    [log] = run_eval(task, model=model, log_dir=str(tmp_path / "logs"), display="none", **options)
    return log


def outcome_of(sample: Any) -> dict[str, Any]:
    return sample.store["openenv"]["outcome"]


def events_of(sample: Any, kind: str) -> list[Any]:
    return [event for event in sample.events if event.event == kind]


def test_the_reward_of_an_episode_is_the_score(guess: str, tmp_path: Path) -> None:
    log = evaluate(served_env(guess, seeds=1, system="Guess."), mock(["no", "yes"]), tmp_path)
    assert log.status == "success"
    [sample] = log.samples
    assert sample.id == "seed-0"
    assert sample.scores["env_reward"].value == 0.75
    assert sample.messages[1].text.endswith("Begin 0.")
    assert [message.text for message in (sample.messages[0], *sample.messages[2:])] == [
        *("Guess.", "no", "no is wrong.", "yes", "yes is wrong.")
    ]
    assert outcome_of(sample)["status"] == "ok"
    assert len(events_of(sample, "model")) == 2
    steps = [event.data for event in events_of(sample, "info")]
    assert [(step["action"], step["reward"], step["done"]) for step in steps] == [
        ({"text": "no"}, -0.25, False),
        ({"text": "yes"}, 1.0, True),
    ]


def test_gridworld_pays_what_the_same_moves_pay(gridworld: str, tmp_path: Path) -> None:
    log = evaluate(served_env(gridworld, seeds=3, max_turns=4), mock(['{"move": "right"}']), tmp_path)
    assert log.status == "success"
    expected = []
    for seed in range(3):
        with GridworldEnv(gridworld).sync() as env:
            result = env.reset(seed=seed)
            total = 0.0
            for _ in range(4):
                if not result.done:
                    result = env.step(GridworldAction(move="right"))
                    total += result.reward or 0.0
            expected.append(total)
    by_id = {sample.id: sample.scores["env_reward"].value for sample in log.samples}
    assert [by_id[f"seed-{seed}"] for seed in range(3)] == pytest.approx(expected)
    assert log.results.scores[0].metrics["mean"].value == pytest.approx(sum(expected) / 3)


def test_arguments_of_reset_are_samples(guess: str, tmp_path: Path) -> None:
    resets = [{"seed": 7}, {"seed": 8, "episode_id": "mine"}]
    log = evaluate(served_env(guess, resets=resets, reward="last"), mock(["no", "yes"] * 2), tmp_path, max_samples=1)
    assert {sample.id: sample.messages[0].text.splitlines()[-1] for sample in log.samples} == {
        "seed-7": "Begin 7.",
        "mine": "Begin 8.",
    }
    assert {sample.scores["env_reward"].value for sample in log.samples} == {1.0}


def test_tools_of_an_environment_are_tools_of_the_model(tmp_path: Path) -> None:
    answers = [("put", {"item": "cup"}), ("put", {}), ("nothing", {}), ("drop", {}), "I am done."]
    with serve(create_app(Shelf, CallToolAction, CallToolObservation)) as served:
        log = evaluate(served_env(served.url), mock(answers), tmp_path)
    assert log.status == "success", log.error
    [sample] = log.samples
    first = events_of(sample, "model")[0]
    assert [tool.name for tool in first.tools] == ["put", "drop"]
    assert list(first.tools[0].parameters.properties) == ["item"]
    results = [message for message in sample.messages if message.role == "tool"]
    assert (results[0].function, results[0].text) == ("put", "1")
    assert [message.text.startswith("Error:") for message in results] == [False, True, True, True]
    assert outcome_of(sample)["status"] == "ok"
    assert sample.output.completion == "I am done."


def test_an_answer_that_is_no_action_costs_a_turn(gridworld: str, tmp_path: Path) -> None:
    answers = ["I would go up.", '{"move": "sideways"}', '{"move": "up"}']
    log = evaluate(served_env(gridworld, max_turns=3), mock(answers), tmp_path)
    [sample] = log.samples
    replies = [message.text for message in sample.messages if message.role == "user"][1:]
    assert replies[0].startswith("Answer with one JSON object with these fields:\n- move (")
    assert replies[1].startswith("Error:")
    assert outcome_of(sample)["status"] == "truncated"
    assert sample.scores["env_reward"].metadata["status"] == "truncated"


def test_an_environment_that_breaks_is_an_error_and_no_score(guess: str, tmp_path: Path) -> None:
    def answer(messages: list[Any]) -> str:
        return "crash" if messages[0].text.endswith("Begin 0.") else "yes"

    log = evaluate(served_env(guess, seeds=2), mock(answer), tmp_path, fail_on_error=False)
    samples = {sample.id: sample for sample in log.samples}
    broken = samples["seed-0"]
    assert "broken" in broken.error.message
    assert not broken.scores
    assert outcome_of(broken)["status"] == "env_failed"
    assert outcome_of(broken)["reward"] is None
    assert log.results.scores[0].metrics["mean"].value == 1.0  # of the other one alone


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with serve(create_app(Guess, Word, Hint)) as served:
        url = served.url
    log = evaluate(served_env(url), mock(["yes"]), tmp_path)
    assert log.status == "error"
    assert "Is the server running?" in log.error.message
    assert not log.samples[0].scores


def test_a_server_that_goes_away_in_an_episode_is_an_error(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serve(create_app(Guess, Word, Hint)))

        def answer(messages: list[Any]) -> str:
            if len(messages) > 1:
                stack.close()
            return "no"

        log = evaluate(served_env(served.url), mock(answer), tmp_path)
    assert log.status == "error"
    [sample] = log.samples
    assert not sample.scores
    assert outcome_of(sample)["status"] == "env_failed"


def test_a_limit_of_inspect_ends_the_episode_with_its_reward(guess: str, tmp_path: Path) -> None:
    log = evaluate(served_env(guess), mock(["no"]), tmp_path, token_limit=20)
    [sample] = log.samples
    assert sample.limit.type == "token"
    assert outcome_of(sample)["status"] == "truncated"
    assert sample.scores["env_reward"].value < 0


def test_what_a_provider_raises_is_an_error(guess: str, tmp_path: Path) -> None:
    log = evaluate(served_env(guess), mock([ValueError("no such model")]), tmp_path)
    assert log.status == "error"
    assert "no such model" in log.samples[0].error.message


def test_sessions_are_closed_after_an_evaluation(tmp_path: Path) -> None:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=2)) as served:
        evaluate(served_env(served.url, seeds=6), mock(["yes"]), tmp_path, max_samples=2)
        with GenericEnvClient(served.url).sync() as client:
            assert client.reset(seed=1).observation["hint"] == "Begin 1."


def test_samples_wait_for_a_session(tmp_path: Path) -> None:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=1)) as served:
        log = evaluate(served_env(served.url, seeds=4), mock(["yes"]), tmp_path, max_samples=4)
        assert log.status == "success", log.error
        assert [sample.scores["env_reward"].value for sample in log.samples] == [1.0] * 4
        with serve(create_app(Guess, Word, Hint, max_concurrent_envs=1)) as full:
            with GenericEnvClient(full.url).sync() as client:
                client.reset()
                log = evaluate(served_env(full.url, wait_s=0.2), mock(["yes"]), tmp_path)
    assert log.status == "error"
    assert not log.samples[0].scores


def test_a_server_that_does_not_answer_in_time_earns_no_score(tmp_path: Path) -> None:
    with serve(create_app(Slow, Word, Hint, max_concurrent_envs=1)) as served:
        log = evaluate(served_env(served.url), mock(["yes"]), tmp_path, time_limit=2)
        with GenericEnvClient(served.url, wait_s=20).sync() as client:  # the session is free again
            assert client.reset(seed=3).observation["hint"] == "Begin 3."
    [sample] = log.samples
    assert sample.limit.type == "time"
    assert math.isnan(sample.scores["env_reward"].value)
    assert outcome_of(sample)["status"] == "env_failed"


class Slow(Guess):
    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        take(4)
        return Hint(reward=1.0, done=True)


def test_values_out_of_range_are_refused(guess: str, hello: str) -> None:
    with pytest.raises(ValueError, match="seeds"):
        served_env(guess, seeds=0)
    with pytest.raises(ValueError, match="max_turns"):
        play_env(guess, max_turns=0)


# -- rollouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("noop", 0.0)])
def test_agents_without_a_model_bound_what_a_task_pays(agent: str, reward: float, hello: str, tmp_path: Path) -> None:
    log = evaluate(rollout(hello, agent=agent), mock(["unused"]), tmp_path)
    assert log.status == "success", log.error
    [sample] = log.samples
    assert sample.id == "hello"
    assert sample.scores["env_reward"].value == reward
    assert "grep -qx" in sample.scores["env_reward"].explanation
    assert sample.scores["env_reward"].metadata["trust"] == "isolated"


def test_an_agent_in_a_sandbox_asks_the_model_of_the_evaluation(tmp_path: Path) -> None:
    task = tmp_path / "ask.yaml"
    task.write_text("instruction: Ask until done.\nverify:\n  - grep -qx 'done now' answers.txt\n")
    store = tmp_path / "store"
    log = evaluate(
        rollout([str(task)], agent=AskingAgent(), store=str(store)), mock(["first", "second", "done now"]), tmp_path
    )
    assert log.status == "success", log.error
    [sample] = log.samples
    assert sample.scores["env_reward"].value == 1.0
    assert [message.text for message in sample.messages] == [
        *("Ask until done.", "first", "result 0", "second", "result 1", "done now")
    ]
    assert sample.output.completion == "done now"
    assert len(events_of(sample, "model")) == 3
    assert sample.model_usage["mockllm/model"].output_tokens == 15
    with RolloutStore(store) as opened:
        [row] = opened.find()
        assert (row.rollout_id, row.reward) == (outcome_of(sample)["rollout_id"], 1.0)
        assert len(opened.get(row.rollout_id).outcome.turns) == 3


def test_a_folder_of_tasks_is_a_dataset(hello: str, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.yaml").write_text(HELLO)
    (folder / "notes.txt").write_text("no task")
    log = evaluate(rollout(str(folder), agent="oracle"), mock(["unused"]), tmp_path, epochs=2, max_samples=2)
    assert sorted((sample.id, sample.epoch) for sample in log.samples) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_model_that_fails_ends_the_rollout_with_its_error(hello: str, tmp_path: Path) -> None:
    log = evaluate(rollout(hello, agent=AskingAgent()), mock([ValueError("out of credit")]), tmp_path)
    assert log.status == "error"
    [sample] = log.samples
    assert "out of credit" in sample.error.message
    assert not sample.scores
    assert LocalSandboxes().leftovers() == []


def test_at_a_limit_of_inspect_the_agent_ends_and_its_work_counts(tmp_path: Path) -> None:
    task = tmp_path / "ask.yaml"
    task.write_text("instruction: Ask until done.\nverify:\n  - grep -qx 'again' answers.txt\n")
    log = evaluate(rollout(str(task), agent=AskingAgent()), mock(["again"]), tmp_path, token_limit=12)
    [sample] = log.samples
    assert sample.error is None
    assert sample.limit.type == "token"
    assert sample.scores["env_reward"].value == 1.0
    assert outcome_of(sample)["status"] == "truncated"


def test_a_time_limit_of_inspect_ends_an_episode_with_its_reward(guess: str, tmp_path: Path) -> None:
    async def answer(messages: list[Any]) -> str:
        if len(messages) > 2:
            await asyncio.Event().wait()
        return "no"

    log = evaluate(served_env(guess), mock(answer), tmp_path, time_limit=2)
    [sample] = log.samples
    assert sample.limit.type == "time"
    assert sample.scores["env_reward"].value == -0.25


def test_a_time_limit_of_inspect_ends_the_agent_and_frees_its_sandbox(hello: str, tmp_path: Path) -> None:
    backend, before = LocalSandboxes(), set(threading.enumerate())
    sleeper = Shell(["sleep 200"])
    log = evaluate(rollout(hello, agent=sleeper, sandbox=backend), mock(["unused"]), tmp_path, time_limit=3)
    [sample] = log.samples
    assert sample.limit.type == "time"
    assert sample.error is None
    assert math.isnan(sample.scores["env_reward"].value)
    assert sample.scores["env_reward"].reason == "cancelled"
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith(("server-", "openenv-rollout"))]
    assert backend.leftovers() == []


def test_opencode_works_with_the_model_of_the_evaluation(hello: str, tmp_path: Path) -> None:
    def answer(messages: list[Any]) -> Any:
        if messages[-1].role == "tool":
            return "It is written."
        return ("write", {"filePath": "/home/user/workdir/greeting.txt", "content": "hello\n"})

    log = evaluate(rollout(hello, agent="opencode"), mock(answer), tmp_path)
    assert log.status == "success", log.error
    [sample] = log.samples
    assert sample.scores["env_reward"].value == 1.0
    assert [message.role for message in sample.messages][-3:] == ["assistant", "tool", "assistant"]
    assert sample.output.completion == "It is written."


def test_infrastructure_that_fails_is_an_error_and_no_score(tmp_path: Path) -> None:
    task = tmp_path / "setup.yaml"
    task.write_text("instruction: Do nothing.\nsetup: exit 3\nverify: test -e x\n")
    log = evaluate(rollout(str(task), agent="noop"), mock(["unused"]), tmp_path, fail_on_error=False)
    [sample] = log.samples
    assert "env_failed: " in sample.error.message
    assert not sample.scores
    assert outcome_of(sample)["reward"] is None


def test_our_agents_solve_samples_of_other_tasks(tmp_path: Path) -> None:
    foreign = InspectTask(
        dataset=MemoryDataset([Sample(input="Say done.", target="done")]),
        solver=run_agent(AskingAgent()),
        scorer=includes(),
    )
    log = evaluate(foreign, mock(["done"]), tmp_path)
    assert log.status == "success", log.error
    assert log.samples[0].scores["includes"].value == "C"


def test_the_scorer_needs_one_of_our_solvers(tmp_path: Path) -> None:
    foreign = InspectTask(dataset=MemoryDataset([Sample(input="Say done.")]), scorer=env_reward())
    log = evaluate(foreign, mock(["done"]), tmp_path)
    assert log.status == "error"
    assert "openenv/play_env" in log.error.message


def test_outcomes_in_logs_are_plain_json(guess: str, tmp_path: Path) -> None:
    log = evaluate(served_env(guess), mock(["yes"]), tmp_path)
    assert json.loads(json.dumps(log.samples[0].store["openenv"]))["task"]["task_id"] == "seed-0"
