"""How a rubric is called, awaited, hooked and searched for children."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from openenv.env.rubrics import Gate, Rubric, RubricDict, RubricList, Sequential, WeightedSum


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


class Switchable(Rubric):
    remote = False

    @property
    def is_async(self) -> bool:
        return self.remote

    def forward(self, action: Any, observation: Any) -> Any:
        return AsyncFixed(0.25)(action, observation) if self.remote else 0.5


class Listing(Rubric):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Rubric] = []

    @property
    def _rubric_children(self) -> dict[str, Rubric]:
        return {str(place): rubric for place, rubric in enumerate(self.held)}

    def forward(self, action: Any, observation: Any) -> Any:
        return self.held[-1](action, observation) if self.held else 0.5


class Observed(Fixed):
    def __setattr__(self, name: str, value: object) -> None:
        vars(self).setdefault("seen", []).append(name)
        super().__setattr__(name, value)


class Rounded(Fixed):
    @property
    def last_score(self) -> float | None:
        return vars(self).get("rounded")

    @last_score.setter
    def last_score(self, score: float | None) -> None:
        vars(self)["rounded"] = round(score or 0.0)


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
def test_a_tree_with_an_async_rubric_gives_a_coroutine_for_any_score(rubric: Rubric) -> None:
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


def hold_in_dict(child: Rubric) -> Rubric:
    return RubricDict({"a": child})


@pytest.mark.parametrize(
    ("hold", "name", "put"),
    [
        (Gate, "rubric", lambda gate, child: setattr(gate, "rubric", child)),
        (Sequential, "rubric_0", lambda members, child: members.__setitem__(0, child)),
        (Sequential, "rubric_0", lambda members, child: setattr(members, "rubric_0", child)),
        (lambda child: WeightedSum([child], [1.0]), "rubric_0", lambda members, child: members.__setitem__(0, child)),
        (lambda child: RubricList([child]), "rubric_0", lambda members, child: members.__setitem__(-1, child)),
        (hold_in_dict, "a", lambda entries, child: entries.__setitem__("a", child)),
        (hold_in_dict, "a", lambda entries, child: entries.update({"a": child})),
        (hold_in_dict, "a", lambda entries, child: setattr(entries, "a", child)),
        (hold_in_dict, "a", lambda entries, child: entries.__init__({"a": child})),
    ],
)
def test_replacing_a_child_deep_in_a_tree_that_was_called_reaches_the_root(
    hold: Callable[[Rubric], Rubric], name: str, put: Callable[[Rubric, Rubric], None]
) -> None:
    holder = hold(Fixed(1.0))
    root = Gate(Sequential(Fixed(0.0), Delegating(holder)))

    for child in [Fixed(1.0), AsyncFixed(1.0), Gate(AsyncFixed(1.0))] * 2:
        put(holder, child)
        assert holder.get_rubric(name) is child
        assert holder.is_async is root.is_async is child.is_async
        outcome = root("action", "observation")
        assert (await_result(outcome) if child.is_async else outcome) == 0.0


def test_adding_and_removing_children_changes_the_kind_of_a_tree_that_was_called() -> None:
    members, entries, pair = RubricList(), RubricDict(), Pair(Fixed(1.0), Fixed(1.0))
    root = Pair(Pair(members, entries), pair)
    kinds = [root.is_async]

    entries["judge"] = AsyncFixed(1.0)
    kinds.append(root.is_async)
    del entries["judge"]
    kinds.append(root.is_async)
    pair.left = AsyncFixed(1.0)
    kinds.append(root.is_async)
    del pair.left
    kinds.append(root.is_async)
    pair.right = AsyncFixed(1.0)
    kinds.append(root.is_async)
    pair.right = None  # type: ignore[assignment]
    kinds.append(root.is_async)
    members.append(AsyncFixed(1.0))
    kinds.append(root.is_async)

    assert kinds == [False, True] * 4


def test_a_change_in_a_shared_rubric_reaches_all_its_trees() -> None:
    shared = Gate(Fixed(1.0))
    roots = [Sequential(shared), Delegating(shared)]
    assert [root("action", "observation") for root in roots] == [1.0, 1.0]

    shared.rubric = AsyncFixed(1.0)

    assert [await_result(root("action", "observation")) for root in roots] == [1.0, 1.0]


def test_is_async_of_a_subclass_is_read_at_each_call() -> None:
    switchable = Switchable()
    root = Sequential(Fixed(1.0), Gate(switchable, threshold=0.0))

    for _ in range(2):
        assert root("action", "observation") == 0.5
        switchable.remote = True
        assert await_result(root("action", "observation")) == 0.25
        switchable.remote = False


def test_children_of_a_subclass_are_read_at_each_call() -> None:
    listing = Listing()
    root = Delegating(listing)
    assert root("action", "observation") == 0.5

    listing.held.append(AsyncFixed(0.25))

    assert await_result(root("action", "observation")) == 0.25


def test_a_child_set_through_vars_is_an_error_once_and_then_awaited() -> None:
    root = Delegating(Fixed(1.0))
    root("action", "observation")
    vars(root)["judge"] = AsyncFixed(0.25)

    with pytest.raises(TypeError, match="awaitable"):
        root("action", "observation")
    assert await_result(root("action", "observation")) == 0.25


def test_a_subclass_sees_its_score_being_set() -> None:
    observed, rounded = Observed(0.75), Rounded(0.75)

    assert (observed("action", "observation"), rounded("action", "observation")) == (0.75, 0.75)
    assert vars(observed)["seen"] == ["score", "last_score"]
    assert rounded.last_score == 1


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


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_a_copy_of_a_called_tree_changes_on_its_own(duplicate: Callable[[Delegating], Delegating]) -> None:
    tree = Delegating(Gate(Fixed(1.0)))
    tree("action", "observation")
    twin = duplicate(tree)
    assert twin("action", "observation") == 1.0

    twin.judge = AsyncFixed(0.25)

    assert await_result(twin("action", "observation")) == 0.25
    assert tree("action", "observation") == 1.0


def test_forward_must_be_written() -> None:
    with pytest.raises(TypeError):
        Rubric()  # type: ignore[abstract]


def test_typing_allows_both_kinds_of_outcome() -> None:
    outcome: float | Coroutine[Any, Any, float] = Fixed(0.5)("action", "observation")

    assert outcome == 0.5


def test_a_rubric_that_is_set_past_setattr_is_no_child() -> None:
    parent = Fixed(1.0)
    object.__setattr__(parent, "hidden", Fixed(0.5))
    parent.shown = Fixed(0.25)
    assert [name for name, _ in parent.named_children()] == ["shown"]
    assert [name for name, _ in copy.deepcopy(parent).named_children()] == ["shown"]
    twin = copy.copy(parent)
    del twin.shown
    assert [name for name, _ in parent.named_children()] == ["shown"]
