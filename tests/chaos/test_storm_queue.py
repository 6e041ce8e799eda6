"""A line before two servers that some leave, in every manner: the others are served in order, and no slot is lost."""

from __future__ import annotations

from storm.crowds import Manner
from storm.runner import Run, Storm
from storm.verdict import Outcome


def test_clients_that_stay_in_the_queue_are_served_in_order_when_others_leave() -> None:
    result = Run(Storm("queue", 40), lambda _: None).run()
    assert not result.violations
    assert (result.sessions_left, result.environments_left, result.threads_left) == (0, 0, [])
    assert result.table[Manner.STAYS.value] == {Outcome.IDENTICAL.value: result.faults[Manner.STAYS.value]}
    assert result.outcomes[Outcome.GONE.value] >= 5
