"""The way back to the loop: order, batching, failures of one delivery, closed loops."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from openenv.server.runners import Dispatcher, ThreadRunner, cores, current_dispatcher, has_affinity
from waiting import wait_until_async


class Result:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def deliver(self) -> None:
        self._function()


@pytest.mark.anyio
async def test_a_loop_has_one_dispatcher() -> None:
    assert current_dispatcher() is current_dispatcher()
    assert current_dispatcher().is_current
    assert not await asyncio.to_thread(lambda dispatcher: dispatcher.is_current, current_dispatcher())


def test_two_loops_have_two_dispatchers() -> None:
    async def dispatcher() -> Dispatcher:
        return current_dispatcher()

    assert asyncio.run(dispatcher()) is not asyncio.run(dispatcher())


@pytest.mark.anyio
async def test_results_of_many_threads_all_arrive_in_each_threads_order() -> None:
    dispatcher, arrived = current_dispatcher(), []
    all_there = asyncio.Event()

    def take(item: tuple[int, int]) -> None:
        assert dispatcher.is_current
        arrived.append(item)
        if len(arrived) == 4 * 500:
            all_there.set()

    def post(thread: int) -> None:
        for i in range(500):
            dispatcher.post(Result(lambda i=i: take((thread, i))))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(all_there.wait(), 30)
    for n, thread in enumerate(threads):
        await asyncio.to_thread(thread.join)
        assert [i for owner, i in arrived if owner == n] == list(range(500))


@pytest.mark.anyio
async def test_a_delivery_that_fails_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher, came = current_dispatcher(), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("broken receiver")

    dispatcher.post(Result(fail))
    dispatcher.post(Result(came.set))
    await asyncio.wait_for(came.wait(), 30)
    assert "broken receiver" in caplog.text


@pytest.mark.anyio
async def test_a_delivery_may_post_another() -> None:
    dispatcher, came = current_dispatcher(), asyncio.Event()
    dispatcher.post(Result(lambda: dispatcher.post(Result(came.set))))
    await asyncio.wait_for(came.wait(), 30)


def test_posting_to_a_closed_loop_is_silent() -> None:
    loop = asyncio.new_event_loop()
    dispatcher = Dispatcher(loop)
    loop.close()
    dispatcher.post(Result(lambda: None))
    dispatcher.post(Result(lambda: None))


@pytest.mark.anyio
async def test_a_dispatcher_is_at_hand_in_its_running_loops_thread_only() -> None:
    dispatcher = current_dispatcher()
    assert dispatcher.is_at_hand
    assert not await asyncio.to_thread(lambda: dispatcher.is_at_hand)


def test_a_dispatcher_whose_loop_has_ended_is_not_at_hand() -> None:
    async def dispatcher() -> Dispatcher:
        return current_dispatcher()

    ended = asyncio.run(dispatcher())
    assert not ended.is_at_hand


def test_a_dispatcher_goes_with_its_loop_to_another_thread() -> None:
    loop = asyncio.new_event_loop()

    async def look() -> bool:
        return current_dispatcher().is_at_hand

    try:
        assert loop.run_until_complete(look())
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(loop.run_until_complete(look())))
        thread.start()
        thread.join(10)
        assert seen == [True]
    finally:
        loop.close()


class Step:
    """A call that notes its thread, and delivers itself."""

    kind = "step"
    count = 1

    def __init__(self, dispatcher: Dispatcher, done: list[Step], work: Callable[[], object] = lambda: None) -> None:
        self._dispatcher = dispatcher
        self._done = done
        self._work = work
        self.thread = 0

    def run(self) -> None:
        self.thread = threading.get_ident()
        self._work()
        self._dispatcher.hand_over(self)

    def deliver(self) -> None:
        assert threading.get_ident() != self.thread
        self._done.append(self)


@pytest.fixture
def runner() -> Iterator[ThreadRunner]:
    made = ThreadRunner(single_thread=True)
    yield made
    made.close()


@pytest.mark.anyio
async def test_calls_of_one_pass_run_in_order_on_their_thread_and_are_delivered_before_the_next(
    runner: ThreadRunner,
) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    lane = runner.lane()
    steps = [Step(dispatcher, done) for _ in range(5)]
    for step in steps:
        lane.submit(step, dispatcher)
    assert all(step.thread == 0 for step in steps)
    await wait_until_async(lambda: len(done) == 5)
    assert done == steps
    assert len({step.thread for step in steps}) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("threads", [1, 3])
async def test_idle_threads_keep_no_call_alive(threads: int) -> None:
    dispatcher, runner = current_dispatcher(), ThreadRunner(spread=threads)
    gc.disable()  # nothing may need a collection: the last actions would stay until one runs
    try:
        done = list[Step]()
        for lane in [runner.lane() for _ in range(threads)]:
            lane.submit(Step(dispatcher, done), dispatcher)
        await wait_until_async(lambda: len(done) == threads)
        assert runner.handovers.quick + runner.handovers.late == threads
        calls = [weakref.ref(step) for step in done]
        done.clear()
        await wait_until_async(lambda: all(call() is None for call in calls))
    finally:
        gc.enable()
        runner.close()


@pytest.mark.anyio
async def test_a_blocking_call_does_not_hold_the_loop(runner: ThreadRunner) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    goes_on = threading.Event()
    runner.lane().submit(Step(dispatcher, done, goes_on.wait), dispatcher)
    for _ in range(3):  # the loop turns while the call blocks
        await asyncio.sleep(0)
    assert not done
    goes_on.set()
    await wait_until_async(lambda: len(done) == 1)


@pytest.mark.anyio
async def test_the_loop_stops_waiting_for_a_thread_that_blocks_and_waits_again_when_it_is_quick(
    runner: ThreadRunner,
) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    lane, goes_on = runner.lane(), threading.Event()

    async def step(work: Callable[[], object] = lambda: None) -> None:
        count = len(done)
        lane.submit(Step(dispatcher, done, work), dispatcher)
        await wait_until_async(lambda: len(done) > count)

    lane.submit(Step(dispatcher, done, goes_on.wait), dispatcher)
    await wait_until_async(lambda: runner.handovers.late == 1)
    goes_on.set()
    await wait_until_async(lambda: len(done) == 1)
    assert runner.handovers.quick == 0
    for _ in range(1000):  # the mean duration of calls falls
        await step()
        if runner.handovers.quick:
            return
    raise AssertionError(f"the loop still does not wait: {runner.handovers}")


@pytest.mark.anyio
async def test_a_call_that_waits_for_the_loop_gets_it(runner: ThreadRunner) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    loop = asyncio.get_running_loop()

    async def answer() -> int:
        return 42

    def ask() -> None:
        assert asyncio.run_coroutine_threadsafe(answer(), loop).result(30) == 42

    runner.lane().submit(Step(dispatcher, done, ask), dispatcher)
    await wait_until_async(lambda: len(done) == 1)


@pytest.mark.anyio
async def test_a_call_may_run_an_event_loop_of_its_own(runner: ThreadRunner) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    runner.lane().submit(Step(dispatcher, done, lambda: asyncio.run(asyncio.sleep(0))), dispatcher)
    await wait_until_async(lambda: len(done) == 1)


@pytest.mark.anyio
async def test_calls_of_several_threads_in_one_pass_all_arrive() -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    runner = ThreadRunner(spread=8)
    try:
        lanes = [runner.lane() for _ in range(16)]
        for _ in range(50):
            for lane in lanes:
                lane.submit(Step(dispatcher, done), dispatcher)
            await asyncio.sleep(0)
        await wait_until_async(lambda: len(done) == 50 * 16)
        assert len({step.thread for step in done}) == 8
    finally:
        runner.close()


def affinity(thread: threading.Thread) -> set[int]:
    assert thread.native_id is not None
    return os.sched_getaffinity(thread.native_id)


@pytest.fixture
def always_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each pass share a core, however few calls it has."""
    monkeypatch.setattr("openenv.server.runners.dispatcher.SHARED_FROM", 1)


several_cores = pytest.mark.skipif(
    not has_affinity() or cores() == 1, reason="there is only one core to pin threads to"
)


@several_cores
@pytest.mark.anyio
async def test_a_loop_and_its_threads_sleep_on_one_core_and_run_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenv.server.runners.dispatcher.WAIT_S", 30.0)  # a busy machine is not a slow step
    dispatcher, done, runner = current_dispatcher(), list[Step](), ThreadRunner(spread=3)
    every, loop_thread = os.sched_getaffinity(0), threading.current_thread()
    seen, loops = list[set[int]](), list[set[int]]()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        loops.append(affinity(loop_thread))

    try:
        lanes = [runner.lane() for _ in range(3)]
        for _ in range(3):
            done.clear()
            for lane in lanes:
                lane.submit(Step(dispatcher, done, look), dispatcher)
            await wait_until_async(lambda: len(done) == 3)
            assert os.sched_getaffinity(0) == every
        assert seen == [every] * 9
        workers = [affinity(worker.host.thread) for worker in lanes]  # type: ignore[attr-defined]
        assert {len(chosen) for chosen in workers + loops} == {1}
    finally:
        runner.close()


@several_cores
@pytest.mark.anyio
@pytest.mark.usefixtures("always_shared")
async def test_a_long_step_may_use_all_cores_and_so_may_the_loop(runner: ThreadRunner) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    every, goes_on, lane = os.sched_getaffinity(0), threading.Event(), runner.lane()
    lane.submit(Step(dispatcher, done), dispatcher)
    await wait_until_async(lambda: len(done) == 1)
    lane.submit(Step(dispatcher, done, goes_on.wait), dispatcher)
    await wait_until_async(lambda: runner.handovers.late + runner.handovers.apart > 0)
    assert affinity(lane.host.thread) == os.sched_getaffinity(0) == every  # type: ignore[attr-defined]
    goes_on.set()
    await wait_until_async(lambda: len(done) == 2)


@several_cores
@pytest.mark.anyio
@pytest.mark.usefixtures("always_shared")
async def test_cores_that_somebody_else_has_chosen_stay(runner: ThreadRunner) -> None:
    dispatcher, done = current_dispatcher(), list[Step]()
    every, lane, loop_thread = os.sched_getaffinity(0), runner.lane(), threading.current_thread()
    chosen = set[int]()

    def choose() -> None:
        assert loop_thread.native_id is not None
        chosen.update(every - affinity(loop_thread))
        os.sched_setaffinity(loop_thread.native_id, chosen)

    try:
        lane.submit(Step(dispatcher, done, choose), dispatcher)
        await wait_until_async(lambda: len(done) == 1)
        assert chosen
        assert os.sched_getaffinity(0) == chosen
    finally:
        os.sched_setaffinity(0, every)


@several_cores
@pytest.mark.anyio
@pytest.mark.usefixtures("always_shared")
async def test_steps_run_where_the_system_pins_no_threads(
    runner: ThreadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: int, cores: object) -> None:
        raise PermissionError

    dispatcher, done, lane = current_dispatcher(), list[Step](), runner.lane()
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for count in (1, 2, 3):
        lane.submit(Step(dispatcher, done), dispatcher)
        await wait_until_async(lambda expected=count: len(done) == expected)  # type: ignore[misc]


@pytest.mark.anyio
async def test_unknown_constructors_and_calls_of_a_slow_kind_do_not_hold_the_loop(runner: ThreadRunner) -> None:
    dispatcher, done, lane = current_dispatcher(), list[Step](), runner.lane()

    async def construct() -> None:
        count, step = len(done), Step(dispatcher, done)
        step.kind = "construct"
        lane.submit(step, dispatcher)
        await wait_until_async(lambda: len(done) > count)

    await construct()
    for seconds in (0.1, 0.0):
        for _ in range(100):
            runner.profile.record("construct", seconds)
        await construct()
    assert (runner.handovers.apart, runner.handovers.quick + runner.handovers.late) == (2, 1)
