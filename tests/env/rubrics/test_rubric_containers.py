"""How containers hold rubrics, and how Sequential, Gate and WeightedSum combine their scores."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openenv.env.rubrics import Gate, Rubric, RubricDict, RubricList, Sequential, WeightedSum
from waiting import wait_until_async

BOUND_S = 5.0


class Fixed(Rubric):
    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score
        self.calls = 0

    def forward(self, action: Any, observation: Any) -> float:
        self.calls += 1
        return self.score


class AsyncFixed(Fixed):
    async def forward(self, action: Any, observation: Any) -> float:  # type: ignore[override]
        self.calls += 1
        return self.score


class Meeting(Rubric):
    """Finishes only once all members of its party have started."""

    def __init__(self, party: list[asyncio.Event], place: int) -> None:
        super().__init__()
        self.party = party
        self.place = place

    async def forward(self, action: Any, observation: Any) -> float:
        self.party[self.place].set()
        for event in self.party:
            await event.wait()
        return 1.0


class Failing(Rubric):
    async def forward(self, action: Any, observation: Any) -> float:
        raise ConnectionError("no judge")


class Endless(Rubric):
    started = cancelled = False

    async def forward(self, action: Any, observation: Any) -> float:
        self.started = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return 1.0


def score(rubric: Rubric) -> float:
    return asyncio.run(asyncio.wait_for(rubric.acall("action", "observation"), BOUND_S))


def kinds(*scores: float) -> list[list[Fixed]]:
    """The same scores from sync rubrics, async ones and a mixture."""
    return [
        [Fixed(value) for value in scores],
        [AsyncFixed(value) for value in scores],
        [(AsyncFixed if place % 2 else Fixed)(value) for place, value in enumerate(scores)],
    ]


@pytest.mark.parametrize("members", kinds(1.0, 0.5, 0.7))
def test_sequential_gives_the_last_score(members: list[Fixed]) -> None:
    assert score(Sequential(*members)) == 0.7


@pytest.mark.parametrize("members", kinds(1.0, 0.0, 0.7))
def test_sequential_stops_at_zero(members: list[Fixed]) -> None:
    assert score(Sequential(*members)) == 0.0
    assert [member.calls for member in members] == [1, 1, 0]


def test_an_empty_sequential_gives_one() -> None:
    assert Sequential()("action", "observation") == 1.0


def test_sequential_has_a_length_and_can_be_indexed() -> None:
    first, last = Fixed(0.1), Fixed(0.2)
    rubric = Sequential(first, last)

    assert len(rubric) == 2
    assert (rubric[0], rubric[-1]) == (first, last)
    assert [name for name, _ in rubric.named_children()] == ["rubric_0", "rubric_1"]
    with pytest.raises(IndexError):
        rubric[2]


@pytest.mark.parametrize(("threshold", "expected"), [(0.4, 0.5), (0.5, 0.5), (0.6, 0.0)])
@pytest.mark.parametrize("kind", [Fixed, AsyncFixed])
def test_gate_gives_the_score_from_the_threshold_on(kind: type[Fixed], threshold: float, expected: float) -> None:
    assert score(Gate(kind(0.5), threshold=threshold)) == expected


def test_gate_requires_a_full_score_by_default() -> None:
    assert (Gate(Fixed(0.99))("a", "o"), Gate(Fixed(1.0))("a", "o")) == (0.0, 1.0)


@pytest.mark.parametrize("members", kinds(1.0, 0.5, 0.0))
def test_weighted_sum_adds_weighted_scores(members: list[Fixed]) -> None:
    rubric = WeightedSum(members, [0.5, 0.3, 0.2])

    assert score(rubric) == pytest.approx(0.65)
    assert [member.last_score for member in members] == [1.0, 0.5, 0.0]


def test_weighted_sum_refuses_a_wrong_number_of_weights() -> None:
    with pytest.raises(ValueError, match="must match"):
        WeightedSum([Fixed(1.0)], [0.5, 0.5])


@pytest.mark.parametrize("weights", [[0.5, 0.4], [float("nan"), 1.0], [0.5, 0.50001]])
def test_weighted_sum_refuses_weights_that_do_not_sum_to_one(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"must sum to 1\.0"):
        WeightedSum([Fixed(1.0), Fixed(1.0)], weights)


def test_weighted_sum_tolerates_rounding() -> None:
    assert WeightedSum([Fixed(1.0)] * 3, [0.1, 0.2, 0.7000001])("a", "o") == pytest.approx(1.0)


def test_changing_the_returned_weights_changes_nothing() -> None:
    rubric = WeightedSum([Fixed(1.0), Fixed(0.0)], weights=[0.5, 0.5])
    rubric.weights[0] = 9.0

    assert rubric.weights == [0.5, 0.5]


def test_weighted_sum_scores_async_members_concurrently() -> None:
    async def meet() -> float:
        party = [asyncio.Event() for _ in range(3)]
        rubric = WeightedSum([Meeting(party, place) for place in range(3)], [0.2, 0.3, 0.5])
        return await asyncio.wait_for(rubric.acall("action", "observation"), BOUND_S)

    assert asyncio.run(meet()) == pytest.approx(1.0)


def test_a_failing_member_stops_the_others_and_its_error_is_raised() -> None:
    endless = Endless()

    with pytest.raises(ConnectionError, match="no judge"):
        score(WeightedSum([endless, Failing()], [0.5, 0.5]))
    assert endless.cancelled


def test_cancelling_a_weighted_sum_cancels_its_members() -> None:
    endless = Endless()

    async def give_up() -> None:
        task = asyncio.ensure_future(WeightedSum([endless], [1.0]).acall("action", "observation"))
        await wait_until_async(lambda: endless.started)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, BOUND_S)

    asyncio.run(give_up())
    assert endless.cancelled


@pytest.mark.parametrize(
    "container", [Sequential(Fixed(1.0), Fixed(0.1)), WeightedSum([Fixed(1.0), Fixed(0.1)], [0.0, 1.0])]
)
def test_a_replaced_child_attribute_is_the_one_that_scores(container: Sequential | WeightedSum) -> None:
    replacement = Fixed(0.6)
    container.rubric_1 = replacement  # type: ignore[union-attr]

    assert container("action", "observation") == 0.6
    assert container[1] is container.get_rubric("rubric_1") is replacement


def test_a_replaced_gate_child_is_the_one_that_scores() -> None:
    gate = Gate(Fixed(0.0), threshold=0.5)
    gate.rubric = Fixed(0.6)

    assert gate("action", "observation") == 0.6


def test_a_replaced_child_attribute_is_seen_in_the_list_and_the_reverse() -> None:
    rubrics = RubricList([Fixed(0.1), Fixed(0.2)])
    by_attribute, by_index = Fixed(0.3), Fixed(0.4)
    rubrics.rubric_0 = by_attribute  # type: ignore[attr-defined]
    rubrics[-1] = by_index

    assert list(rubrics) == [by_attribute, by_index]
    assert list(rubrics.children()) == [by_attribute, by_index]
    assert rubrics.rubric_1 is by_index  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        rubrics[2] = Fixed(0.5)


def test_a_rubric_list_grows() -> None:
    rubrics = RubricList()
    rubrics.append(Fixed(0.1))
    rubrics.extend([Fixed(0.2), Fixed(0.3)])

    assert len(rubrics) == 3
    assert [name for name, _ in rubrics.named_children()] == ["rubric_0", "rubric_1", "rubric_2"]


def test_other_rubrics_of_a_subclass_are_children_but_no_members() -> None:
    class Extended(Sequential):
        def __init__(self) -> None:
            super().__init__(Fixed(0.5))
            self.extra = Fixed(0.0)

    rubric = Extended()

    assert rubric("action", "observation") == 0.5
    assert [name for name, _ in rubric.named_children()] == ["rubric_0", "extra"]


@pytest.mark.parametrize("holder", [RubricList([Fixed(1.0)]), RubricDict({"a": Fixed(1.0)})])
def test_lists_and_dicts_do_not_score(holder: Rubric) -> None:
    with pytest.raises(NotImplementedError):
        holder("action", "observation")


def test_a_rubric_dict_is_a_mapping_of_its_children() -> None:
    first, second, third = Fixed(0.1), Fixed(0.2), Fixed(0.3)
    rubrics = RubricDict({"a": first})
    rubrics["b"] = second
    rubrics.update({"c": third})
    del rubrics["a"]

    assert list(rubrics) == list(rubrics.keys()) == ["b", "c"]
    assert list(rubrics.values()) == list(rubrics.children()) == [second, third]
    assert dict(rubrics.items()) == {"b": second, "c": third}
    assert ("a" in rubrics, "b" in rubrics, len(rubrics)) == (False, True, 2)
    with pytest.raises(KeyError):
        rubrics["a"]
    with pytest.raises(AttributeError):
        _ = rubrics.a


@pytest.mark.parametrize("key", ["reset", "keys", "items", "forward", "last_score", "named_children", "_entries"])
def test_a_key_named_like_a_method_leaves_the_method_intact(key: str) -> None:
    child = Fixed(0.5)
    rubrics = RubricDict({key: child})

    rubrics.reset()

    assert rubrics[key] is rubrics.get_rubric(key) is child
    assert list(rubrics.keys()) == [key]
    assert list(rubrics.items()) == [(key, child)]
    assert rubrics.last_score is None


def test_any_string_is_a_key_also_with_dots() -> None:
    child = Fixed(0.5)

    assert RubricDict({"a.b c": child}).get_rubric("a.b c") is child


def test_an_entry_can_be_read_and_replaced_as_an_attribute() -> None:
    rubrics = RubricDict({"quality": Fixed(0.1), "reset": Fixed(0.2)})
    replacement = Fixed(0.9)
    rubrics.quality = replacement
    rubrics.reset = replacement  # type: ignore[assignment, method-assign]

    assert rubrics["quality"] is rubrics.quality is replacement
    assert rubrics["reset"] is replacement
    assert callable(rubrics.reset)
    assert [name for name, _ in rubrics.named_children()] == ["quality", "reset"]


def test_an_entry_takes_the_name_of_a_rubric_held_as_an_attribute() -> None:
    rubrics = RubricDict()
    rubrics.judge = Fixed(0.1)
    assert [name for name, _ in rubrics.named_children()] == ["judge"]
    assert "judge" not in rubrics

    entry = Fixed(0.2)
    rubrics["judge"] = entry

    assert list(rubrics.named_children()) == [("judge", entry)]
    assert rubrics.judge is entry
