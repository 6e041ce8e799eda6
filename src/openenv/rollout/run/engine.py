"""Running rollouts: one, many at once, or the verification of a stored one again.

`Engine` holds what rollouts share: backend, installed agent, capture proxy, scratch folder and store. `run_rollout`
makes an engine for one rollout, `run_many` one for all; `ray_engine` has one whose rollouts run on a cluster.
"""

# An engine and its rollouts:
#
#   Engine.__enter__    backends are checked, the agent is installed, scratch folder and capture proxy start
#     run(task A) --+
#     run(task B) --+-- at once, in threads: each has a folder of its own in the scratch folder, a key of the capture
#     run(task C) --+   proxy, and sandboxes that it opens and closes; the store takes records from all
#   Engine.__exit__     the proxy stops, the scratch folder is removed
#
# Threads: `run_rollout` works in the caller's, `run_many` in a pool, their async twins in a daemon thread beside the
# event loop. A `Cancellation` reaches all of them: it kills sandboxes, so nothing waits for an agent to end by itself.

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar

from typing_extensions import Unpack

from openenv import settings
from openenv.errors import CaptureError, RolloutError, StoreError
from openenv.rollout.agents.base import Agent, Installation
from openenv.rollout.agents.base import agent as agent_by_name
from openenv.rollout.cancellation import Cancellation
from openenv.rollout.capture.training_trace import Sequence as TokenSequence
from openenv.rollout.run.phases import ModelAccess, RolloutPlan, RolloutRun
from openenv.rollout.run.progress import OnProgress, ProgressBar, Reporter
from openenv.rollout.run.shared_setup import SetupGroup, SharedSetups, setup_key
from openenv.rollout.scratch import scratch
from openenv.rollout.store.archives import MAX_BYTES, UnusableWorktree
from openenv.rollout.store.outcome import Outcome, Status
from openenv.rollout.store.rollout_index import group_of
from openenv.rollout.store.store import EventLog, Record, RolloutStore, check_verdict_name
from openenv.rollout.store.verdict import Verdict, VerifierInput
from openenv.rollout.tasks.checks import AS_STORED, runs_nothing
from openenv.rollout.tasks.commands import sandbox_spec
from openenv.rollout.tasks.task import Budget, Check, Model, Task
from openenv.rollout.tasks.trust_levels import Trust
from openenv.rollout.verify.lint import require_trust
from openenv.rollout.verify.verifier import verify
from openenv.rollout.verify.worktree import merge_for
from openenv.sandboxes.base import HOME, WORKDIR, Sandboxes

if TYPE_CHECKING:
    from openenv.providers.ray_cluster import RayCluster
    from openenv.rollout.capture.capture_server import Capture, CaptureServer
    from openenv.rollout.run.ray_engine import RayEngine


logger = logging.getLogger(__name__)
OnOutcome = Callable[[int, Outcome], None]
CONCURRENCY = 4
_NOTICE_S = 0.5  # how late a Ctrl-C may be noticed
_T = TypeVar("_T")
_P = ParamSpec("_P")
# An id is the name of folders: in the scratch folder, in the store, of the captured calls.
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SCORED: frozenset[Status] = frozenset({"ok", "grader_failed", "policy_failed", "truncated"})
"""A rollout with one of these may have a reward once it is verified again: its agent ran."""


class RolloutSink(Protocol):
    """Where an engine keeps rollouts: a `RolloutStore`, or in a cluster what sends them to it."""

    captures: Path

    def begin(self, rollout_id: str, task: Task, /, *, about: Mapping[str, Any] | None = None) -> None:
        """Mark a rollout as running."""

    def live_file(self, rollout_id: str, name: str, /) -> Path:
        """Return where a file is written while it runs."""

    def keep_capture(self, rollout_id: str, records: Path, /) -> None:
        """Keep the records of its model calls, which are in that folder."""

    def add(
        self,
        outcome: Outcome,
        task: Task,
        /,
        *,
        worktree: Path | None = None,
        baseline: Path | None = None,
        agent_log: Path | None = None,
    ) -> object:
        """Keep its outcome and those of its files that exist."""


class EngineOptions(TypedDict, total=False):
    """The arguments of `Engine`, which `run_rollout` and `run_many` pass on."""

    agent: str | Agent
    sandbox: str | Sandboxes
    model: Model | None
    budget: Budget | None
    store: RolloutSink | None
    capture: CaptureServer | None
    options: Mapping[str, object] | None
    verify_sandbox: str | Sandboxes | None
    verify_truncated: bool
    min_trust: Trust | None
    home: str
    cache: Path | None
    on_install: Callable[[str], None] | None


class Engine:
    """Runs rollouts of one agent, with one model, in one kind of sandbox; from any number of threads at once.

    Args:
        agent: A driver or its name; `noop` and `oracle` need no model.
        sandbox: A backend or its name.
        model: The endpoint that the agent's calls go to, through the capture proxy.
        budget: What each rollout may spend on it.
        store: Where outcomes, work trees and model calls are kept; nothing is kept without one.
        capture: A running capture proxy to use; by default the engine starts its own.
        options: Options of the agent, as its driver knows them.
        verify_sandbox: The backend of the verifier's sandboxes; by default the same.
        verify_truncated: Verify the work tree of an agent whose time or budget ran out, too. If not, such a rollout
            has no reward, and an agent can drop a failure by waiting until its time is over.
        min_trust: Refuse tasks with a weaker check, as their own `min_trust` does.
        home: The home of the user inside; the work folder is `workdir` in it.
        cache: The folder of installed agents; by default `OPENENV_CACHE`.
        on_install: Gets a message for each agent that is being installed.

    Raises:
        AgentUnavailable: on entering, when the agent is not installed and cannot be.
        SandboxUnavailable: on entering, when the backend cannot run here.
        ValueError: the agent needs a model and there is none.
    """

    def __init__(
        self,
        *,
        agent: str | Agent = "opencode",
        sandbox: str | Sandboxes = "local",
        model: Model | None = None,
        budget: Budget | None = None,
        store: RolloutSink | None = None,
        capture: CaptureServer | None = None,
        options: Mapping[str, object] | None = None,
        verify_sandbox: str | Sandboxes | None = None,
        verify_truncated: bool = True,
        min_trust: Trust | None = None,
        home: str = HOME,
        cache: Path | None = None,
        on_install: Callable[[str], None] | None = None,
    ) -> None:
        self.agent = agent_by_name(agent)
        if self.agent.dialect is not None and model is None:
            raise ValueError(f"The agent '{self.agent.name}' needs a model")
        self.model, self.budget, self.store = model, budget or Budget(), store
        self._backend = named_backend(sandbox)
        self._verify_backend = self._backend if verify_sandbox is None else named_backend(verify_sandbox)
        self._options = dict(options or {})
        self._verify_truncated = verify_truncated
        self._min_trust = min_trust
        self._home = home
        self._cache = cache or settings.cache_dir()
        self._on_install = on_install or (lambda message: logger.info("%s", message))
        self._capture = capture
        self._installation = Installation()
        self._folder = Path()
        self._events = threading.Lock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Engine:
        with contextlib.ExitStack() as stack:
            for backend in {id(each): each for each in (self._backend, self._verify_backend)}.values():
                backend.check()
            self._installation = self.agent.install(self._cache, self._on_install)
            self._folder = stack.enter_context(scratch())
            if self.agent.dialect is not None and self._capture is None:
                # Imported here: agents without a model need no proxy.
                from openenv.rollout.capture.capture_server import CaptureOptions, CaptureServer

                root = self._folder / "captures" if self.store is None else self.store.captures
                self._capture = stack.enter_context(CaptureServer(root, CaptureOptions(sockets=self._folder)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def capture(self) -> CaptureServer | None:
        """The capture proxy that the agents' calls go through, once the engine is entered."""
        return self._capture

    def require_trust(self, task: Task) -> None:
        """Return if a task's checks can be trusted as far as it and this engine ask; nothing is run.

        Raises:
            TrustError: one cannot; the text names it and says how to write it.
        """
        backends = (self._backend, self._verify_backend)
        require_trust(task, self._min_trust, isolated=all("isolation" in each.features for each in backends))

    def require_sandboxes(self, task: Task) -> None:
        """Return if the backends open sandboxes as a task needs them; nothing is run.

        Raises:
            SandboxUnsupported: one has no images, or no network for the setup.
            SandboxUnavailable: what a sandbox needs is missing here.
        """
        needed = sandbox_spec(task)
        self._backend.require(replace(needed, network=task.network == "setup"))
        self._verify_backend.require(sandbox_spec(task, verifies=True))

    def run(
        self,
        task: Task,
        *,
        rollout_id: str | None = None,
        on_progress: OnProgress | None = None,
        cancel: Cancellation | None = None,
        metadata: Mapping[str, Any] | None = None,
        setup_group: SetupGroup | None = None,
    ) -> Outcome:
        """Run one rollout to its end; its failures are in the outcome.

        Args:
            setup_group: The rollouts that this one shares its setup with, as `run_many` has them.

        Raises:
            ValueError: the id cannot be the name of a folder.
            TrustError: a check of the task can be trusted less than `min_trust` says; nothing was run.
            SandboxUnsupported: the backend has no images, and the task names one; nothing was run.
            StoreError: the outcome could not be stored; it is in the exception.
        """
        self.require_trust(task)
        self.require_sandboxes(task)
        rollout_id = rollout_id or new_rollout_id()
        check_rollout_id(rollout_id)
        folder = self._folder / rollout_id
        try:
            folder.mkdir()
        except FileExistsError:
            raise RolloutError(f"A rollout '{rollout_id}' is running already") from None
        plan = RolloutPlan(
            rollout_id=rollout_id,
            task=task,
            agent=self.agent,
            installation=self._installation,
            backend=self._backend,
            verify_backend=self._verify_backend,
            verify=verify,
            folder=folder,
            home=self._home,
            model_name=self.model.name if self.model is not None else "",
            max_seconds=self.budget.max_seconds,
            options=self._options,
            metadata=dict(metadata or {}),
            verify_truncated=self._verify_truncated,
            log=None if self.store is None else self.store.live_file(rollout_id, "agent.log"),
            setup_group=setup_group,
        )
        try:
            if self.store is None:
                return self._run(plan, Reporter(rollout_id, on_progress, lock=self._events), cancel or Cancellation())
            # Begun, captured, added: in this order a record in the store means that all of the rollout is there, and
            # an engine that dies leaves a rollout that is listed as interrupted.
            self.store.begin(rollout_id, task, about=self._about(plan))
            with EventLog(self.store.live_file(rollout_id, "events.jsonl")) as events:
                reporter = Reporter(rollout_id, events, on_progress, lock=self._events)
                return self._run(plan, reporter, cancel or Cancellation())
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _about(self, plan: RolloutPlan) -> dict[str, str]:
        group = group_of(plan.metadata, plan.task.metadata)
        return {"agent": self.agent.name, "model": plan.model_name, "sandbox": plan.backend.name, "group": group}

    def _run(self, plan: RolloutPlan, reporter: Reporter, cancel: Cancellation) -> Outcome:
        rollout = RolloutRun(plan, ModelAccess(), reporter=reporter, cancel=cancel)
        if self._capture is None or self.model is None or self.agent.dialect is None:
            outcome = rollout.run()
        else:
            try:
                capture = self._capture.open(plan.rollout_id, self.model, budget=self.budget, metadata=plan.metadata)
            except CaptureError as exc:
                outcome = rollout.refuse("env_failed", str(exc))
            else:
                access = ModelAccess(self._capture, capture)
                rollout = RolloutRun(plan, access, reporter=reporter, cancel=cancel)
                with capture:
                    outcome = rollout.run()
                if self.store is None:
                    outcome.keep_sequences(_sequences(capture))
                else:
                    self.store.keep_capture(plan.rollout_id, capture.path)
        if self.store is not None:
            with reporter.during("store", "storing"):
                self.store.add(
                    outcome, plan.task, worktree=rollout.work, baseline=rollout.baseline, agent_log=rollout.log
                )
        reporter.phase = "done"
        reporter.say(f"{outcome.status}, reward {outcome.reward}")
        return outcome


def _sequences(capture: Capture) -> list[TokenSequence]:
    """Return what was sampled in a rollout whose outcome is there, whatever can be read of it."""
    try:
        return capture.sequences()
    except Exception:  # an agent writes a part of what is read
        logger.exception("the model calls of rollout %s cannot be read", capture.rollout_id)
        return []


def run_rollout(
    task: Task,
    *,
    rollout_id: str | None = None,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: bool = False,
    **engine: Unpack[EngineOptions],
) -> Outcome:
    """Run a task once and return its outcome; the arguments are those of `Engine` and `Engine.run`.

    A rollout that fails is an outcome with a status, not an exception.

    Args:
        progress: Show in a terminal or a notebook what it does; elsewhere nothing is shown.

    Raises:
        AgentUnavailable: the agent is not installed and cannot be.
        SandboxUnavailable: the backend cannot run here.
        TrustError: a check of the task can be trusted less than `min_trust` says; nothing was run.
        StoreError: the outcome could not be stored.
    """
    rollout_id = rollout_id or new_rollout_id()
    if on_progress is not None:  # the first use of an agent downloads it, which takes minutes
        engine.setdefault("on_install", Reporter(rollout_id, on_progress).say)
    with contextlib.ExitStack() as stack:
        if progress:
            bar = stack.enter_context(ProgressBar(1))
            on_progress = _both(bar.on_progress, on_progress)
            engine["on_install"] = _both(bar.on_install, engine.get("on_install"))
        shared = stack.enter_context(Engine(**engine))
        outcome = shared.run(task, rollout_id=rollout_id, on_progress=on_progress, cancel=cancel, metadata=metadata)
        if progress:
            bar.on_outcome(0, outcome)
        return outcome


def _both(first: Callable[_P, None], second: Callable[_P, None] | None) -> Callable[_P, None]:
    """Return a callback that calls two."""
    if second is None:
        return first

    def call(*arguments: _P.args, **named: _P.kwargs) -> None:
        first(*arguments, **named)
        second(*arguments, **named)

    return call


async def run_rollout_async(task: Task, *, cancel: Cancellation | None = None, **arguments: Any) -> Outcome:
    """Run a task once, off the event loop; cancelling the coroutine ends the rollout and frees everything first."""
    cancel = cancel or Cancellation()
    return await in_thread(lambda: run_rollout(task, cancel=cancel, **arguments), cancel)


async def in_thread(work: Callable[[], _T], cancel: Cancellation) -> _T:
    """Run blocking work in a thread; a cancelled coroutine cancels the work and waits for its end.

    The thread is a daemon and not one of the loop's executor: a rollout takes minutes, and many of them would leave no
    thread for anything else.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as exc:  # handed to the coroutine that waits
            result.set_exception(exc)

    threading.Thread(target=run, name="openenv-rollout", daemon=True).start()
    done = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        cancel.cancel("the coroutine was cancelled")
        with contextlib.suppress(Exception):
            await asyncio.shield(done)
        raise


def new_rollout_id() -> str:
    """Return a name that no other rollout has."""
    return secrets.token_hex(8)


def check_rollout_id(rollout_id: str) -> None:
    """Return if this can be the id of a rollout.

    Raises:
        ValueError: it cannot.
    """
    if not _ID.fullmatch(rollout_id):
        raise ValueError(f"{rollout_id!r} cannot be the id of a rollout: letters, digits, '.', '_', '-' can")


def named_backend(sandbox: str | Sandboxes) -> Sandboxes:
    """Return a backend from itself or from its name."""
    if isinstance(sandbox, Sandboxes):
        return sandbox
    from openenv.sandboxes.base import backend  # loads no backend before it is needed

    return backend(sandbox)


def run_many(
    tasks: Iterable[Task],
    *,
    concurrency: int | None = None,
    share_setup: bool = True,
    on: Literal["ray"] | RayCluster | None = None,
    retries: int | None = None,
    on_progress: OnProgress | None = None,
    on_outcome: OnOutcome | None = None,
    cancel: Cancellation | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: bool = False,
    **engine: Unpack[EngineOptions],
) -> list[Outcome]:
    """Run tasks, at most `concurrency` at once, and return their outcomes in the tasks' order.

    Where tasks have the same files and setup lines, such as n copies of one, the setup runs once, and each rollout
    begins in a fresh sandbox with a snapshot of what it left. Each runs its own where the backend has no snapshots, or
    the setup leaves more than files, such as a server.

    Args:
        tasks: What to run; may be a generator, which is advanced only when a thread is free.
        concurrency: How many rollouts run at once: by default 4, on Ray one for each processor that is free.
        share_setup: Pass False for setups that must differ between rollouts, such as those that draw random numbers.
            On Ray, rollouts share that run at the same time in one worker.
        on: `ray`, or a `RayCluster`, to run them on the nodes of a cluster (see `RayEngine`); by default on this
            machine. `concurrency` is then that of the whole cluster, and only this process writes to the store.
        retries: On Ray, how often a rollout is run again that ended as `sandbox_failed`, or whose node was lost; by
            default 2. No other outcome is repeated.
        on_progress: Gets the events of all; `rollout_id` tells them apart. Calls never overlap.
        on_outcome: Gets the number of a task and its outcome as soon as it is there. Calls never overlap.
        cancel: Ends all that run; those that have not begun get the status `cancelled`, unless `tasks` is a generator.
        progress: Show a bar in a terminal or a notebook: what is installed, how many are done, their mean reward.
        engine: The arguments of `Engine`.

    Raises:
        TrustError: a check of a task can be trusted less than `min_trust` says. Nothing was run, unless `tasks` is a
            generator.
        StoreError: an outcome could not be stored; the rollouts that still ran were cancelled.
        RolloutError: on Ray: it is not installed, there is no such cluster, or it has started no worker in time.
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError("concurrency must be at least 1")
    cancel = cancel or Cancellation()
    known = list(tasks) if isinstance(tasks, Sized) else None
    # The pool ends before the engine: no rollout runs when snapshots, proxy and scratch folder go.
    with contextlib.ExitStack() as stack:
        if progress:
            bar = stack.enter_context(ProgressBar(None if known is None else len(known)))
            on_progress, on_outcome = _both(bar.on_progress, on_progress), _both(bar.on_outcome, on_outcome)
            engine["on_install"] = _both(bar.on_install, engine.get("on_install"))
        shared: Engine | RayEngine
        setups: SharedSetups | None = None
        if on is None:
            if retries is not None:
                raise ValueError("retries needs a cluster: pass on='ray' as well")
            shared, concurrency = stack.enter_context(Engine(**engine)), concurrency or CONCURRENCY
            setups = stack.enter_context(SharedSetups(known)) if share_setup else None
        else:
            shared = stack.enter_context(cluster_engine(on, concurrency, retries, share_setup, engine))
            concurrency = shared.concurrency
        pool = stack.enter_context(ThreadPoolExecutor(concurrency, "openenv-rollout"))
        for task in known or ():
            shared.require_trust(task)
            shared.require_sandboxes(task)
        batch = _Batch(
            shared,
            tasks if known is None else known,
            setups,
            on_progress,
            on_outcome,
            cancel,
            metadata,
        )
        try:
            # Each thread takes one task after another, so that a generator of tasks is not read ahead. The wait is
            # here and not in the end of the pool, which joins: Python up to 3.12 takes a thread for ended when Ctrl-C
            # interrupts its `join`. It is short, because a signal that another thread of the process gets does not end
            # it: Ctrl-C would be noticed when all rollouts are over.
            running = {pool.submit(batch.work) for _ in range(concurrency)}
            while running:
                running = wait(running, timeout=_NOTICE_S).not_done
        except BaseException:  # Ctrl-C, or the process has too many threads
            cancel.cancel("interrupted")
            raise
    if batch.error is not None:
        raise batch.error
    return [outcome for _, outcome in sorted(batch.outcomes.items())]


def cluster_engine(
    on: Literal["ray"] | RayCluster,
    concurrency: int | None,
    retries: int | None,
    share_setup: bool,
    options: EngineOptions,
) -> RayEngine:
    from openenv.providers.ray_cluster import RayCluster  # most rollouts need no cluster
    from openenv.rollout.run.ray_engine import RETRIES, RayEngine

    if on != "ray" and not isinstance(on, RayCluster):
        raise ValueError(f"on must be 'ray' or a RayCluster, not {on!r}")
    return RayEngine(
        None if on == "ray" else on,
        concurrency=concurrency,
        retries=RETRIES if retries is None else retries,
        share_setup=share_setup,
        **options,
    )


async def run_many_async(
    tasks: Iterable[Task], *, cancel: Cancellation | None = None, **arguments: Any
) -> list[Outcome]:
    """Run tasks off the event loop; cancelling the coroutine ends all of them and frees everything first."""
    cancel = cancel or Cancellation()
    return await in_thread(lambda: run_many(tasks, cancel=cancel, **arguments), cancel)


@dataclass(slots=True)
class _BatchTask:
    """A task of a batch."""

    number: int
    task: Task
    setup_key: str | None
    group: SetupGroup | None = None
    """From when it was chosen to run."""


class _Batch:
    """The tasks of one `run_many` and their outcomes; its threads share it."""

    def __init__(
        self,
        engine: Engine | RayEngine,
        tasks: Iterable[Task],
        setups: SharedSetups | None,
        on_progress: OnProgress | None,
        on_outcome: OnOutcome | None,
        cancel: Cancellation,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self._engine, self._setups, self._cancel = engine, setups, cancel
        self._tasks: Iterator[tuple[int, Task]] = enumerate(tasks)
        self._is_finite = isinstance(tasks, Sized)
        self._deferred: list[_BatchTask] = []  # those that would have waited for the setup of another rollout
        self._on_progress, self._on_outcome, self._metadata = on_progress, on_outcome, metadata
        self._lock = threading.Lock()
        self.outcomes: dict[int, Outcome] = {}
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run tasks until none is left."""
        try:
            while (entry := self._next()) is not None:
                try:
                    outcome = self._run(entry)
                finally:
                    if self._setups is not None:
                        self._setups.leave(entry.setup_key)
                with self._lock:
                    self.outcomes[entry.number] = outcome
                    if self._on_outcome is not None:
                        self._on_outcome(entry.number, outcome)
        except BaseException as exc:  # of the task list, the store or a callback: the caller's, not a rollout's
            with self._lock:
                self.error = self.error or exc
            self._cancel.cancel(f"another rollout could not be handled: {exc}")

    def _next(self) -> _BatchTask | None:
        with self._lock:
            if self.error is not None or (self._cancel.cancelled and not self._is_finite):
                return None
            entry = self._choose()
            if entry is not None and self._setups is not None:
                entry.group = self._setups.join(entry.setup_key)
            return entry

    def _choose(self) -> _BatchTask | None:
        """Return the next task, but none that would only wait for a setup that runs while there are others."""
        for position, entry in enumerate(self._deferred):
            if not self._would_wait(entry):
                return self._deferred.pop(position)
        for number, task in self._tasks:
            entry = _BatchTask(number, task, setup_key(task))
            if not (self._is_finite and self._would_wait(entry)):  # a generator is not read ahead
                return entry
            self._deferred.append(entry)
        return self._deferred.pop(0) if self._deferred else None

    def _would_wait(self, entry: _BatchTask) -> bool:
        return self._setups is not None and self._setups.is_pending(entry.setup_key)

    def _run(self, entry: _BatchTask) -> Outcome:
        task = entry.task
        if self._cancel.cancelled:
            return Outcome(
                rollout_id=new_rollout_id(),
                task_id=task.task_id,
                status="cancelled",
                phase="sandbox",
                reason=self._cancel.reason,
                agent=self._engine.agent.name,
            )
        if entry.group is None:
            return self._engine.run(task, on_progress=self._on_progress, cancel=self._cancel, metadata=self._metadata)
        assert isinstance(self._engine, Engine)  # in a cluster, workers know the groups
        return self._engine.run(
            task,
            on_progress=self._on_progress,
            cancel=self._cancel,
            metadata=self._metadata,
            setup_group=entry.group,
        )


def reverify(
    store: RolloutStore,
    rollout_id: str,
    *,
    lines: Sequence[str | Check] | None = None,
    verify_files: Mapping[str, str | bytes] | None = None,
    task: Task | None = None,
    verdict: str | None = None,
    sandbox: str | Sandboxes = "local",
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> Outcome:
    """Verify a stored rollout again, without model and agent, and add the verdict to the store.

    The store goes on reporting the first verdict; `verdict="last"`, or the name of this one, asks for another.

    Args:
        store: Where the rollout is.
        rollout_id: Which one; the beginning of its id is enough.
        lines: Verify lines, or checks, in place of the task's.
        verify_files: Files in place of the task's `verify_files`.
        task: A whole task in place of the stored one; of it only what the verifier reads counts.
        verdict: A name for the verdict, the same for all rollouts that are verified together; by default a new id.
        sandbox: A backend or its name.

    Raises:
        StoreError: there is no such rollout, no work tree was kept of it, or it has a verdict of that name.
        RolloutError: a verify line is blank or a comment.
        TrustError: a check can be trusted less than the task's `min_trust` says.
        RolloutCancelled: it was cancelled; nothing was stored.
    """
    first = store.history(rollout_id)[-1]  # the rollout itself: its status says how the agent ended
    worktree, baseline = _kept(store, first)
    changes: dict[str, object] = {}
    if lines is not None:
        changes["verify"] = tuple(lines)
    if verify_files is not None:
        changes["verify_files"] = dict(verify_files)
    # The instruction, which may be empty in an old task, plays no part; the checks do.
    task = Task.model_validate({**(task or first.task).model_dump(), **changes}, context=AS_STORED)
    if any(map(runs_nothing, task.verify_texts())):
        raise RolloutError("A verify line is blank or a comment: it would pass whatever the agent did")
    if verdict is not None:
        check_verdict_name(verdict)
    backend = named_backend(sandbox)
    require_trust(task, None, isolated="isolation" in backend.features)
    backend.check()
    backend.require(sandbox_spec(task, verifies=True))
    reporter = Reporter(first.rollout_id, on_progress)
    started_at = time.time()
    with scratch() as folder, reporter.during("verify", "verifying in a fresh sandbox"):
        given = VerifierInput(
            worktree=_merged(worktree, baseline, folder, task),
            baseline=baseline,
            cancel=cancel or Cancellation(),
            report=reporter.say,
        )
        result = verify(task, backend, given)
    outcome = _outcome(first, result, backend, reporter, started_at)
    store.add_verification(outcome, task, verdict=verdict)
    return outcome


def _kept(store: RolloutStore, first: Record) -> tuple[Path | None, Path | None]:
    worktree = store.file(first.rollout_id, "worktree.tar")
    baseline = store.file(first.rollout_id, "baseline.tar")
    # An agent whose tree could not be taken has none: what the setup left is verified, as it was in the rollout.
    if worktree is None and not _has_lost_worktree(first.outcome):
        raise StoreError(
            f"No work tree was kept of rollout '{first.rollout_id}': it ended as {first.outcome.status} in the "
            f"{first.outcome.phase} phase"
        )
    return worktree, baseline


def _has_lost_worktree(outcome: Outcome) -> bool:
    # Records of earlier versions have no mark, and lost it in that phase only.
    return "lost_worktree" in outcome.metadata or (outcome.status == "policy_failed" and outcome.phase == "collect")


def _merged(worktree: Path | None, baseline: Path | None, folder: Path, task: Task) -> Path | None:
    if worktree is None:
        return None
    target = folder / "merged.tar"
    try:
        merge_for(task, worktree, baseline, target, root=task.workdir or WORKDIR, max_bytes=MAX_BYTES)
    except UnusableWorktree:  # as in the rollout itself, what the setup left is verified
        return None
    return target


def _outcome(first: Record, verdict: Verdict, backend: Sandboxes, reporter: Reporter, started_at: float) -> Outcome:
    before = first.outcome
    # Only the verifier runs again, so only its part of the status can change: a truncated agent stays truncated.
    status, phase, reason = before.status, before.phase, before.reason
    if status in ("ok", "grader_failed"):
        if verdict.crash is not None:
            status, phase, reason = "grader_failed", "verify", verdict.crash
        elif _has_lost_worktree(before):
            status, phase, reason = "policy_failed", "collect", "the work tree could not be taken"
        else:
            status, phase, reason = "ok", "done", None
    return before.model_copy(
        update={
            "status": status,
            "phase": phase,
            "reason": reason,
            "reward": verdict.reward if status in _SCORED else None,
            "trust": verdict.trust,
            "verify_results": verdict.results,
            "sandbox": backend.name,
            "sandbox_id": verdict.sandbox_id,
            "started_at": started_at,
            "wall_s": reporter.elapsed_s,
            "phase_s": dict(reporter.phase_s),
        }
    )
