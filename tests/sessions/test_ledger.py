"""The ledger: a repeated request is answered and never run twice; what is kept is bounded."""

from __future__ import annotations

import pytest

from openenv.errors import StaleRequest
from openenv.sessions.ledger import KEPT, KEPT_BYTES, Ledger


def finished(ledger: Ledger, key: int | str, reply: str, size: int = 10) -> None:
    ledger.finish(ledger.begin(key), reply, size)


def test_a_new_request_is_not_known() -> None:
    ledger = Ledger()
    assert ledger.find(1) is None
    assert ledger.find("a") is None


def test_a_repeated_request_gets_the_reply_it_had() -> None:
    ledger = Ledger()
    finished(ledger, 1, "first")
    heard: list[str] = []
    entry = ledger.find(1)
    assert entry is not None
    entry.tell(heard.append)
    assert (heard, ledger.hits) == (["first"], 1)


def test_a_request_that_still_runs_is_answered_to_everybody_who_asked() -> None:
    ledger = Ledger()
    entry = ledger.begin(1)
    heard: list[str] = []
    entry.tell(heard.append)
    again = ledger.find(1)
    assert again is entry
    again.tell(heard.append)
    ledger.finish(entry, "reply", 1)
    assert heard == ["reply", "reply"]


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
