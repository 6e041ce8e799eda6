"""The order of tasks: epochs in new orders, and items that teach more come more often."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from openenv.train import Curriculum, shuffled


def test_each_epoch_has_every_item_once_in_a_new_order() -> None:
    items = list(range(20))
    first, second = (list(shuffled(items, seed=3, epochs=2))[start : start + 20] for start in (0, 20))
    assert sorted(first) == sorted(second) == items
    assert first != second
    assert list(islice(shuffled(items, seed=3), 20)) == first
    assert list(shuffled([])) == []


def test_items_between_solved_and_hopeless_come_most_often() -> None:
    rewards = {"solved": [1.0, 1.0], "hopeless": [0.0, 0.0], "half": [0.0, 1.0], "broken": [None, None]}
    curriculum = Curriculum(list(rewards), seed=0)
    counts: Counter[str] = Counter()
    for number in range(600):
        index = curriculum.draw()
        item = curriculum.items[index]
        counts[item] += number >= 100
        curriculum.update(index, rewards[item])
    assert counts["half"] > 5 * counts["solved"] > 0
    assert counts["half"] > 5 * counts["hopeless"] > 0
    assert curriculum.mean(2) == 0.5
    assert curriculum.mean(3) is None, "what has no reward says nothing"


def test_while_all_rewards_are_equal_all_items_are() -> None:
    curriculum = Curriculum(["a", "b"], seed=0)
    for _ in range(200):
        curriculum.update(curriculum.draw(), [0.0])
    counts = Counter(islice(curriculum, 200))
    assert min(counts.values()) > 60


@pytest.mark.parametrize("arguments", [{"floor": 0}, {"memory": 1.0}])
def test_arguments_are_checked(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="floor must"):
        Curriculum([1], **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        Curriculum([])
