"""How a rubric is called, awaited, hooked and searched for children."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Coroutine
from typing import Any

import pytest

from openenv.rubrics import Gate, Rubric, RubricDict, RubricList, Sequential, WeightedSum


class Fixed(Rubric):
    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def forward(self, action: Any, observation: Any) -> float:
        return self.score


class AsyncFixed(Fixed):
    async def forward(self, action: Any, observation: Any) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.score


class Pair(Rubric):
    def __init__(self, left: Rubric, right: Rubric) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, action: Any, observation: Any) -> float:
        return min(child.last_score or 0.0 for child in self.children())


class Unset(Rubric):
    judge: Rubric | None = None

    def __init__(self) -> None:
        pass  # forgets super().__init__() on purpose

    def forward(self, action: Any, observation: Any) -> float:
        return 0.5


class Delegating(Rubric):
    def __init__(self, judge: Rubric) -> None:
        super().__init__()
        self.judge = judge

    def forward(self, action: Any, observation: Any) -> Any:
        return self.judge(action, observation)


class Deceptive(Rubric):
    def forward(self, action: Any, observation: Any) -> Any:
        return AsyncFixed(1.0)(action, observation)


class Declared(Deceptive):
    is_async = True


async def call_in_loop(rubric: Rubric) -> Any:
    return rubric("action", "observation")


def await_result(outcome: Any) -> Any:
    assert inspect.iscoroutine(outcome)
    return asyncio.run(outcome)


SYNC_TREES = [
    Fixed(1.0),
    Fixed(0.0),
    Sequential(),
    Sequential(Fixed(1.0), Fixed(0.5)),
    Sequential(Fixed(0.0), Fixed(1.0)),
    Gate(Fixed(0.5)),
    WeightedSum([Fixed(1.0), Fixed(0.0)], [0.5, 0.5]),
    Gate(Sequential(Fixed(1.0), WeightedSum([Fixed(1.0)], [1.0]))),
]
ASYNC_TREES = [
    AsyncFixed(1.0),
    AsyncFixed(0.0),
    Sequential(AsyncFixed(0.0), Fixed(1.0)),
    Sequential(Fixed(0.0), AsyncFixed(1.0)),
    Sequential(Fixed(1.0), AsyncFixed(1.0)),
    Gate(AsyncFixed(0.0)),
    WeightedSum([Fixed(0.0), AsyncFixed(0.0)], [0.5, 0.5]),
    Gate(Sequential(Fixed(0.0), Gate(AsyncFixed(1.0)))),
]


@pytest.mark.parametrize("rubric", SYNC_TREES)
def test_a_sync_tree_gives_a_float_with_and_without_a_running_loop(rubric: Rubric) -> None:
    outside = rubric("action", "observation")
    inside = asyncio.run(call_in_loop(rubric))

    assert isinstance(outside, float)
    assert inside == outside
    assert rubric.is_async is False


@pytest.mark.parametrize("rubric", ASYNC_TREES)
def test_a_tree_with_an_async_rubric_gives_a_coroutine_whatever_the_score(rubric: Rubric) -> None:
    assert isinstance(await_result(rubric("action", "observation")), float)
    assert rubric.is_async is True


@pytest.mark.parametrize("rubric", SYNC_TREES + ASYNC_TREES)
def test_acall_is_awaitable_for_every_tree(rubric: Rubric) -> None:
    score = await_result(rubric.acall("action", "observation"))

    assert isinstance(score, float)
    assert rubric.last_score == score


def test_replacing_a_child_by_an_async_one_makes_the_parent_async() -> None:
    rubric = Sequential(Fixed(1.0), Fixed(1.0))
    rubric.rubric_1 = AsyncFixed(0.25)  # type: ignore[attr-defined]

    assert await_result(rubric("action", "observation")) == 0.25


def test_a_plain_forward_that_hands_on_its_async_childs_coroutine_is_awaited() -> None:
    assert await_result(Delegating(AsyncFixed(0.75))("action", "observation")) == 0.75
    assert Delegating(Fixed(0.75))("action", "observation") == 0.75


def test_an_undeclared_awaitable_score_is_an_error_instead_of_a_reward() -> None:
    with pytest.raises(TypeError, match="acall"):
        Deceptive()("action", "observation")
    assert asyncio.run(Deceptive().acall("action", "observation")) == 1.0


def test_a_rubric_can_declare_itself_async() -> None:
    assert await_result(Declared()("action", "observation")) == 1.0


def test_hooks_run_around_forward_and_see_the_score() -> None:
    rubric = Fixed(0.5)
    seen: list[tuple[Any, ...]] = []
    rubric.register_forward_pre_hook(lambda *args: seen.append((*args, rubric.last_score)))
    rubric.register_forward_hook(lambda *args: seen.append((*args, rubric.last_score)))

    assert rubric("action", "observation") == 0.5
    assert seen == [(rubric, "action", "observation", None), (rubric, "action", "observation", 0.5, 0.5)]


def test_hooks_of_one_rubric_do_not_reach_another() -> None:
    hooked, other = Fixed(0.5), Fixed(0.5)
    seen: list[float] = []
    hooked.register_forward_hook(lambda _rubric, _action, _observation, score: seen.append(score))

    other("action", "observation")

    assert seen == []


@pytest.mark.parametrize("rubric", [Fixed(0.5), AsyncFixed(0.5)])
def test_acall_awaits_async_hooks_in_order(rubric: Rubric) -> None:
    seen: list[str] = []

    async def before(*_: Any) -> None:
        await asyncio.sleep(0)
        seen.append("before")

    async def after(*_: Any) -> None:
        seen.append("after")

    rubric.register_forward_pre_hook(before)
    rubric.register_forward_hook(after)
    rubric.register_forward_hook(lambda *_: seen.append("last"))

    asyncio.run(rubric.acall("action", "observation"))

    assert seen == ["before", "after", "last"]


def test_an_async_hook_on_a_sync_call_is_an_error_instead_of_being_skipped() -> None:
    async def hook(*_: Any) -> None: ...

    before, after = Fixed(0.5), Fixed(0.5)
    before.register_forward_pre_hook(hook)
    after.register_forward_hook(hook)

    with pytest.raises(TypeError, match="pre-hook of Fixed"):
        before("action", "observation")
    with pytest.raises(TypeError, match="hook of Fixed"):
        after("action", "observation")


def test_rubrics_assigned_to_attributes_are_children() -> None:
    left, right = Fixed(0.1), Fixed(0.2)
    pair = Pair(left, right)

    assert list(pair.children()) == [left, right]
    assert list(pair.named_children()) == [("left", left), ("right", right)]
    assert dict(pair._rubric_children) == {"left": left, "right": right}


def test_descendants_have_dotted_paths() -> None:
    inner = Pair(Fixed(0.1), Fixed(0.2))
    outer = Pair(inner, Fixed(0.3))

    assert [path for path, _ in outer.named_rubrics()] == ["left", "left.left", "left.right", "right"]
    assert [path for path, _ in outer.named_rubrics("root")][1] == "root.left.left"
    assert list(outer.rubrics()) == [inner, inner.left, inner.right, outer.right]
    assert outer.get_rubric("left.right") is inner.right


@pytest.mark.parametrize("path", ["", "missing", "left.missing", "left.score"])
def test_an_unknown_path_is_a_key_error(path: str) -> None:
    with pytest.raises(KeyError):
        Pair(Fixed(0.1), Fixed(0.2)).get_rubric(path)


def test_a_child_that_is_overwritten_or_deleted_is_no_child_any_more() -> None:
    pair = Pair(Fixed(0.1), Fixed(0.2))
    pair.left = None  # type: ignore[assignment]
    del pair.right

    assert list(pair.children()) == []


def test_a_replaced_child_keeps_its_place() -> None:
    pair = Pair(Fixed(0.1), Fixed(0.2))
    pair.left = Fixed(0.9)

    assert [name for name, _ in pair.named_children()] == ["left", "right"]
    assert pair.get_rubric("left") is pair.left


def test_a_subclass_without_super_init_and_with_a_class_default_works() -> None:
    rubric = Unset()
    rubric.judge = Fixed(0.1)
    rubric.register_forward_hook(lambda *_: None)

    assert rubric("action", "observation") == 0.5
    assert rubric.judge.score == 0.1
    assert list(rubric.children()) == [rubric.judge]


def test_reset_reaches_all_descendants() -> None:
    reset: list[float] = []

    class Stateful(Fixed):
        def reset(self) -> None:
            reset.append(self.score)

    stateful = [Stateful(0.1), Stateful(0.2), Stateful(0.3)]
    Pair(Sequential(stateful[0]), Pair(RubricList([stateful[1]]), RubricDict({"reset": stateful[2]}))).reset()

    assert reset == [0.1, 0.2, 0.3]


def test_a_plain_rubric_has_an_empty_state() -> None:
    rubric = Fixed(0.5)
    rubric.load_state_dict({"score": 0.1})

    assert rubric.state_dict() == {}


@pytest.mark.parametrize("tree", [WeightedSum([Fixed(1.0), Fixed(0.5)], [0.5, 0.5]), RubricDict({"keys": Fixed(1.0)})])
def test_trees_can_be_copied_and_pickled(tree: Rubric) -> None:
    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert [path for path, _ in twin.named_rubrics()] == [path for path, _ in tree.named_rubrics()]
        assert not set(twin.rubrics()) & set(tree.rubrics())


def test_forward_must_be_written() -> None:
    with pytest.raises(TypeError):
        Rubric()  # type: ignore[abstract]


def test_typing_allows_both_kinds_of_outcome() -> None:
    outcome: float | Coroutine[Any, Any, float] = Fixed(0.5)("action", "observation")

    assert outcome == 0.5
