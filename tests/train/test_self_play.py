"""Matches of several policies: each agent has its own conversation, reward and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from pydantic import Field

from environments import Idle
from openenv import create_app
from openenv.errors import RequestValidationError, RolloutError
from openenv.rollout import Model, RolloutStore
from openenv.testing import serve
from openenv.train import Player, SampleGroup, collate, self_play
from openenv.train.self_play import PlayerDialogue
from openenv.types import Action, Observation
from vllm_double import VllmDouble, decode, logprob


class Moves(Action):
    actions: dict[str, int]


class Seen(Observation):
    acting: list[str] = Field(default_factory=list)
    observations: dict[str, Any] = Field(default_factory=dict)
    rewards: dict[str, float] = Field(default_factory=dict)


class Higher(Idle):
    """Both say a number at once, three times; the higher one earns 1, the lower one loses 1."""

    def __init__(self) -> None:
        super().__init__()
        self._round = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Seen:
        self._round = 0
        return self._seen({})

    def step(self, action: Moves, timeout_s: float | None = None, **kwargs: object) -> Seen:
        self._round += 1
        a, b = action.actions["a"], action.actions["b"]
        won = (a > b) - (a < b)
        return self._seen({"a": float(won), "b": float(-won)}, done=self._round == 3)

    def _seen(self, rewards: dict[str, float], *, done: bool = False) -> Seen:
        views = {name: f"you are {name}, round {self._round}" for name in ("a", "b")}
        return Seen(acting=[] if done else ["a", "b"], observations=views, rewards=rewards, done=done)


class Turns(Idle):
    """`a` and `b` move in turns; b's first reward comes before its first move, and negative numbers are illegal."""

    def __init__(self) -> None:
        super().__init__()
        self._moves = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: object) -> Seen:
        self._moves = 0
        return Seen(acting=["a"], observations={"a": {"moves": 0}})

    def step(self, action: Moves, timeout_s: float | None = None, **kwargs: object) -> Seen:
        ((name, number),) = action.actions.items()
        if number < 0:
            raise RequestValidationError("a move is not negative")
        self._moves += 1
        other = "b" if name == "a" else "a"
        rewards = {name: float(number), other: 0.5 if self._moves == 1 else 0.0}
        is_over = self._moves == 4
        return Seen(acting=[other], observations={other: {"moves": self._moves}}, rewards=rewards, done=is_over)


def app(environment: type) -> Any:
    return create_app(environment, Moves, Seen, max_concurrent_envs=8)


def policy(answer: Callable[[str], str]) -> VllmDouble:
    return VllmDouble(lambda prompt: answer(prompt.rsplit("<|im_start|>user\n", 1)[-1].partition("<|im_end|>")[0]))


def model(double: VllmDouble) -> Model:
    return Model(base_url=double.url, name="m", engine="vllm")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def matches(url: str, players: dict[str, Player], starts: Any = (1,), **options: Any) -> list[SampleGroup]:
    async with self_play(url, players, starts, **{"samples": 3, "concurrency": 2, **options}) as stream:
        groups = [group async for group in stream]
    assert stream.counts.tokens.sampled == stream.counts.tokens.trained > 0
    return groups


def check(group: SampleGroup) -> None:
    """Check each token against the weights of the double that sampled it."""
    for sample in group.samples:
        for sequence in sample.sequences:
            for place, bit in enumerate(sequence.loss_mask):
                if bit:
                    expected = logprob(sequence.input_ids[:place], sequence.input_ids[place], 0)
                    assert abs(sequence.logprobs[place] - expected) < 1e-9


def test_each_agent_has_its_own_conversation_reward_and_tokens() -> None:
    with policy(lambda text: "I say 7") as high, policy(lambda text: "3") as low, serve(app(Higher)) as served:
        dialogue = PlayerDialogue("Say a number.")
        players = {"a": Player(model=model(high), dialogue=dialogue), "b": Player(model=model(low))}
        groups = run(matches(served.url, players, [1, 2]))
    for group in groups:
        parts = group.by_player()
        assert {name: part.rewards for name, part in parts.items()} == {"a": [3.0] * 3, "b": [-3.0] * 3}
        assert [part.name for part in parts.values()] == [f"{group.name}/a", f"{group.name}/b"]
        for name, part in parts.items():
            check(part)
            for sample in part.samples:
                assert list((sample.turn_rewards or {}).values()) == ([1.0] * 3 if name == "a" else [-1.0] * 3)
                (sequence,) = sample.sequences
                text = decode(sequence.input_ids)
                assert (f"you are {name}, round 2" in text, f"you are {'ab'.replace(name, '')}" in text) == (
                    True,
                    False,
                )
                assert ("Say a number." in text) == (name == "a")
        batch = collate(parts.values(), "dr_grpo")
        assert len(batch) == 6
    assert {sample.path for sample in high.samples} == {"chat"}
    with pytest.raises(ValueError, match="no sequence"):
        groups[0].collate()  # a match has no single advantage


def test_opponents_that_are_not_trained_are_in_no_group() -> None:
    with policy(lambda text: "7") as high, policy(lambda text: "3") as low, serve(app(Higher)) as served:
        players = {"a": Player(model=model(high), is_trained=False), "b": Player(model=model(low))}
        (group,) = run(matches(served.url, players))
    assert group.rewards == [-3.0] * 3
    assert list(group.by_player()) == ["b"]


def test_agents_move_in_turns_and_illegal_moves_are_repeated() -> None:
    def answer(text: str) -> str:
        if "moves" in text:
            return "hm" if '"moves": 0' in text else "-1"
        return "2"  # after the reason why the answer was refused

    with policy(answer) as double, serve(app(Turns)) as served:
        players = {name: Player(model=model(double)) for name in ("a", "b")}
        (group,) = run(matches(served.url, players, samples=1, retries=0))
    parts = group.by_player()
    assert {name: part.rewards for name, part in parts.items()} == {"a": [4.0], "b": [4.5]}
    (sample,) = parts["a"].samples
    texts = decode(sample.sequences[0].input_ids)
    assert "Answer with a number." in texts


def test_a_limit_of_replies_ends_the_match_for_all() -> None:
    with policy(lambda text: "hm") as double, serve(app(Higher)) as served:
        players = {"a": Player(model=model(double)), "b": Player(model=model(double))}
        (group,) = run(matches(served.url, players, samples=1, max_turns=2, gives_rewards=True))
    for part in group.by_player().values():
        (sample,) = part.samples
        assert (sample.outcome.status, sample.reward, sample.is_cut_off) == ("truncated", 0.0, True)


def test_a_failed_endpoint_of_an_opponent_is_no_reward() -> None:
    with ExitStack() as stack:
        good, served = stack.enter_context(policy(lambda text: "7")), stack.enter_context(serve(app(Higher)))
        gone = Model(base_url="http://127.0.0.1:1/v1", name="m", engine="vllm")
        players = {"a": Player(model=model(good)), "b": Player(model=gone, is_trained=False)}
        with pytest.raises(RolloutError, match="endpoint"):
            run(matches(served.url, players, samples=1, retries=0))


def test_an_agent_without_a_player_is_named() -> None:
    with policy(lambda text: "7") as double, serve(app(Higher)) as served:
        with pytest.raises(RolloutError, match="no player for the agent 'b'; the players are a"):
            run(matches(served.url, {"a": Player(model=model(double))}, samples=1, retries=0))


def test_options_that_matches_do_not_have_are_refused(tmp_path: Any) -> None:
    with policy(lambda text: "7") as double:
        players = {"a": Player(model=model(double))}
        with RolloutStore(tmp_path) as store, pytest.raises(ValueError, match="keeps no store"):
            run(matches("http://127.0.0.1:1", players, store=store))
        with pytest.raises(ValueError, match="at least one player must be trained"):
            run(matches("http://127.0.0.1:1", {"a": Player(model=model(double), is_trained=False)}))


@pytest.mark.parametrize(
    ("text", "move"), [("3", 3), ('{"x": 1}', {"x": 1}), ("I play 4, not 5", 5), ("[1, 2]", [1, 2])]
)
def test_a_reply_is_json_or_its_last_number(text: str, move: object) -> None:
    assert PlayerDialogue().move(text) == move
