"""`Interruptible`: functions that are stopped from another thread, and never anything else in theirs."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from endless_tools import spin
from openenv.env.tools.execution import Interrupted, Interruptible
from slow_steps import take

SOON = 30.0


@pytest.fixture(autouse=True)
def _quick_switches() -> Iterator[None]:
    """Let threads take turns often, so that races are met."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def compute() -> None:
    while True:
        pass


def stop_soon(running: Interruptible, delay_s: float = 0.05, begun: threading.Event | None = None) -> threading.Thread:
    """Stop a function, by default at once, else a while after it has begun."""

    def stop() -> None:
        if begun is not None:
            begun.wait(SOON)
        take(delay_s)
        running.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_what_the_function_returns_or_raises_comes_through() -> None:
    assert Interruptible().run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        Interruptible().run(lambda: 1 / 0)


@pytest.mark.parametrize("function", [spin, compute], ids=lambda function: function.__name__)
def test_a_function_that_naps_or_computes_is_stopped(function: Callable[[], None]) -> None:
    running = Interruptible()
    thread = stop_soon(running)
    begun = time.monotonic()
    with pytest.raises(Interrupted):
        running.run(function)
    assert time.monotonic() - begun < SOON
    assert running.is_stopped
    thread.join()


def test_one_that_was_stopped_before_it_began_does_not_begin() -> None:
    running, called = Interruptible(), []
    running.stop()
    with pytest.raises(Interrupted):
        running.run(lambda: called.append(1))
    assert called == []


def test_one_that_has_ended_is_left_alone() -> None:
    running = Interruptible()
    assert running.run(lambda: 1) == 1
    assert not running.is_stopped
    for _ in range(3):
        running.stop()
    for _ in range(1000):  # an interruption would arrive here
        pass


def test_the_function_cleans_up() -> None:
    running, seen = Interruptible(), []
    begun = threading.Event()

    def function() -> None:
        try:
            begun.set()
            spin()
        except Exception:
            seen.append("taken for its own")
        finally:
            seen.append("cleaned up")

    thread = stop_soon(running, begun=begun)
    with pytest.raises(Interrupted):
        running.run(function)
    assert seen == ["cleaned up"]
    thread.join()


def test_stopping_twice_interrupts_once() -> None:
    running, interruptions = Interruptible(), []
    begun = threading.Event()

    def function() -> str:
        try:
            begun.set()
            spin()
        except Interrupted:
            interruptions.append(1)
        take(0.1)
        return "went on"

    threads = [stop_soon(running, begun=begun), stop_soon(running, begun=begun)]
    assert running.run(function) == "went on"
    assert interruptions == [1]
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_no_interruption_ever_arrives_after_the_end() -> None:
    """Stop functions just as they end, some thousand times; nothing but `run` itself may raise."""
    chance = random.Random(7)
    outcomes = {"returned": 0, "interrupted": 0, "stray": 0}
    handed_over: list[Interruptible] = []
    over = threading.Event()

    def stopper() -> None:
        other_chance = random.Random(8)
        while not over.is_set():
            if handed_over:
                running = handed_over.pop()
                take(other_chance.random() * 2e-4)
                running.stop()
            else:
                time.sleep(0)

    def brief() -> None:
        while handed_over:  # both begin at the same time
            time.sleep(0)
        for _ in range(chance.randrange(12_000)):
            pass

    thread = threading.Thread(target=stopper)
    thread.start()
    deadline = time.monotonic() + 20
    try:
        while sum(outcomes.values()) < 8000 and time.monotonic() < deadline:
            running = Interruptible()
            outcome = "returned"
            try:
                handed_over.append(running)
                running.run(brief)
                for _ in range(100):  # where a stray one would arrive
                    pass
            except Interrupted as exc:
                within = exc.__traceback__.tb_next if exc.__traceback__ is not None else None
                is_own = within is not None and within.tb_frame.f_code is Interruptible.run.__code__
                outcome = "interrupted" if is_own else "stray"
            outcomes[outcome] += 1
    finally:
        over.set()
        thread.join()
    assert outcomes["stray"] == 0
    assert outcomes["returned"] > 50
    assert outcomes["interrupted"] > 50


def test_others_can_still_stop_after_many_interruptions() -> None:
    """No interruption leaves the lock taken: a later stop must not wait for ever."""
    for _ in range(200):
        running = Interruptible()
        thread = stop_soon(running, 0.0)
        try:
            running.run(lambda: take(0.0005))
        except Interrupted:
            pass
        finally:
            thread.join(SOON)
        assert not thread.is_alive()
        again = stop_soon(running, 0.0)
        again.join(SOON)
        assert not again.is_alive()
