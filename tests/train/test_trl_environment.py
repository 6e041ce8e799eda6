"""Served environments as TRL's trainers take them; `tests/train/trainers` runs the same with TRL itself."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from fastmcp import FastMCP

from environments import Idle, Tools
from openenv import create_app
from openenv.errors import ConnectFailed, RolloutError, SessionCapacityError
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.rollout.agents.served_episode import EPISODE_OVER, EpisodeFailed
from openenv.testing import serve
from openenv.train.trainers.trl import tool_environment
from openenv.types import Action, Observation


class Move(Action):
    """Move the piece."""

    to: Literal["left", "right"]
    by: int = 1


class Board(Observation):
    text: str = ""


class Walk(Idle):
    """Two steps to the right win; a step by 13 breaks the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        self.at = seed or 0
        return Board(text=f"You are at {self.at}.")

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Board:
        if action.by == 13:
            raise RuntimeError("broken")
        self.at += action.by if action.to == "right" else -action.by
        return Board(text=f"You are at {self.at}.", reward=0.5, done=self.at >= 2)


class Shop(Tools):
    """A shop with one tool that pays and one that fails."""

    def __init__(self) -> None:
        server = FastMCP("shop")

        @server.tool
        def buy(item: str, count: int = 1, tags: list[str] | None = None) -> str:
            """Buy something.

            Args:
                item: What to buy.
            """
            if count < 0:
                raise ValueError("a negative count")
            return f"{count} {item} {tags}"

        super().__init__(server)


@pytest.fixture(scope="module")
def walk() -> Iterator[str]:
    with serve(create_app(Walk, Move, Board, max_concurrent_envs=2)) as served:
        yield served.url


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    with serve(create_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=4)) as served:
        yield served.url


def test_a_typed_action_is_a_tool_and_its_rewards_add_up(walk: str) -> None:
    with tool_environment(walk) as factory:
        env: Any = factory()
        prompt = [{"role": "user", "content": "Walk."}]
        with pytest.raises(ValueError, match="system message"):
            env.reset(prompt=[{"role": "system", "content": "Walk."}])
        assert env.reset(prompt=prompt, seed=-1, answer=None) == "\n\nYou are at -1."
        assert env.act(to="right", by=2) == "You are at 1."
        assert env.act(to="up").startswith("Error: ")  # the model's mistake, which it reads
        assert env.act(to="right") == "You are at 2."
        assert env.act(to="right") == EPISODE_OVER
        assert env.get_reward() == 1.0
        assert env.reset() == "You are at 0."
        assert env.get_reward() == 0.0


def test_a_method_has_the_signature_and_the_docstring_of_the_action(walk: str) -> None:
    with tool_environment(walk, action_name="move", reward="last") as factory:
        method = type(factory()).move  # type: ignore[attr-defined]
    parameters = inspect.signature(method).parameters
    assert parameters["to"].annotation == Literal["left", "right"]
    assert (parameters["to"].default, parameters["by"].default) == (inspect.Parameter.empty, 1)
    assert method.__annotations__["by"] is int
    assert method.__doc__.startswith("Move the piece.\n\nArgs:\n    to: ")


def test_tools_of_the_environment_are_methods(shop: str) -> None:
    with tool_environment(shop) as factory:
        env: Any = factory()
        assert env.reset(prompt=[{"role": "user", "content": "Buy."}]) is None  # nothing to show
        assert env.buy(item="tea", count=2, tags=["hot"]) == "2 tea ['hot']"
        assert "negative" in env.buy(item="tea", count=-1)
        assert env.buy(count="many").startswith("Error: ")
        assert env.get_reward() == 0.0
        assert inspect.signature(type(env).buy).parameters["tags"].annotation == list[str] | None
        assert "Args:\n    item: What to buy." in type(env).buy.__doc__


def test_a_failure_of_the_environment_is_never_a_reward(walk: str) -> None:
    with tool_environment(walk, on_failure="drop") as factory:
        env: Any = factory()
        env.reset()
        env.act(to="right")
        for _ in range(2):
            with pytest.raises(EpisodeFailed, match="broken"):
                env.act(to="right", by=13)
        assert env.get_reward() is None
        env.reset()
        env.act(to="right")
        assert env.get_reward() == 0.5
    with tool_environment(walk) as factory:
        env = factory()
        env.reset()
        with pytest.raises(EpisodeFailed):
            env.act(to="right", by=13)
        with pytest.raises(EpisodeFailed, match="broken"):
            env.get_reward()


def test_a_full_server_and_a_dead_one_end_the_run(walk: str) -> None:
    with tool_environment(walk) as factory:
        for _ in range(2):
            factory().reset()  # type: ignore[attr-defined]
        with pytest.raises(SessionCapacityError):
            factory().reset()  # type: ignore[attr-defined]
    with serve(create_app(Walk, Move, Board)) as served:
        factory = tool_environment(served.url, on_failure="drop", retry_refused_s=0.1)
        env: Any = factory()
        env.reset()
        env.act(to="right")
    with pytest.raises(EpisodeFailed):
        env.act(to="right")
    assert env.get_reward() is None
    with pytest.raises((ConnectFailed, OSError)):
        env.reset()
    assert env.get_reward() is None
    factory.close()
    with pytest.raises(RolloutError, match="Is the server running"):
        tool_environment(served.url)()


def test_a_factory_can_be_pickled(walk: str) -> None:
    with tool_environment(walk, columns=["seed"]) as factory, pickle.loads(pickle.dumps(factory)) as other:
        env: Any = other()
        assert env.reset(seed=1, far=True) == "You are at 1."


@pytest.mark.parametrize(("argument", "value"), [("reward", "mean"), ("on_failure", "ignore")])
def test_an_argument_that_is_none_of_the_choices_is_refused(argument: str, value: str) -> None:
    with pytest.raises(ValueError, match=argument):
        tool_environment("http://localhost:1", **{argument: value})  # type: ignore[arg-type]


def test_a_name_that_would_be_no_tool_is_refused(walk: str) -> None:
    for name in ("reset", "get_reward", "_act"):
        with pytest.raises(ValueError, match="rename"):
            tool_environment(walk, action_name=name)()
