"""The ledger: a repeated request is answered and never run twice; what is kept is bounded."""

from __future__ import annotations

import pytest

from openenv.errors import StaleRequest
from openenv.server.sessions.ledger import KEPT, KEPT_BYTES, Ledger


def finished(ledger: Ledger, key: int | str, reply: str, size: int = 10) -> None:
    ledger.finish(ledger.begin(key), reply, size)


def test_a_new_request_is_not_known() -> None:
    ledger = Ledger()
    assert ledger.find(1) is None
    assert ledger.find("a") is None


def test_a_repeated_request_gets_the_reply_it_had() -> None:
    ledger = Ledger()
    finished(ledger, 1, "first")
    replies: list[str] = []
    entry = ledger.find(1)
    assert entry is not None
    entry.on_reply(replies.append)
    assert (replies, ledger.hits) == (["first"], 1)


def test_all_repeats_of_a_request_that_still_runs_get_its_reply() -> None:
    ledger = Ledger()
    entry = ledger.begin(1)
    replies: list[str] = []
    entry.on_reply(replies.append)
    again = ledger.find(1)
    assert again is entry
    again.on_reply(replies.append)
    ledger.finish(entry, "reply", 1)
    assert replies == ["reply", "reply"]


def test_an_old_number_whose_reply_is_gone_is_no_new_request() -> None:
    ledger = Ledger()
    for number in range(1, KEPT + 5):
        finished(ledger, number, str(number))
    assert ledger.last_id == KEPT + 4
    with pytest.raises(StaleRequest) as caught:
        ledger.find(1)
    assert caught.value.details == {"last_id": KEPT + 4}
    assert ledger.find(KEPT + 4) is not None
    assert ledger.find(KEPT + 5) is None


def test_large_replies_are_not_kept_but_for_the_last() -> None:
    ledger = Ledger()
    for number in (1, 2, 3):
        finished(ledger, number, str(number), KEPT_BYTES)
    assert ledger.find(3) is not None
    with pytest.raises(StaleRequest):
        ledger.find(2)


def test_what_still_runs_is_never_forgotten() -> None:
    ledger = Ledger()
    running = ledger.begin(1)
    for number in range(2, KEPT + 10):
        finished(ledger, number, str(number))
    assert ledger.find(1) is running


def test_a_step_of_a_group_is_known_from_its_beginning_on() -> None:
    ledger = Ledger()
    ledger.begin_step(1, "step")
    replies: list[str] = []
    entry = ledger.find(1)
    assert entry is not None
    assert entry.request == "step"
    assert not entry.is_done
    entry.on_reply(replies.append)
    assert ledger.find(1) is entry
    ledger.finish_step(1, "step", "reply", 5)
    assert replies == ["reply"]
    again = ledger.find(1)
    assert again is not None
    assert again.reply == "reply"
    assert ledger.hits == 3


def test_a_step_that_begins_before_the_last_reply_is_delivered_does_not_hide_it() -> None:
    ledger = Ledger()
    ledger.begin_step(1, "first")
    ledger.begin_step(2, "second")
    waiting = [ledger.find(1), ledger.find(2)]
    assert [entry.request for entry in waiting if entry is not None and not entry.is_done] == ["first", "second"]
    ledger.finish_step(1, "first", "one", 3)
    assert ledger.find(2) is waiting[1]
    ledger.finish_step(2, "second", "two", 3)
    assert [entry.reply for entry in waiting if entry is not None] == ["one", "two"]
    assert _is_kept(ledger, 1)


def test_steps_of_groups_and_other_requests_are_kept_together() -> None:
    ledger = Ledger()
    for number in range(1, 2 * KEPT, 2):
        ledger.begin_step(number, "step")
        ledger.finish_step(number, "step", str(number), 10)
        finished(ledger, number + 1, str(number + 1))
    assert [number for number in range(1, 2 * KEPT + 1) if _is_kept(ledger, number)] == list(
        range(KEPT + 1, 2 * KEPT + 1)
    )


def test_the_last_request_is_kept_even_if_one_before_it_is_answered_later_and_at_length() -> None:
    ledger = Ledger()
    slow = ledger.begin(1)
    finished(ledger, 2, "quick")
    ledger.finish(slow, "long", 2 * KEPT_BYTES)
    assert _is_kept(ledger, 2)
    assert not _is_kept(ledger, 1)


def _is_kept(ledger: Ledger, number: int) -> bool:
    try:
        return ledger.find(number) is not None
    except StaleRequest:
        return False
