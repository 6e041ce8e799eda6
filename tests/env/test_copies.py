"""Copies of an environment within a process: exact, and never with a state in common."""

from __future__ import annotations

import functools
import logging
import random
import tempfile
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.utils import EzPickle

from environments import Idle
from forked_environments import Bookkeeper, Careless, Forgetful, Go, Librarian, Locked, Walker
from openenv.env.copies import copies_of
from openenv.errors import NotForkable


def go(env: Any, *steps: int) -> list[tuple[int, float]]:
    return [(seen.at, seen.luck) for seen in (env.step(Go(by=step)) for step in steps)]


def copied(env: Any, n: int = 1) -> list[Any]:
    return [one.build() for one in copies_of(env, n, type(env))]


@pytest.mark.parametrize("env_cls", [Walker, Bookkeeper, Librarian])
def test_copies_go_on_as_their_original_does(env_cls: type[Any]) -> None:
    env = env_cls()
    env.reset(seed=3)
    go(env, 1, 2)
    first, second = copied(env, 2)
    assert go(first, 5, 6) == go(second, 5, 6) == go(env, 5, 6)


@pytest.mark.parametrize("env_cls", [Walker, Bookkeeper])
def test_siblings_do_not_share_what_one_of_them_changes(env_cls: type[Any]) -> None:
    env = env_cls()
    env.reset(seed=3)
    go(env, 1)
    taken = copies_of(env, 2, env_cls)
    go(env, 100)  # after the copies were taken, before they are built
    first, second = (one.build() for one in taken)
    go(first, 10)
    assert (first.path, second.path, env.path) == ([1, 11], [1], [1, 101])
    assert second.state.step_count == 1


def test_a_snapshot_can_be_put_into_an_environment_that_exists() -> None:
    env = Bookkeeper()
    env.reset(seed=3)
    go(env, 1)
    (taken,) = copies_of(env, 1, Bookkeeper)
    other, built = Bookkeeper(), Bookkeeper.built
    assert taken.put_into is not None
    taken.put_into(other)
    assert go(other, 5) == go(env, 5)
    assert Bookkeeper.built == built
    taken.put_into(other)
    assert go(other, 7)[0][0] == 8


class Keeper(Walker):
    """Keeps something."""

    def __init__(self, make: Callable[[Keeper], Any]) -> None:
        super().__init__()
        self.kept = make(self)


def by_lambda(env: Keeper) -> Any:
    return {"go": lambda: env.path.append(0)}


def by_nested_function(env: Keeper) -> Any:
    def move() -> None:
        env.at += 1

    return [move]


class Colour(Enum):
    RED = []  # noqa: RUF012 - a member is the same in all copies


class Constant:
    def __deepcopy__(self, memo: Any) -> Constant:
        return self


CACHE: dict[int, int] = {}


def top_level() -> dict[int, int]:
    return CACHE


@pytest.mark.parametrize(
    "make",
    [
        by_lambda,
        by_nested_function,
        lambda env: env.random.random,  # in C, with the generator
        lambda env: functools.partial(by_lambda(env)["go"]),
        lambda env: weakref.ref(env),
        lambda env: weakref.WeakValueDictionary({"own": env}),
        lambda _: tempfile.TemporaryDirectory(),
    ],
)
def test_what_deepcopy_leaves_in_common_is_refused(make: Any) -> None:
    env = Keeper(make)
    with pytest.raises(NotForkable, match=r"would share .*snapshot\(\) and restore\(\)"):
        copied(env)


@pytest.mark.parametrize(
    "make",
    [
        lambda env: env.step,
        lambda env: functools.partial(env.step, Go()),
        lambda _: top_level,
        lambda _: (Colour.RED, Colour, Constant(), logging.getLogger("x"), len, object(), (1, ("a",)), {3.0}),
        lambda _: lambda x: x + 1,
        lambda _: (lambda n: lambda: n)(5),
        lambda _: type("Local", (), {"shared": []})(),
        lambda _: Box(np.zeros(2), np.ones(2)),  # a space of Gymnasium, whose dtype is in no cycle and in every copy
    ],
)
def test_what_belongs_to_the_program_may_be_in_common(make: Any) -> None:
    env = Keeper(make)
    (other,) = copied(env)
    other.path.append(9)
    assert env.path == []


def test_a_bound_method_of_a_copy_is_that_of_the_copy() -> None:
    env = Keeper(lambda env: env.step)
    (other,) = copied(env)
    other.kept(Go(by=4))
    assert (env.at, other.at) == (0, 4)


@pytest.mark.parametrize(("env_cls", "why"), [(Locked, "lock"), (Careless, "HAS_EXTERNAL_STATE")])
def test_what_cannot_be_copied_says_why(env_cls: type[Any], why: str) -> None:
    with pytest.raises(NotForkable, match=why):
        copied(env_cls())


def test_what_is_built_anew_instead_of_copied_is_refused() -> None:
    class Engine(EzPickle):
        def __init__(self) -> None:
            super().__init__()
            self.position = 0

    env = Keeper(lambda _: Engine())
    env.kept.position = 7
    with pytest.raises(NotForkable, match="EzPickle"):  # deepcopy would return one at 0
        copied(env)


def test_a_restore_that_fails_is_named() -> None:
    with pytest.raises(NotForkable, match=r"restore\(\) of Forgetful: KeyError: .*what was it"):
        copied(Forgetful())


class Failing(Idle):
    def snapshot(self) -> Any:
        raise OSError("disk full")

    def restore(self, snapshot: Any) -> None:
        raise AssertionError


class Awaited(Idle):
    async def snapshot(self) -> Any:
        return 1

    def restore(self, snapshot: Any) -> None:
        raise AssertionError


class Unfit(Failing):
    def snapshot(self) -> Any:
        return threading.Lock()


@pytest.mark.parametrize(("env_cls", "why"), [(Failing, "disk full"), (Awaited, "coroutine"), (Unfit, "lock")])
def test_a_snapshot_that_fails_is_named(env_cls: type[Any], why: str) -> None:
    with pytest.raises(NotForkable, match=rf"snapshot\(\) of {env_cls.__name__}: .*{why}"):
        copied(env_cls())


class Half(Walker):
    """Has a `snapshot` of its own that is about something else."""

    def snapshot(self) -> Any:
        raise AssertionError("not called")


def test_snapshot_without_restore_is_not_used() -> None:
    (other,) = copied(Half())
    assert isinstance(other.random, random.Random)


def test_the_base_class_does_not_write_them() -> None:
    with pytest.raises(NotImplementedError):
        Idle().snapshot()
    with pytest.raises(NotImplementedError):
        Idle().restore(None)
