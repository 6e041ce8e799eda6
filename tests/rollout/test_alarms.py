"""Time limits of rollouts: one thread waits for all of them."""

from __future__ import annotations

import threading

from openenv.rollout.progress import Alarms
from waiting import wait_until


def alarm_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("openenv-alarm")]


def test_a_block_that_takes_too_long_is_called_back_while_it_runs() -> None:
    rang = threading.Event()
    with Alarms().after(0.01, rang.set):
        assert rang.wait(20)


def test_a_block_that_ends_in_time_is_not_called_back() -> None:
    alarms, early, late = Alarms(), threading.Event(), threading.Event()
    with alarms.after(0.05, early.set):
        pass
    with alarms.after(0.1, late.set):
        assert late.wait(20)
    assert not early.is_set()


def test_a_shorter_limit_does_not_wait_for_a_longer_one() -> None:
    alarms, long, short = Alarms(), threading.Event(), threading.Event()
    with alarms.after(600, long.set), alarms.after(0.01, short.set):
        assert short.wait(20)
        assert not long.is_set()


def test_a_callback_that_hangs_delays_no_other() -> None:
    alarms, release, rang = Alarms(), threading.Event(), threading.Event()
    try:
        with alarms.after(0.0, lambda: release.wait(60)), alarms.after(0.01, rang.set):
            assert rang.wait(20)
    finally:
        release.set()


def test_one_thread_waits_for_all_blocks_and_ends_after_them() -> None:
    wait_until(lambda: not alarm_threads())
    alarms = Alarms()
    with alarms.after(600, list), alarms.after(600, list):
        assert alarm_threads() == ["openenv-alarms"]
    wait_until(lambda: not alarm_threads())
