"""A model plays served environments: rewards, exact tokens, and failures that never become rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

from environments import Idle
from fake_engine import Answer, EngineRequest, FakeEngine, vllm
from openenv import create_app
from openenv.errors import NoRewards, RolloutError
from openenv.rollout import Model
from openenv.rollout.store.store import STEPS_FILE, RolloutStore
from openenv.testing import Script, ScriptedCall, ScriptedModel, StatusFailure, Turn, serve
from openenv.train import Objective, SampleGroup, play
from openenv.types import Action, Observation
from waiting import holds_for_async


class Word(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Guess(Idle):
    """Ends with the word `yes`; each other word costs. In the first `crashes` episodes the word `crash` fails, in the
    first `hangs` the word `hang` does not return."""

    crashes: ClassVar[int] = 0
    hangs: ClassVar[int] = 0
    released: ClassVar[threading.Event] = threading.Event()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        return Hint(hint=f"Begin {seed}.")

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.text == "crash" and type(self).crashes > 0:
            type(self).crashes -= 1
            raise RuntimeError("the environment is broken")
        if action.text == "hang" and type(self).hangs > 0:
            type(self).hangs -= 1
            type(self).released.wait(30)
        if action.text in ("nan", "inf", "-inf"):
            return Hint(reward=float(action.text))
        if action.text == "nothing":
            return Hint(done=True)
        is_right = action.text == "yes"
        return Hint(hint=f"{action.text} is wrong.", reward=1.0 if is_right else -0.25, done=is_right)


def model_of(*turns: Turn) -> ScriptedModel:
    return ScriptedModel(Script(name="player", turns=turns, ending="yes"))


@pytest.fixture
def guess() -> Iterator[str]:
    with serve(create_app(Guess, Word, Hint, max_concurrent_envs=64)) as served:
        yield served.url


def groups_of(url: str, server: ScriptedModel, starts: Any = (1, 2), **options: Any) -> list[SampleGroup]:
    async def collect() -> list[SampleGroup]:
        async with play(url, Model(**server.model()), starts, **{"samples": 2, "concurrency": 4, **options}) as stream:
            return [group async for group in stream]

    return asyncio.run(asyncio.wait_for(collect(), 60))


def test_groups_have_rewards_and_the_tokens_that_were_sampled(guess: str, tmp_path: Path) -> None:
    with model_of(Turn(text="no"), Turn(text="maybe")) as server, RolloutStore(tmp_path) as store:
        groups = sorted(groups_of(guess, server, system="Guess.", store=store), key=lambda group: group.name)
        played = server.played()
        stored = list(store.find())
    assert [(group.name, group.start, group.rewards) for group in groups] == [
        ("seed-1", {"seed": 1}, [0.5, 0.5]),
        ("seed-2", {"seed": 2}, [0.5, 0.5]),
    ]
    assert len(stored) == 4
    sent = {tuple(one.prompt_ids): (one.token_ids, one.logprobs) for one in played}
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.outcome.status == "ok"
        assert sample.outcome.metadata["start"] == groups[0].start or sample.outcome.task_id == "seed-2"
        assert sum(one.n_turns for one in sample.trainable) == 3
        for one in sample.trainable:
            ids, values = sent[tuple(one.input_ids[: -one.turn_lengths[-1]])]
            assert one.input_ids[-one.turn_lengths[-1] :] == ids
            assert one.logprobs[-len(ids) :] == pytest.approx(values)
            assert sum(one.loss_mask) == sum(one.turn_lengths)
        assert list((sample.turn_rewards or {}).values()) == [-0.25, -0.25, 1.0]
    by_turn = groups[0].collate(Objective(credit="turn"))
    assert {turn for row in by_turn.turn_ids for turn in row} == {0, 1, 2, 3}
    assert len(groups[0].collate().input_ids) == sum(len(sample.trainable) for sample in groups[0].samples)


def test_a_stored_episode_has_its_steps_and_its_environment(guess: str, tmp_path: Path) -> None:
    with model_of(Turn(text="no")) as server, RolloutStore(tmp_path) as store:
        (group,) = groups_of(guess, server, [3], samples=1, store=store)
        file = store.live_file(group.samples[0].outcome.rollout_id, STEPS_FILE)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        (listed,) = store.find()
    assert [(row["kind"], row["n"], row.get("action"), row["reward"]) for row in rows] == [
        ("reset", 0, None, None),
        ("step", 1, {"text": "no"}, -0.25),
        ("step", 2, {"text": "yes"}, 1.0),
    ]
    assert (rows[0]["arguments"], rows[0]["observation"]["hint"]) == ({"seed": 3}, "Begin 3.")
    assert listed.environment == "Guess"
    assert "Begin 3." in listed.instruction


class Drawn(Guess):
    """Is drawn, but not at the start."""

    def render_web(self, observation: dict[str, Any]) -> str | None:
        if observation["hint"].startswith("Begin"):
            return None
        return f"<b>{observation['hint']}</b> {observation['reward']} {observation['done']}"


def test_a_stored_episode_has_the_environments_pictures(tmp_path: Path) -> None:
    app = create_app(Drawn, Word, Hint, max_concurrent_envs=4)
    with serve(app) as server, model_of(Turn(text="no")) as model, RolloutStore(tmp_path) as store:
        (group,) = groups_of(server.url, model, [3], samples=1, store=store)
        file = store.live_file(group.samples[0].outcome.rollout_id, STEPS_FILE)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["kind"], row["n"], row.get("html")) for row in rows] == [
        ("reset", 0, None),
        ("step", 1, None),
        ("picture", 1, "<b>no is wrong.</b> -0.25 False"),
        ("step", 2, None),
        ("picture", 2, "<b>yes is wrong.</b> 1.0 True"),
    ]


class Letters(Action):
    text: str = Field(pattern="^[A-F]{4}$")


def test_refused_actions_are_the_reason_of_episodes_without_a_step(tmp_path: Path) -> None:
    app = create_app(Guess, Letters, Hint, max_concurrent_envs=4)
    with serve(app) as server, model_of(*[Turn(text="no")] * 3) as model, RolloutStore(tmp_path) as store:
        with pytest.raises(NoRewards, match=r"no action was accepted: .*text: String should match pattern"):
            groups_of(server.url, model, [1, 2], max_turns=2, store=store)
        assert {row.status for row in store.find()} <= {"truncated", "cancelled"}


def test_an_episode_that_does_not_end_counts_with_its_reward_so_far(guess: str) -> None:
    with model_of(*[Turn(text="no")] * 9) as server:
        (group,) = groups_of(guess, server, [1], max_turns=3)
    assert [sample.outcome.status for sample in group.samples] == ["truncated", "truncated"]
    assert group.rewards == [-0.75, -0.75]


def test_a_failure_of_the_environment_is_played_again_and_never_a_reward(guess: str) -> None:
    Guess.crashes = 3
    with model_of(Turn(text="crash")) as server:
        (group,) = groups_of(guess, server, [1], concurrency=1, retries=2)
    # The first sample failed three times: it has no reward. The second one is right at its second answer.
    assert group.rewards == [None, 0.75]
    assert group.advantages() == [None, 0.0]
    assert [sample.outcome.status for sample in group.failed] == ["env_failed"] * 2
    assert "the environment is broken" in str(group.samples[0].outcome.reason)


@pytest.mark.parametrize("protocol", ["v1", "v2"])
@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_is_a_failure_and_never_a_number(guess: str, reward: str, protocol: str) -> None:
    with model_of(Turn(text="no"), Turn(text=reward)) as server:
        failed: list[SampleGroup] = []
        options = {"retries": 0, "on_failed": failed.append, "client_options": {"protocol": protocol}}
        with pytest.raises(RolloutError, match="finite number"):
            groups_of(guess, server, [1], **options)
    assert failed[0].rewards == [None, None]
    assert {sample.outcome.status for sample in failed[0].samples} == {"env_failed"}


def test_an_environment_that_never_gives_a_reward_stops_the_stream(guess: str) -> None:
    with model_of(Turn(text="nothing")) as server, pytest.raises(NoRewards, match="No reward in 4 episodes"):
        groups_of(guess, server)
    with model_of(Turn(text="nothing")) as server, pytest.raises(NoRewards, match="No reward in 64 episodes"):
        groups_of(guess, server, itertools.count())


def test_a_missing_reward_counts_as_zero_if_the_environment_gives_rewards(guess: str) -> None:
    with model_of(Turn(text="nothing")) as server:
        groups = groups_of(guess, server, gives_rewards=True)
    assert [group.rewards for group in groups] == [[0.0, 0.0]] * 2


def test_a_broken_environment_ends_the_run(guess: str) -> None:
    Guess.crashes = 1000
    try:
        with model_of(Turn(text="crash")) as server, pytest.raises(RolloutError, match="the environment is broken"):
            groups_of(guess, server, range(100), retries=0)
    finally:
        Guess.crashes = 0


def test_an_endpoint_that_fails_is_no_reward_either(guess: str) -> None:
    failing = Turn(text="no", failures=(StatusFailure(status=500, attempts=None),))
    with model_of(failing) as server, pytest.raises(RolloutError, match="the model endpoint answered 5"):
        groups_of(guess, server, range(100), retries=0, concurrency=2)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_refused_because_of_the_policy_ends_the_episode(guess: str, status: int) -> None:
    refusal = StatusFailure(status=status, message="the arguments of a tool call are no JSON", attempts=None)
    with model_of(Turn(text="no"), Turn(text="no", failures=(refusal,))) as server:
        (group,) = groups_of(guess, server, [1])
        asked = [one for one in server.played() if one.status == 200]
    assert [sample.outcome.status for sample in group.samples] == ["truncated", "truncated"]
    assert group.rewards == [-0.25, -0.25]
    assert "no JSON" in str(group.samples[0].outcome.reason)
    assert len(asked) == 4  # two answers, and a fixed request for each refusal


def test_a_refusal_without_an_answer_of_the_policy_is_no_reward(guess: str) -> None:
    refusal = StatusFailure(status=400, message="tools need --enable-auto-tool-choice", attempts=None)
    with model_of(Turn(text="no", failures=(refusal,))) as server, pytest.raises(RolloutError, match="auto-tool-choi"):
        groups_of(guess, server, range(100), retries=0, concurrency=2)


def test_an_endpoint_that_refuses_a_fixed_request_too_is_no_reward(guess: str) -> None:
    answers = itertools.count()

    def respond(request: EngineRequest) -> Answer:
        if next(answers) < 2:
            return vllm([11])(request)
        return Answer.json({"error": {"message": "the model is gone"}}, status=400)

    with FakeEngine(respond) as engine:

        async def failed() -> SampleGroup:
            groups: list[SampleGroup] = []
            options: dict[str, Any] = {"samples": 2, "concurrency": 2, "retries": 0, "on_failed": groups.append}
            with pytest.raises(RolloutError, match=r"and a fixed one, too.*the model is gone"):
                async with play(guess, Model(base_url=engine.url, name="m"), [1], **options) as stream:
                    await anext(aiter(stream))
            return groups[0]

        group = asyncio.run(asyncio.wait_for(failed(), 60))
    assert group.rewards == [None, None]
    assert {sample.outcome.status for sample in group.samples} == {"env_failed"}


def test_without_a_server_it_says_so() -> None:
    with model_of() as server, pytest.raises(RolloutError, match="Is the server running"):
        groups_of("http://127.0.0.1:9", server)


def test_groups_that_are_not_wanted_are_counted(guess: str) -> None:
    async def filtered() -> int:
        with model_of(Turn(text="no")) as server:
            model = Model(**server.model())
            async with play(guess, model, [1, 2], samples=1, keep=lambda group: group.name == "seed-1") as stream:
                names = [group.name async for group in stream]
                assert names == ["seed-1"]
                return stream.counts.filtered_groups

    assert asyncio.run(filtered()) == 1


def test_a_resumed_stream_reads_finished_episodes_and_plays_the_others(guess: str, tmp_path: Path) -> None:
    async def played(starts: list[int], **options: Any) -> tuple[list[SampleGroup], int]:
        with model_of(Turn(text="no")) as server, RolloutStore(tmp_path) as store:
            async with play(guess, Model(**server.model()), starts, samples=2, store=store, **options) as stream:
                return [group async for group in stream], stream.counts.restored

    before, _ = asyncio.run(played([1, 2]))
    after, restored = asyncio.run(played([1, 2, 3], resume=True))
    assert restored == 4
    assert sorted(group.name for group in after) == ["seed-1", "seed-2", "seed-3"]
    first = {group.name: group for group in before}["seed-1"]
    again = {group.name: group for group in after}["seed-1"]
    assert again.rewards == first.rewards
    assert again.collate(Objective(credit="turn")) == first.collate(Objective(credit="turn"))


def test_a_group_does_not_wait_for_episodes_that_it_began_too_many(guess: str, tmp_path: Path) -> None:
    async def play_one() -> tuple[SampleGroup, int]:
        with model_of(Turn(text="hang")) as server, RolloutStore(tmp_path) as store:
            options: dict[str, Any] = {"samples": 2, "oversample": 1, "concurrency": 3, "store": store}
            async with play(guess, Model(**server.model()), [1], **options) as stream:
                (group,) = [group async for group in stream]
                assert [row.status for row in store.find(status="cancelled")] == ["cancelled"]
                return group, stream.counts.surplus

    Guess.hangs = 1
    try:
        group, surplus = asyncio.run(asyncio.wait_for(play_one(), 60))
    finally:
        Guess.released.set()
    assert group.rewards == [0.75, 0.75]
    assert surplus == 1


def test_a_full_server_is_played_with_fewer_sessions() -> None:
    async def counts() -> tuple[int, int]:
        with serve(create_app(Guess, Word, Hint, max_concurrent_envs=2)) as served, model_of() as server:
            model = Model(**server.model())
            options: dict[str, Any] = {"samples": 2, "concurrency": 6}
            async with play(served.url, model, range(20), **options) as stream:
                rewards = [reward async for group in stream for reward in group.rewards]
                assert rewards == [1.0] * 40
                return stream.counts.full, stream.counts.failed

    full, failed = asyncio.run(asyncio.wait_for(counts(), 60))
    assert full > 0
    assert failed == 0


def test_while_paused_no_call_is_made(guess: str) -> None:
    async def calls() -> tuple[int, int]:
        with model_of() as server:
            model = Model(**server.model())
            async with play(guess, model, [1], samples=1) as stream:
                stream.pause()
                await holds_for_async(0.2, lambda: not server.played())
                before = len(server.played())
                stream.resume()
                assert [group.rewards async for group in stream] == [[1.0]]
                return before, len(server.played())

    assert asyncio.run(calls()) == (0, 1)


def test_tools_are_called_until_the_model_answers_without_one() -> None:
    from echo_env.server.app import app

    call = ScriptedCall(name="echo_message", arguments={"message": "hello"})
    with model_of(Turn(calls=(call,)), Turn(text="Done.")) as server, serve(app) as served:
        (group,) = groups_of(served.url, server, [{}], samples=1, gives_rewards=True)
    (sample,) = group.samples
    assert sample.outcome.status == "ok"
    assert len(sample.outcome.turns) == 2


@pytest.mark.parametrize(("options", "text"), [({"samples": 0}, "at least 1"), ({"reward": "mean"}, "'sum' or 'last'")])
def test_arguments_are_checked(guess: str, options: dict[str, Any], text: str) -> None:
    with model_of() as server, pytest.raises(ValueError, match=text):
        groups_of(guess, server, **options)


def test_a_stream_that_failed_fails_for_every_reader(guess: str) -> None:
    async def read() -> None:
        with model_of(Turn(text="no", failures=(StatusFailure(status=500, attempts=None),))) as server:
            model = Model(**server.model())
            async with play(guess, model, range(100), samples=1, retries=0, concurrency=2) as stream:
                for _ in range(2):
                    with pytest.raises(RolloutError, match="the model endpoint answered 5"):
                        while True:
                            await anext(stream)

    asyncio.run(asyncio.wait_for(read(), 60))
