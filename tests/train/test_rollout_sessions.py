"""Rollouts as sessions of a trainer's harness: exact tokens, the checks' reward, and no sample of what broke."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from asking_agent import AskingAgent
from openenv.errors import RolloutError
from openenv.rollout import Model, Task
from openenv.rollout.run.agent_sessions import TrainableSession
from openenv.rollout.tasks.model_parameters import training_sampling
from openenv.sandboxes.base import Sandboxes
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train.rollout_sessions import RolloutSession, RolloutSessionFactory

TASKS = [
    Task(instruction="Say done.", verify=("grep -q done answers.txt",), agent_timeout_s=30),
    Task(instruction="Fail.", setup=("exit 3",), agent_timeout_s=30),
]


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel(Script(name="talker", turns=(Turn(text="not yet"),), ending="done")) as server:
        yield server


@pytest.fixture
def factory(model: ScriptedModel, local: Sandboxes) -> Iterator[RolloutSessionFactory]:
    made = RolloutSessionFactory(
        TASKS,
        model=Model(**model.model()),
        sampling=training_sampling({"temperature": 0.5}),
        agent=AskingAgent(),
        sandbox=local,
    )
    yield made
    made.close()


def session_of(factory: RolloutSessionFactory, text: str, **options: Any) -> RolloutSession:
    return factory.create([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}], **options)


def test_a_session_has_the_tokens_and_the_reward(factory: RolloutSessionFactory, model: ScriptedModel) -> None:
    session = session_of(factory, "Say done.", seed=3, episode_id="first")
    assert isinstance(session, TrainableSession)
    assert session.wait_for_completion() == 0
    trace = session.fetch_training_trace()
    played = [call for call in model.played() if call.finished]
    assert [turn.completion_token_ids for turn in trace.turns] == [call.token_ids for call in played]
    assert [turn.prompt_token_ids for turn in trace.turns] == [call.prompt_ids for call in played]
    assert [turn.per_token_logps for turn in trace.turns] == [pytest.approx(call.logprobs) for call in played]
    assert {turn.request["temperature"] for turn in trace.turns} == {0.5}  # the trainer's; the agent asks for 0.1
    verdict = session.verify([])
    assert (verdict.env_reward, verdict.metrics["status"]) == (1.0, "ok")
    session.close()
    assert not list(factory._shared.captures.iterdir())  # type: ignore[union-attr]


def test_a_system_message_that_the_agent_does_not_get_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    factory = RolloutSessionFactory([Task(instruction="Sleep.")], model=Model(base_url="http://localhost:1", name="m"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no task"):
            session_of(factory, "Something else.")
    assert caplog.messages == [
        "Agents do not get the system message of a prompt: move it to the instruction of the task"
    ]


def test_what_breaks_is_no_sample(factory: RolloutSessionFactory) -> None:
    session = session_of(factory, "Fail.")
    with pytest.raises(RolloutError, match="failed"):
        session.wait_for_completion()
    assert session.verify([]).env_reward is None
    session.close()
    with pytest.raises(ValueError, match="no task"):
        session_of(factory, "Something else.")


def test_a_session_that_is_closed_ends_its_rollout(factory: RolloutSessionFactory) -> None:
    session = session_of(factory, "Say done.")
    with pytest.raises(RuntimeError, match="has not ended"):
        session.fetch_training_trace()
    session.close()
    assert session.verify([]).metrics["status"] == "cancelled"


def test_a_factory_can_be_pickled_before_its_first_session(local: Sandboxes) -> None:
    model = Model(base_url="http://127.0.0.1:1/v1", name="policy")
    make = pickle.loads(pickle.dumps(partial(RolloutSessionFactory, TASKS, model=model, agent="opencode")))
    assert isinstance(make(sampling={"temperature": 1.0}), RolloutSessionFactory)
    with pytest.raises(ValueError, match="two tasks"):
        RolloutSessionFactory([TASKS[0], TASKS[0]], model=model)
    with pytest.raises(ValueError, match="no task"):
        RolloutSessionFactory([], model=model)
