"""Many rollouts at once: bounded, in the order they were given, each in a thread of its own.

Knows threads and queues. What a rollout is, the engine knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from openenv.rollout.engine import Engine, in_thread, new_rollout_id
from openenv.rollout.outcome import Outcome
from openenv.rollout.progress import Cancellation, OnProgress
from openenv.rollout.task import Task

OnOutcome = Callable[[int, Outcome], None]
CONCURRENCY = 4


def run_many(
    tasks: Iterable[Task],
    *,
    concurrency: int = CONCURRENCY,
    on_progress: OnProgress | None = None,
    on_outcome: OnOutcome | None = None,
    cancel: Cancellation | None = None,
    metadata: Mapping[str, Any] | None = None,
    **engine: Any,
) -> list[Outcome]:
    """Run tasks, at most `concurrency` at once, and return their outcomes in the tasks' order.

    Args:
        tasks: What to run; taken one by one as there is room, so it may be a generator.
        concurrency: How many rollouts run at once.
        on_progress: Gets the events of all; `rollout_id` tells them apart. Never called twice at once.
        on_outcome: Gets the number of a task and its outcome as soon as it is there. Never called twice at once.
        cancel: Ends all that run; those that have not begun get the status `cancelled`, unless `tasks` is a generator.
        engine: The arguments of `Engine`.

    Raises:
        StoreError: an outcome could not be stored; the rollouts that still ran were cancelled.
    """
    if concurrency < 1:
        raise ValueError("concurrency must be at least 1")
    cancel = cancel or Cancellation()
    with Engine(**engine) as shared:
        crew = _Crew(shared, tasks, on_progress, on_outcome, cancel, metadata)
        try:
            crew.start(concurrency)
            crew.is_idle.wait()
        except BaseException:  # Ctrl-C: nothing may be left running
            cancel.cancel("interrupted")
            crew.is_idle.wait()
            raise
    if crew.error is not None:
        raise crew.error
    return [outcome for _, outcome in sorted(crew.outcomes.items())]


async def run_many_async(
    tasks: Iterable[Task], *, cancel: Cancellation | None = None, **arguments: Any
) -> list[Outcome]:
    """Run tasks off the event loop; cancelling the coroutine ends all of them and frees everything first."""
    cancel = cancel or Cancellation()
    return await in_thread(lambda: run_many(tasks, cancel=cancel, **arguments), cancel)


class _Crew:
    """The threads that share a list of tasks."""

    def __init__(
        self,
        engine: Engine,
        tasks: Iterable[Task],
        on_progress: OnProgress | None,
        on_outcome: OnOutcome | None,
        cancel: Cancellation,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self._engine, self._cancel = engine, cancel
        self._tasks: Iterator[tuple[int, Task]] = enumerate(tasks)
        self._is_finite = isinstance(tasks, Sized)
        self._on_progress, self._on_outcome, self._metadata = on_progress, on_outcome, metadata
        self._lock = threading.Lock()
        self._at_work = 0
        # Not `Thread.join`: when Ctrl-C interrupts it, Python up to 3.12 takes the thread for ended.
        self.is_idle = threading.Event()
        self.is_idle.set()
        self.outcomes: dict[int, Outcome] = {}
        self.error: BaseException | None = None

    def start(self, count: int) -> None:
        """Begin to work, with that many threads."""
        for number in range(count):
            with self._lock:
                self._at_work += 1
                self.is_idle.clear()
            try:
                threading.Thread(target=self._work_to_the_end, name=f"openenv-rollout-{number}").start()
            except RuntimeError:  # there are too many already
                self._leave()
                raise

    def _work_to_the_end(self) -> None:
        try:
            self.work()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._at_work -= 1
            if self._at_work == 0:
                self.is_idle.set()

    def work(self) -> None:
        try:
            while (entry := self._next()) is not None:
                number, task = entry
                self._done(number, self._run(task))
        except BaseException as exc:  # of the task list, the store or a callback: the caller's, not a rollout's
            with self._lock:
                self.error = self.error or exc
            self._cancel.cancel(f"another rollout could not be handled: {exc}")

    def _next(self) -> tuple[int, Task] | None:
        with self._lock:
            if self.error is not None or (self._cancel.cancelled and not self._is_finite):
                return None
            return next(self._tasks, None)

    def _run(self, task: Task) -> Outcome:
        if self._cancel.cancelled:
            return Outcome(
                rollout_id=new_rollout_id(),
                task_id=task.task_id,
                status="cancelled",
                phase="sandbox",
                reason=self._cancel.reason,
                agent=self._engine.agent.name,
            )
        return self._engine.run(task, on_progress=self._on_progress, cancel=self._cancel, metadata=self._metadata)

    def _done(self, number: int, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[number] = outcome
            if self._on_outcome is not None:
                self._on_outcome(number, outcome)
