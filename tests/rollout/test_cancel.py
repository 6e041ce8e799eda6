"""Cancelling: heard by everything that listens, once, whenever it comes."""

from __future__ import annotations

import pytest

from openenv.errors import RolloutCancelled
from openenv.rollout import Cancellation


def test_listeners_are_called_once_and_only_while_they_listen() -> None:
    cancel, heard = Cancellation(), []
    with cancel.on_cancel(lambda: heard.append("over")):
        pass
    with cancel.on_cancel(lambda: heard.append("one")), cancel.on_cancel(lambda: heard.append("two")):
        cancel.cancel("enough")
        cancel.cancel("again")
    assert heard == ["one", "two"]
    assert cancel.cancelled
    assert cancel.reason == "enough"


def test_who_listens_too_late_hears_it_at_once() -> None:
    cancel, heard = Cancellation(), []
    cancel.cancel()
    with cancel.on_cancel(lambda: heard.append("late")):
        assert heard == ["late"]
    with pytest.raises(RolloutCancelled, match="cancelled by the caller"):
        cancel.check()


def test_a_listener_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    cancel, heard = Cancellation(), []

    def fail() -> None:
        raise OSError("no")

    with cancel.on_cancel(fail), cancel.on_cancel(lambda: heard.append("second")):
        cancel.cancel()
    assert heard == ["second"]
    assert "could not be stopped" in caplog.text
