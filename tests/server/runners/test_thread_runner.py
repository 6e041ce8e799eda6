"""Where sessions are placed: unproven ones apart, fast ones together, slow ones alone, pinned ones on one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openenv.server.runners import InlineRunner, Lane, ThreadRunner, make_runner
from openenv.server.runners.dispatcher import FAST_S, PROOF, SLOW_S, CallProfile, WorkerThread
from openenv.server.runners.thread import _BLOCKED_S, PARKED, QUICK_SPREAD, SPREAD, ThreadLane
from slow_steps import take
from waiting import wait_until


class Work:
    """A call that remembers where it ran."""

    count = 1

    def __init__(self, function: Callable[[], Any] = lambda: None, kind: str = "step") -> None:
        self.kind = kind
        self.thread: threading.Thread | None = None
        self.done = threading.Event()
        self._function = function

    def run(self) -> None:
        self.thread = threading.current_thread()
        try:
            self._function()
        finally:
            self.done.set()

    def wait(self) -> threading.Thread:
        assert self.done.wait(30)
        assert self.thread is not None
        return self.thread


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadRunner]:
    """A runner that does not take a busy machine for a slow environment."""
    monkeypatch.setattr("openenv.server.runners.dispatcher.SLOW_S", 5.0)
    monkeypatch.setattr("openenv.server.runners.dispatcher.FAST_S", 4.0)
    made = ThreadRunner()
    yield made
    made.close()


def thread_of(lane: Lane) -> threading.Thread:
    work = Work(kind="state")
    lane.submit(work)
    return work.wait()


def prove(runner: ThreadRunner, seconds: float, kind: str = "step") -> None:
    for _ in range(PROOF):
        runner.profile.record("step", 0.0)
        runner.profile.record(kind, seconds)


def test_a_lane_runs_its_calls_in_order_on_one_thread(runner: ThreadRunner) -> None:
    lane, order = runner.lane(), []
    works = [Work(lambda i=i: order.append(i)) for i in range(100)]
    for work in works:
        lane.submit(work)
    assert len({work.wait() for work in works}) == 1
    assert order == list(range(100))


def test_unproven_sessions_are_spread_over_threads(runner: ThreadRunner) -> None:
    lanes = [runner.lane() for _ in range(SPREAD)]
    assert len({thread_of(lane) for lane in lanes}) == SPREAD
    thread_of(runner.lane())
    assert runner.threads == SPREAD


def test_sessions_that_begin_quickly_use_fewer_threads_while_they_are_few(runner: ThreadRunner) -> None:
    runner.profile.record("construct", 0.0)
    lanes = [runner.lane() for _ in range(4 * QUICK_SPREAD)]
    assert runner.threads == QUICK_SPREAD
    lanes += [runner.lane() for _ in range(4 * SPREAD)]
    assert runner.threads == SPREAD
    assert len({thread_of(lane) for lane in lanes}) == SPREAD


def test_no_new_session_is_placed_behind_a_call_that_blocks(runner: ThreadRunner) -> None:
    runner.profile.record("construct", 0.0)
    release = threading.Event()
    blocked = [runner.lane() for _ in range(4)]
    works = [Work(release.wait) for _ in blocked]
    for lane, work in zip(blocked, works, strict=True):
        lane.submit(work)
    try:
        wait_until(lambda: all(lane.host.runs_for(_BLOCKED_S) for lane in blocked if isinstance(lane, ThreadLane)))
        others = [runner.lane() for _ in range(4 * QUICK_SPREAD)]
        assert len({thread_of(lane) for lane in others}) == QUICK_SPREAD
        assert runner.threads == QUICK_SPREAD + len(blocked)
    finally:
        release.set()
    assert not {work.wait() for work in works} & {thread_of(lane) for lane in others}


def test_sessions_share_blocked_threads_when_no_more_threads_are_allowed() -> None:
    runner, release = ThreadRunner(max_threads=2), threading.Event()
    try:
        blocked = [runner.lane() for _ in range(2)]
        for lane in blocked:
            lane.submit(Work(release.wait))
        wait_until(lambda: all(lane.host.runs_for(_BLOCKED_S) for lane in blocked if isinstance(lane, ThreadLane)))
        late = runner.lane()
        assert runner.threads == 2
        release.set()
        assert thread_of(late) in {thread_of(lane) for lane in blocked}
    finally:
        release.set()
        runner.close()


def test_sessions_whose_reset_takes_a_while_are_spread_at_once() -> None:
    runner = ThreadRunner()
    try:
        runner.profile.record("construct", 0.0)
        runner.profile.record("reset", FAST_S * 4)
        assert len({thread_of(runner.lane()) for _ in range(SPREAD)}) == SPREAD
    finally:
        runner.close()


def test_processes_of_one_server_spread_their_sessions_over_as_many_threads_as_one_does() -> None:
    for processes, threads in ((1, SPREAD), (8, SPREAD // 8), (100, 1)):
        runner = make_runner("thread", max_threads=64, server_processes=processes)
        assert isinstance(runner, ThreadRunner)
        lanes = [runner.lane() for _ in range(SPREAD)]
        assert runner.threads == threads
        for lane in lanes:
            lane.release()
        runner.close()


def test_new_sessions_share_a_thread_once_steps_have_shown_to_be_fast(runner: ThreadRunner) -> None:
    first = [runner.lane() for _ in range(3)]
    before = [thread_of(lane) for lane in first]
    prove(runner, 0.0)
    assert len({thread_of(runner.lane()) for _ in range(20)}) == 1
    assert [thread_of(lane) for lane in first] == before, "a session never changes its thread"
    assert runner.threads == 3


def test_slow_sessions_get_threads_of_their_own_up_to_the_limit() -> None:
    runner = ThreadRunner(max_threads=SPREAD + 8)
    try:
        prove(runner, SLOW_S * 10)
        lanes = [runner.lane() for _ in range(SPREAD + 20)]
        assert len({thread_of(lane) for lane in lanes}) == SPREAD + 8
    finally:
        runner.close()


def test_sessions_whose_steps_take_a_millisecond_stay_spread() -> None:
    runner = ThreadRunner()
    try:
        prove(runner, FAST_S * 4)
        lanes = [runner.lane() for _ in range(SPREAD * 2)]
        assert len({thread_of(lane) for lane in lanes}) == SPREAD
    finally:
        runner.close()


@pytest.mark.parametrize(("kind", "is_fast"), [("step", False), ("tool", False), ("reset", True), ("construct", True)])
def test_only_steps_and_tools_have_to_be_quick_to_be_fast(kind: str, is_fast: bool) -> None:
    profile = CallProfile()
    for _ in range(PROOF):
        profile.record("step", 0.0)
    for _ in range(100):
        profile.record(kind, FAST_S * 2)
    assert profile.is_fast == is_fast
    assert not profile.is_slow


@pytest.mark.parametrize("kind", ["reset", "construct", "state", "close"])
def test_one_slow_kind_of_call_makes_an_environment_slow(kind: str) -> None:
    profile = CallProfile()
    for _ in range(PROOF):
        profile.record("step", 0.0)
    assert profile.is_fast
    profile.record(kind, SLOW_S * 3)
    assert profile.is_slow
    assert not profile.is_fast


def test_calls_recorded_together_count_like_single_ones() -> None:
    together, single = CallProfile(), CallProfile()
    for profile in (together, single):
        profile.record("step", 0.001)
    together.record("step", 0.002, 5)
    for _ in range(5):
        single.record("step", 0.002)
    assert together.step_s == pytest.approx(single.step_s)
    together.record("step", 0.0, PROOF - 6)
    assert not together.is_fast
    together.record("step", 0.0, 100)
    assert together.is_fast


def test_a_thread_records_every_kind_that_it_runs_in_a_row(runner: ThreadRunner) -> None:
    lane = runner.lane()
    blocked = threading.Event()
    lane.submit(Work(lambda: blocked.wait(30), kind="reset"))
    for _ in range(PROOF):
        lane.submit(Work())
    lane.submit(Work(kind="close"))
    assert not runner.profile.is_fast
    blocked.set()
    thread_of(lane)
    wait_until(lambda: runner.profile.is_fast)


def test_too_few_steps_prove_nothing() -> None:
    profile = CallProfile()
    for _ in range(PROOF - 1):
        profile.record("step", 0.0)
    profile.record("reset", 0.0)
    assert not profile.is_fast
    assert not profile.is_slow


def test_an_environment_that_becomes_fast_again_is_seen_as_fast() -> None:
    profile = CallProfile()
    profile.record("step", SLOW_S * 4)
    for _ in range(100):
        profile.record("step", 0.0)
    assert profile.is_fast


def test_a_single_thread_runner_puts_every_session_on_one_thread() -> None:
    runner = ThreadRunner(single_thread=True)
    try:
        lanes = [runner.lane() for _ in range(5)]
        threads = {thread_of(lane) for lane in lanes}
        for lane in lanes:
            lane.release()
        threads.add(thread_of(runner.lane()))
        assert len(threads) == 1, "the one thread outlives its sessions"
    finally:
        runner.close()


def test_a_pinned_lane_draws_every_later_session_to_its_thread(runner: ThreadRunner) -> None:
    runner.lane()
    pinned = runner.lane()
    runner.pin(pinned)
    assert {thread_of(runner.lane()) for _ in range(5)} == {thread_of(pinned)}


def test_a_few_threads_of_ended_sessions_are_kept_for_the_next(runner: ThreadRunner) -> None:
    lanes = [runner.lane() for _ in range(PARKED + 5)]
    threads = {thread_of(lane) for lane in lanes}
    for lane in lanes:
        lane.release()
    assert runner.threads == PARKED
    assert thread_of(runner.lane()) in threads
    wait_until(lambda: sum(thread.is_alive() for thread in threads) <= PARKED)
    assert sum(thread.is_alive() for thread in threads) == PARKED


def test_the_shared_thread_is_replaced_when_its_last_session_leaves(runner: ThreadRunner) -> None:
    prove(runner, 0.0)
    first = runner.lane()
    first.release()
    lanes = [runner.lane(), runner.lane()]
    assert len({thread_of(lane) for lane in lanes}) == 1


def test_a_slow_call_does_not_hold_up_a_session_on_another_thread(runner: ThreadRunner) -> None:
    release = threading.Event()
    slow, quick = runner.lane(), runner.lane()
    blocked = Work(lambda: release.wait(10))
    slow.submit(blocked)
    try:
        thread_of(quick)
        assert not blocked.done.is_set()
    finally:
        release.set()
        blocked.wait()


def test_a_call_that_submits_the_next_one_does_not_wake_its_thread(runner: ThreadRunner) -> None:
    lane, wakes = runner.lane(), list[int]()
    worker = lane.host
    assert isinstance(worker, WorkerThread)
    following = Work(lambda: wakes.append(worker._wakes.qsize()))
    first = Work(lambda: lane.submit(following))
    lane.submit(first)
    assert following.wait() is first.wait()
    assert wakes == [0]


def test_a_call_that_breaks_its_promise_not_to_raise_does_not_end_the_thread(runner: ThreadRunner) -> None:
    lane = runner.lane()

    def fail() -> None:
        raise SystemExit

    broken = Work(fail)
    lane.submit(broken)
    broken.wait()
    assert thread_of(lane).is_alive()


def test_close_waits_for_what_runs_and_ends_the_threads() -> None:
    runner = ThreadRunner()
    work = Work(lambda: take(0.05))
    runner.lane().submit(work)
    runner.close()
    assert work.done.is_set()
    assert not work.wait().is_alive()
    assert runner.threads == 0


def test_close_leaves_a_stuck_thread_behind_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    runner, release = ThreadRunner(), threading.Event()
    work = Work(lambda: release.wait(10))
    runner.lane().submit(work)
    runner.close(timeout_s=0.05)
    release.set()
    work.wait()
    assert "stuck" in caplog.text


def test_close_from_one_of_its_own_threads_does_not_wait_for_itself() -> None:
    runner = ThreadRunner()
    work = Work(runner.close)
    runner.lane().submit(work)
    work.wait()


def test_runners_are_made_by_name() -> None:
    for name in ("auto", "thread"):
        made = make_runner(name, max_threads=4)
        assert made.name == "thread"
        made.close()
    assert make_runner("inline", max_threads=4).name == "inline"
    with pytest.raises(ValueError, match="unknown runner 'warp'"):
        make_runner("warp", max_threads=4)


def test_the_inline_runner_runs_in_the_callers_thread_at_once() -> None:
    runner = InlineRunner()
    lane, work = runner.lane(), Work()
    runner.pin(lane)
    lane.submit(work)
    assert work.done.is_set()
    assert work.thread is threading.current_thread()
    lane.release()
    runner.close()


def test_a_call_that_stands_for_many_counts_as_so_many_fast_ones() -> None:
    runner = ThreadRunner()
    try:
        lane = runner.lane()
        for _ in range(PROOF):
            group = Work(lambda: take(SLOW_S * 4))
            group.count = 1000
            lane.submit(group)
            assert group.done.wait(30)
        assert runner.profile.is_fast
    finally:
        runner.close()
