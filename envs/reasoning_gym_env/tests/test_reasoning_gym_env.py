"""The Reasoning Gym environment: questions, answers and tasks, and the package as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make test-envs")

from openenv import LocalEnv
from openenv.errors import ExecutionError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served
from reasoning_gym_env import ReasoningGymAction, ReasoningGymEnv, ReasoningGymObservation, ReasoningGymState
from reasoning_gym_env.server.app import app
from reasoning_gym_env.server.questions import DatasetChoice, dataset_names, make_dataset
from reasoning_gym_env.server.reasoning_gym_environment import ReasoningGymEnvironment

pytest_plugins = ["openenv.testing.plugin"]


@pytest.fixture
def env() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process."""
    with LocalEnv(ReasoningGymEnvironment).sync() as local:
        yield local


def answer_of(env: SyncLocalEnv[Any, Any, Any]) -> str:
    """Return a right answer to the question that is asked."""
    state = env.state()
    dataset = make_dataset(DatasetChoice(state.dataset_name, seed=state.seed, size=state.size))
    return str(dataset[state.index]["answer"])


@pytest.mark.parametrize("form", ["{}", "<think>7 legs?</think> <answer> {} </answer>"])
def test_a_right_answer_earns_one_and_ends_the_episode(env: SyncLocalEnv[Any, Any, Any], form: str) -> None:
    begun = env.reset(seed=3).observation
    assert "legs" in begun.question
    assert (begun.score, begun.correct_answer, begun.dataset_metadata) == (None, None, None)
    right = answer_of(env)
    result = env.step(ReasoningGymAction(answer=form.format(right)))
    assert (result.reward, result.done, result.observation.terminated) == (1.0, True, True)
    assert result.observation.correct_answer == right
    assert result.observation.dataset_metadata["source_dataset"] == "leg_counting"
    with pytest.raises(ExecutionError, match="call reset first"):
        env.step({"answer": right})


def test_a_wrong_answer_earns_nothing(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(seed=3)
    assert env.step({"answer": "no idea"}).reward == 0.0


def test_a_seed_asks_the_same_again_and_a_plain_reset_the_next_one(env: SyncLocalEnv[Any, Any, Any]) -> None:
    first = env.reset(seed=3, size=3).observation.question
    others = [env.reset().observation.question for _ in range(3)]
    assert len({first, *others}) == 3
    assert others[-1] == first  # three questions, then from the beginning
    assert env.reset(seed=3, size=3, index=1).observation.question == others[0]
    assert env.reset(seed=4).observation.question != first


def test_a_reset_chooses_dataset_and_arguments(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(dataset_name="leg_counting", dataset_config={"min_animals": 2, "max_animals": 2}, seed=1)
    assert env.step({"answer": ""}).observation.dataset_metadata["num_animals"] == 2
    specs = [{"name": "leg_counting"}, {"name": "chain_sum", "weight": 3, "config": {"max_terms": 3}}]
    sources = set()
    env.reset(dataset_specs=specs, seed=1, size=40)
    for _ in range(12):
        sources.add(env.step({"answer": ""}).observation.dataset_metadata["source_dataset"])
        env.reset()
    assert sources == {"leg_counting", "chain_sum"}
    assert env.state().dataset_name == "composite"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_name": "leg_count"}, "did you mean leg_counting"),
        ({"dataset_name": "zzz"}, "there is no dataset"),
        ({"dataset_config": {"wings": 2}}, "wings"),
        ({"dataset_config": {"min_animals": -1}}, "must be positive"),
        ({"dataset_name": "leg_counting", "dataset_specs": [{"name": "chain_sum"}]}, "composite"),
        ({"dataset_specs": [{"name": "chain_summ"}]}, "did you mean"),
        ({"dataset_specs": [{"name": "chain_sum", "weight": -1}]}, "Weight"),
        ({"size": -1}, "size must be"),
        ({"seed": 1, "size": 3, "index": 3}, "0 to 2"),
        ({"split": "none"}, "train, test"),
        ({"split": "test", "index": 500}, "0 to 499"),
    ],
)
def test_a_reset_that_is_not_possible_says_why_and_keeps_the_question(
    env: SyncLocalEnv[Any, Any, Any], arguments: dict[str, Any], message: str
) -> None:
    env.reset(seed=3)
    right = answer_of(env)
    with pytest.raises(ExecutionError, match=message):
        env.reset(**arguments)
    assert env.step({"answer": right}).reward == 1.0


def test_nearly_all_datasets_ask_and_score(env: SyncLocalEnv[Any, Any, Any]) -> None:
    names = [name for name in dataset_names() if name not in ("composite", "arc_agi")]  # the latter takes a second
    assert len(names) > 90
    for name in names:
        assert env.reset(dataset_name=name, seed=1, size=2).observation.question
        assert 0.0 <= env.step({"answer": "42"}).reward <= 1.0


def test_the_page_shows_the_question_and_then_the_score(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = ReasoningGymEnvironment()
    assert "&lt;b&gt;" in (world.render_web({"question": "<b>"}) or "")
    assert "Score 0.5" in (world.render_web({"score": 0.5, "correct_answer": "7"}) or "")
    assert world.render_web({}) is None


def test_tasks_are_questions_that_the_splits_do_not_share(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = ReasoningGymEnvironment()
    train, test = world.list_tasks("train"), world.list_tasks("test")
    assert (len(train), len(test)) == (world.num_tasks("train"), world.num_tasks("test")) == (500, 500)
    assert {task["question"] for task in train}.isdisjoint(task["question"] for task in test)
    assert env.reset(split="test", index=7).observation.question == test[7]["question"]
    assert world.get_task("test", 7) == test[7] == world.get_task_range("test", 7, 8)[0]
    with pytest.raises(IndexError):
        world.get_task("test", 500)


def test_the_typed_client_answers_on_a_server(serve_env: Callable[..., Served]) -> None:
    with ReasoningGymEnv(base_url=serve_env(app).url).sync() as env:
        result = env.reset(seed=3)
        assert isinstance(result.observation, ReasoningGymObservation)
        answered = env.step(ReasoningGymAction(answer="1"))
        assert answered.observation.correct_answer
        assert answered.done
        assert isinstance(env.state(), ReasoningGymState)


@pytest.mark.slow
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        return {"answer": str(chance.choice([True, False]))}

    returns = try_package("reasoning_gym_env", choose, dataset_name="propositional_logic")
    assert len(returns) == 100
    assert set(returns) <= {0.0, 0.01, 1.0}
