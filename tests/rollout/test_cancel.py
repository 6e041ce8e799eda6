"""Cancelling: every registered callback runs once, whenever the cancellation comes."""

from __future__ import annotations

import pytest

from openenv.errors import RolloutCancelled
from openenv.rollout import Cancellation


def test_callbacks_are_called_once_and_only_inside_their_block() -> None:
    cancel, calls = Cancellation(), []
    with cancel.on_cancel(lambda: calls.append("over")):
        pass
    with cancel.on_cancel(lambda: calls.append("one")), cancel.on_cancel(lambda: calls.append("two")):
        cancel.cancel("enough")
        cancel.cancel("again")
    assert calls == ["one", "two"]
    assert cancel.cancelled
    assert cancel.reason == "enough"


def test_a_callback_that_is_registered_too_late_is_called_at_once() -> None:
    cancel, calls = Cancellation(), []
    cancel.cancel()
    with cancel.on_cancel(lambda: calls.append("late")):
        assert calls == ["late"]
    with pytest.raises(RolloutCancelled, match="cancelled by the caller"):
        cancel.check()


def test_a_callback_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    cancel, calls = Cancellation(), []

    def fail() -> None:
        raise OSError("no")

    with cancel.on_cancel(fail), cancel.on_cancel(lambda: calls.append("second")):
        cancel.cancel()
    assert calls == ["second"]
    assert "could not be stopped" in caplog.text
