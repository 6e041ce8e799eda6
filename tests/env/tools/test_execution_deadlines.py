"""`Watchdog` and its loop: deadlines that are kept, lifted, many at once, after a pause and in a forked child."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import pytest

from openenv.env.tools import execution as module
from openenv.env.tools.execution import PERIOD_S, BackgroundLoop, Watchdog
from waiting import holds_for, wait_until

SOON = 30.0


@pytest.fixture
def dog() -> Watchdog:
    """A watchdog with a loop of its own."""
    return Watchdog(BackgroundLoop("test-watchdog"))


def test_a_block_that_takes_too_long_calls_back(dog: Watchdog) -> None:
    late = threading.Event()
    begun = time.monotonic()
    with dog.limit(0.1, late.set):
        assert late.wait(SOON)
    assert time.monotonic() - begun >= 0.1


def test_a_block_that_ends_in_time_is_not(dog: Watchdog) -> None:
    late: list[int] = []
    with dog.limit(0.5, lambda: late.append(1)):
        pass
    holds_for(0.5 + 4 * PERIOD_S, lambda: late == [])


def test_the_callback_comes_once(dog: Watchdog) -> None:
    late: list[int] = []
    with dog.limit(0.0, lambda: late.append(1)):
        wait_until(lambda: late)
        holds_for(4 * PERIOD_S, lambda: late == [1])
    assert late == [1]


def test_a_block_that_raises_lifts_its_limit(dog: Watchdog) -> None:
    late: list[int] = []
    with pytest.raises(ValueError, match="x"):
        with dog.limit(0.5, lambda: late.append(1)):
            raise ValueError("x")
    holds_for(0.5 + 4 * PERIOD_S, lambda: late == [])


def test_many_limits_at_once_are_each_kept(dog: Watchdog) -> None:
    late: list[int] = []
    blocks = [dog.limit(0.2 if number % 2 else 60.0, lambda n=number: late.append(n)) for number in range(200)]  # type: ignore[misc]
    for block in blocks:
        block.__enter__()
    wait_until(lambda: len(late) == 100)
    for block in blocks:
        block.__exit__(None, None, None)
    assert sorted(late) == list(range(1, 200, 2))


def test_it_rests_and_wakes_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.002)
    dog = Watchdog(BackgroundLoop("test-watchdog"))
    for _ in range(3):
        late = threading.Event()
        with dog.limit(0.01, late.set):
            assert late.wait(SOON)
        wait_until(lambda: not dog._looking)


def test_limits_set_while_it_falls_asleep_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits from several threads at the moments when it stops looking; none may be forgotten."""
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    monkeypatch.setattr(module, "_IDLE_LOOKS", 1)
    dog = Watchdog(BackgroundLoop("test-watchdog"))
    missed: list[int] = []

    def often() -> None:
        for number in range(150):
            late = threading.Event()
            with dog.limit(0.0, late.set):
                if not late.wait(SOON):
                    missed.append(number)
                    return

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missed == []


def test_a_callback_that_raises_does_not_stop_the_others(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    late = threading.Event()
    with caplog.at_level(logging.ERROR), dog.limit(0.0, lambda: [][0]), dog.limit(0.1, late.set):
        assert late.wait(SOON)
    assert "could not be stopped" in caplog.text


def _in_child(work: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_forked_child_keeps_its_own_limits_and_not_its_parents(dog: Watchdog) -> None:
    of_parent = threading.Event()

    def child() -> bool:
        late = threading.Event()
        with dog.limit(0.05, late.set):
            was_called = late.wait(SOON)
        return was_called and not of_parent.is_set()

    with dog.limit(0.01, of_parent.set):
        pass
    with dog.limit(0.3, of_parent.set):
        assert _in_child(child)


def test_work_runs_on_one_loop_in_one_thread() -> None:
    loop = BackgroundLoop("test-loop")

    async def where() -> int:
        return threading.get_ident()

    threads = {loop.run(where()) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert not loop.is_current


def test_waiting_for_the_loop_on_the_loop_is_refused() -> None:
    loop = BackgroundLoop("test-loop")

    async def inner() -> int:
        return 1

    async def outer() -> int:
        return loop.run(inner())

    with pytest.raises(RuntimeError, match="async method"):
        loop.run(outer())
    assert loop.run(inner()) == 1
