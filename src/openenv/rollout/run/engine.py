"""The engine: runs one rollout at a time, in any number of threads, and frees everything at its end.

`Engine` owns what rollouts share: sandbox backend, installed agent, capture proxy, scratch folder and store.
`run_rollout` makes an engine for one rollout. `batch.run_many` makes one for many, `ray_engine` one on a cluster.
Knows nothing about the steps inside a rollout: `phases.RolloutRun` does.
"""

# An engine and its rollouts:
#
#   Engine.__enter__    check the backends, install the agent, create the scratch folder, start the capture proxy
#     validate(task)      run its checks without an agent, once: `validation.py`
#     run(task A) --+
#     run(task B) --+-- in threads. Each rollout has its own folder in the scratch folder, its own key of the capture
#     run(task C) --+   proxy, and sandboxes that it opens and closes. All rollouts write to one store.
#   Engine.__exit__     stop the proxy, remove the scratch folder
#
# Threads: `run_rollout` works in the caller's thread, `run_many` in a pool. Their async twins use a daemon thread
# beside the event loop. A `Cancellation` reaches every thread: it kills sandboxes, so no thread waits for an agent.

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar

from typing_extensions import Unpack

from openenv import settings
from openenv.errors import CaptureError, RolloutCancelled, RolloutError, SandboxGone
from openenv.rollout.agents.base import Agent, Installation
from openenv.rollout.agents.base import agent as agent_by_name
from openenv.rollout.agents.builtin import Noop, Oracle
from openenv.rollout.capture.records import FILE, Recorder
from openenv.rollout.capture.training_trace import Sequence as TokenSequence
from openenv.rollout.progress import Alarms, Cancellation, OnProgress, Progress, Reporter
from openenv.rollout.run.phases import ModelAccess, RolloutPlan, RolloutRun
from openenv.rollout.run.recorded_files import (
    NotRestorable,
    RestoredStart,
    restored_start,
)
from openenv.rollout.run.shared_setup import SetupGroup
from openenv.rollout.run.validation import Validation, Validator, ValidatorOptions
from openenv.rollout.store.outcome import Outcome, group_of
from openenv.rollout.store.store import RolloutStore, check_is_no_folder
from openenv.rollout.tasks.model_parameters import derived_seed
from openenv.rollout.tasks.task import BranchPoint, Budget, Model, Task, Trust, sandbox_spec
from openenv.rollout.verify.verifier import verify
from openenv.sandboxes.base import HOME, Sandboxes
from openenv.sandboxes.fixed_clock import clock_seconds
from openenv.sandboxes.host import scratch

if TYPE_CHECKING:
    from rich.console import Console

    from openenv.rollout.capture.capture_server import Capture, CaptureServer, ProxyOrder

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_P = ParamSpec("_P")
_BAR_TEXT = 120
PLACES = ".places"
"""The folder of `VerifierInput.places` in the scratch folder. No rollout ID starts with a dot."""
REPEATABLE_ENVS: Mapping[str, str] = {
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "1767225600",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
}
"""Environment variables of the agent in a run with a seed: hashes of Python, dates in build results, the time zone, and
the order of names. The clock runs, unless `clock` fixes it."""
# An ID is the name of a folder in the scratch folder, in the store and among the captured calls.
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class WorkerLost(Exception):
    """The process that ran a rollout has died, or its node; the text says how."""


class WorkerProxies(ABC):
    """The capture proxies of all workers, as one: `GroupStream` pauses them."""

    def hold(self) -> None:
        """Hold back new model calls until `resume`, without waiting for those under way."""
        self._order_all("hold")

    def pause(self) -> None:
        """Hold back new model calls until `resume`; return when those under way have ended."""
        self._order_all("pause")

    def resume(self) -> None:
        """Release the model calls that `pause` or `hold` held back."""
        self._order_all("resume")

    @abstractmethod
    def _order_all(self, order: ProxyOrder) -> None:
        """Send an order to all workers; those that start later get it too."""


class RolloutSink(Protocol):
    """The store of an engine: a `RolloutStore`, or on a cluster an object that sends the files to one."""

    captures: Path
    """The folder of the journals."""

    def begin(self, rollout_id: str, task: Task, /, *, about: Mapping[str, Any] | None = None) -> None:
        """Mark a rollout as running."""

    def live_file(self, rollout_id: str, name: str, /) -> Path:
        """Return the path of a file that is written during the rollout."""

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
        """Store the outcome, and each of the files that exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of an engine. `run_rollout`, `run_many` and `rollouts` take its fields as keyword arguments."""

    agent: str | Agent = "opencode"
    """A driver or its name; `noop` and `oracle` need no model."""
    sandbox: str | Sandboxes = "local"
    """A sandbox backend or its name."""
    model: Model | None = None
    """The endpoint that receives the agent's calls through the capture proxy."""
    budget: Budget | None = None
    """The limits of each rollout's model calls."""
    store: RolloutSink | None = None
    """Keeps outcomes, work trees and model calls; None discards them."""
    capture: CaptureServer | None = None
    """A running capture proxy to use; None starts one for the engine."""
    options: Mapping[str, object] | None = None
    """Options of the agent; its driver defines them."""
    verify_sandbox: str | Sandboxes | None = None
    """The backend of the verifier's sandboxes; None uses `sandbox`."""
    verify_truncated: bool = True
    """Verify the work of an agent that ran out of time or budget. If False, such a rollout has no reward, and an agent
    can discard a failure by waiting until its time is over."""
    min_trust: Trust | None = None
    """Refuse tasks whose checks have a lower trust level, in addition to each task's own `min_trust`."""
    validate_checks: bool | None = None
    """Run the checks of a task on its initial files and its solution before its first agent, and keep the results. None
    uses `OPENENV_VALIDATE_CHECKS`. The agents `noop` and `oracle` are such runs themselves and need no validation."""
    warm_sandboxes: int = 0
    """Keep so many pairs of sandboxes ready for each kind of task that was run before: one for the agent, one for the
    verifier. Rollouts then start at once; every sandbox is still used once. Each worker process keeps as many."""
    home: str = HOME
    """The user's home folder inside the sandbox; the work folder is `workdir` below it."""
    seed: int | None = None
    """Makes runs repeatable: the seed of each model call is derived from this number, the rollout's group and sample,
    and the number of the call. The agent's commands get `REPEATABLE_ENVS`."""
    clock: str | None = None
    """The time that all commands of the agent see, such as `2026-01-01 12:00`, in UTC. For dynamically linked programs
    on x86-64; times of files are real."""
    record_files: bool = False
    """Record the agent's files before each model call in the store, so that branches can start from them. For agents
    that can skip work (`Agent.can_skip`), in local and Docker sandboxes of this machine."""
    cache: Path | None = None
    """The folder of installed agents and validated checks; None uses `OPENENV_CACHE`."""
    on_install: Callable[[str], None] | None = None
    """Called with a message when an agent is installed or the checks of a task are validated."""

    def __post_init__(self) -> None:
        check_is_no_folder(self.store)
        if self.clock is not None:
            clock_seconds(self.clock)

    def described(self) -> dict[str, Any]:
        """Return the options that `openenv rollouts resume` needs, as JSON values without secrets."""
        # Objects of the caller are described by their names: only their program can resume such rollouts.
        described = None
        if self.model is not None:
            from openenv.rollout.capture.captured_rollout import Redactor  # agents without a model need no proxy

            model = self.model.model_dump(mode="json", exclude={"api_key", "extra_headers"}, exclude_defaults=True)
            described = Redactor(self.model).value(model)
        sandboxes = [each.name if isinstance(each, Sandboxes) else each for each in (self.sandbox, self.verify_sandbox)]
        return {
            "agent": self.agent.name if isinstance(self.agent, Agent) else self.agent,
            "sandbox": sandboxes[0],
            "verify_sandbox": sandboxes[1],
            "model": described,
            "budget": None if self.budget is None else self.budget.model_dump(mode="json"),
            "options": {name: value for name, value in (self.options or {}).items() if _is_plain(value)},
            "verify_truncated": self.verify_truncated,
            "min_trust": self.min_trust,
            "home": self.home,
            "seed": self.seed,
            "clock": self.clock,
            "record_files": self.record_files,
        }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


class EngineArguments(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments; mypy compares both lists."""

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
    validate_checks: bool | None
    warm_sandboxes: int
    home: str
    seed: int | None
    clock: str | None
    record_files: bool
    cache: Path | None
    on_install: Callable[[str], None] | None


class RunArguments(TypedDict, total=False):
    """The keyword arguments of `Engine.run` and `Engine.resume` that are not stored."""

    on_progress: OnProgress | None
    cancel: Cancellation | None
    setup_group: SetupGroup | None
    """The rollouts that share the setup of this one, as in `run_many`."""


class Engine:
    """Runs rollouts of one agent, with one model, in one kind of sandbox, from any number of threads at once.

    Raises:
        AgentUnavailable: on entering, if the agent is not installed and cannot be downloaded.
        SandboxUnavailable: on entering, if the backend cannot run here.
        ValueError: the agent needs a model, but the options have none.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.agent = agent_by_name(options.agent)
        if self.agent.dialect is not None and options.model is None:
            raise ValueError(f"The agent '{self.agent.name}' needs a model")
        if options.seed is not None and options.model is not None:
            seeded_model(options.model, options.seed)  # refuses a model with a seed of its own
        self._backend = named_backend(options.sandbox)
        self._verify_backend = (
            self._backend if options.verify_sandbox is None else named_backend(options.verify_sandbox)
        )
        if options.warm_sandboxes < 0:
            raise ValueError("warm_sandboxes must not be negative")
        self._budget = options.budget or Budget()
        self._capture = options.capture
        # The rest exists while the engine is entered.
        self._installation = Installation()
        self._warm: dict[str, Sandboxes] = {}
        self._folder = Path()
        self._validator: Validator | None = None
        self._described: dict[str, Any] | None = None
        self._events = threading.Lock()
        self._alarms = Alarms()
        self._restoring = threading.Lock()
        self._restored: dict[BranchPoint, RestoredStart | str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Engine:
        options = self.options
        with contextlib.ExitStack() as stack:
            for backend in {id(each): each for each in (self._backend, self._verify_backend)}.values():
                backend.check()
            report = options.on_install or (lambda message: logger.info("%s", message))
            self._installation = self.agent.install(options.cache or settings.cache_dir(), report)
            self._folder = stack.enter_context(scratch())
            self._warm = self._warm_backends(stack)
            self._validator = self._new_validator(report)
            if self.agent.dialect is not None and options.capture is None:
                # Imported here: agents without a model need no proxy.
                from openenv.rollout.capture.capture_server import CaptureOptions, CaptureServer

                root = self._folder / "captures" if options.store is None else options.store.captures
                is_durable = isinstance(options.store, RolloutStore)
                listening = CaptureOptions(sockets=self._folder, holds_calls=True, is_durable=is_durable)
                proxy = CaptureServer(root, listening)
                self._capture = stack.enter_context(proxy)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _warm_backends(self, stack: contextlib.ExitStack) -> dict[str, Sandboxes]:
        """Return the backends of agents and verifiers that keep sandboxes ready; they end before the scratch folder."""
        if self.options.warm_sandboxes == 0:
            return {}
        from openenv.sandboxes.pool import WarmSandboxes  # most rollouts use none

        agents = stack.enter_context(WarmSandboxes(self._backend, ready=self.options.warm_sandboxes))
        verifiers = stack.enter_context(WarmSandboxes(self._verify_backend, ready=self.options.warm_sandboxes))
        return {"agent": agents, "verifier": verifiers}

    def _new_validator(self, report: Callable[[str], None]) -> Validator | None:
        options, chosen = self.options, self.options.validate_checks
        validates = settings.validate_checks() if chosen is None else chosen
        if not validates or isinstance(self.agent, Noop | Oracle):
            return None
        folder = self._folder / ".validation"  # cannot be the folder of a rollout
        folder.mkdir()
        return Validator(
            ValidatorOptions(
                backend=self._backend,
                verify_backend=self._verify_backend,
                verify=verify,
                folder=folder,
                cache=(options.cache or settings.cache_dir()) / "checks",
                home=options.home,
                report=report,
            )
        )

    @property
    def capture(self) -> CaptureServer | None:
        """The capture proxy of the agents' calls, after the engine was entered."""
        return self._capture

    def require_trust(self, task: Task) -> None:
        """Check the trust level of a task's checks against the task and the engine; runs nothing.

        Raises:
            TrustError: a check has a lower level; the text names the check and says how to write it.
        """
        if self.options.min_trust is None and task.min_trust is None:
            return
        from openenv.rollout.verify.lint import require_trust  # most tasks require no level

        backends = (self._backend, self._verify_backend)
        require_trust(task, self.options.min_trust, isolated=all("isolation" in each.features for each in backends))

    def require_sandboxes(self, task: Task) -> None:
        """Check that the backends can open the task's sandboxes; runs nothing.

        Raises:
            SandboxUnsupported: a backend has no images, or no network for the setup.
            SandboxUnavailable: this machine lacks something that the sandbox needs.
        """
        needed = sandbox_spec(task)
        self._backend.require(replace(needed, network=task.network == "setup"))
        self._verify_backend.require(sandbox_spec(task, verifies=True))

    def validate(self, task: Task, cancel: Cancellation | None = None) -> Validation:
        """Run the checks of a task on its initial files and on its solution, unless their results are kept.

        Raises:
            TaskRefused: a check fails on the task's own solution; the text shows the check and its output.
        """
        if self._validator is None:
            return Validation()
        try:
            return self._validator.validate(task, cancel or Cancellation())
        except RolloutCancelled:  # the rollouts of the task end as cancelled
            return Validation()

    def run(
        self,
        task: Task,
        *,
        rollout_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        start: BranchPoint | None = None,
        **watch: Unpack[RunArguments],
    ) -> Outcome:
        """Run one rollout to its end. A failure of the rollout is a status of the outcome, not an exception.

        Args:
            metadata: Labels that are stored with the outcome.
            start: Start at a call of another rollout of the store: the agent gets its recorded answers first.
            watch: `on_progress`, `cancel` and `setup_group`.

        Raises:
            ValueError: the ID cannot be the name of a folder.
            TrustError: a check of the task has a lower trust level than required; nothing was run.
            TaskRefused: a check fails on the task's own solution; no agent was run.
            SandboxUnsupported: the task needs an image and the backend has none; nothing was run.
            StoreError: the outcome could not be stored; the exception carries it.
        """
        rollout_id = rollout_id or new_rollout_id()
        check_rollout_id(rollout_id)
        if start is not None and not start.is_branch and self.agent.dialect is None:
            start = None  # there are no answers to take over
        return self._run_plan(replace(self._plan(task, rollout_id, metadata), start=start), **watch)

    def resume(self, rollout_id: str, **watch: Unpack[RunArguments]) -> Outcome:
        """Run an interrupted rollout of the store again, in a fresh sandbox; its agent gets the recorded answers.

        Raises:
            ValueError: the engine has no `RolloutStore`.
            StoreError: the rollout has ended or runs elsewhere, or as in `run`.
            TrustError, TaskRefused, SandboxUnsupported: as in `run`.
        """
        store = self.options.store
        if not isinstance(store, RolloutStore):
            raise ValueError("resume needs the store of the interrupted rollouts: pass store=")
        task, begun = store.resume(rollout_id)
        try:
            plan = self._plan(task, rollout_id, begun.metadata)
            return self._run_plan(replace(plan, start=begun.start, is_resumed=True), **watch)
        finally:
            store.release(rollout_id)  # after an exception, it can be resumed again

    def _run_plan(
        self,
        plan: RolloutPlan,
        *,
        on_progress: OnProgress | None = None,
        cancel: Cancellation | None = None,
        setup_group: SetupGroup | None = None,
    ) -> Outcome:
        task, rollout_id = plan.task, plan.rollout_id
        cancel = cancel or Cancellation()
        self.require_trust(task)
        self.require_sandboxes(task)
        try:
            plan.folder.mkdir()
        except FileExistsError:
            raise RolloutError(f"A rollout '{rollout_id}' is running already") from None
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, plan.folder, ignore_errors=True)
            validation = self.validate(task, cancel)
            plan = replace(plan, references=validation.references, setup_group=setup_group)
            # The order is begin, journal, record. A record in the store therefore means that the rollout is complete,
            # and a rollout whose engine died is listed as interrupted.
            if self.options.store is not None and not plan.is_resumed:
                self.options.store.begin(rollout_id, task, about=self.about(task, plan.metadata, plan.start))
            reporter = Reporter(rollout_id, on_progress, lock=self._events)
            return self._run(plan, reporter, cancel, validation.failure, stack)

    def _plan(self, task: Task, rollout_id: str, metadata: Mapping[str, Any] | None) -> RolloutPlan:
        options, store = self.options, self.options.store
        return RolloutPlan(
            rollout_id=rollout_id,
            task=task,
            agent=self.agent,
            installation=self._installation,
            backend=self._warm.get("agent", self._backend),
            verify_backend=self._warm.get("verifier", self._verify_backend),
            verify=verify,
            folder=self._folder / rollout_id,
            places=self._folder / PLACES,
            alarms=self._alarms,
            home=options.home,
            model_name=options.model.name if options.model is not None else "",
            max_seconds=self._budget.max_seconds,
            agent_envs={} if options.seed is None else dict(REPEATABLE_ENVS),
            clock=None if options.clock is None else clock_seconds(options.clock),
            options=dict(options.options or {}),
            metadata=dict(metadata or {}),
            verify_truncated=options.verify_truncated,
            log=None if store is None else store.live_file(rollout_id, "agent.log"),
            record_files=options.record_files and isinstance(store, RolloutStore),
        )

    def about(self, task: Task, metadata: Mapping[str, Any] | None, start: BranchPoint | None = None) -> dict[str, Any]:
        """Return the description of a rollout for its journal."""
        model, labels = self.options.model, dict(metadata or {})
        self._described = self._described or self.options.described()
        about: dict[str, Any] = {"agent": self.agent.name, "sandbox": self._backend.name}
        about |= {"model": "" if model is None else model.name, "group": group_of(labels, task.metadata)}
        about["start"] = None if start is None else asdict(start)
        return {**about, "metadata": labels, "engine": self._described}

    def _model(self, plan: RolloutPlan) -> Model | None:
        """Return the model of a rollout, with its seed if the run has one."""
        model, seed = self.options.model, self.options.seed
        if model is None or seed is None:
            return model
        labels = plan.metadata
        group = labels.get("item") or group_of(labels, plan.task.metadata) or plan.task.task_id
        sample = labels.get("sample", 0)
        facts = [str(group), sample if isinstance(sample, int) else str(sample)]
        if plan.start is not None and plan.start.is_branch:  # it must not repeat its parent
            facts += ["branch", plan.start.call or 0]
        return seeded_model(model, seed, *facts)

    def _run(
        self,
        plan: RolloutPlan,
        reporter: Reporter,
        cancel: Cancellation,
        failure: str | None,
        stack: contextlib.ExitStack,
    ) -> Outcome:
        store, proxy, model = self.options.store, self._capture, self._model(plan)
        rollout = RolloutRun(plan, ModelAccess(), reporter=reporter, cancel=cancel)
        try:
            if failure is not None or proxy is None or model is None or self.agent.dialect is None:
                self._open_journal(plan, reporter, stack)
                # If the checks are wrong, the agent's tokens would be wasted.
                outcome = rollout.run() if failure is None else rollout.refuse("grader_failed", failure)
            else:
                try:
                    rollout, outcome, capture = self._run_recorded(
                        replace(plan, may_restart=True), model, reporter, cancel
                    )
                except SandboxGone as exc:
                    reporter.say(f"{exc} Starting again in a fresh sandbox")
                    plan = replace(plan, is_resumed=True)
                    shutil.rmtree(plan.folder)
                    plan.folder.mkdir()
                    rollout, outcome, capture = self._run_recorded(plan, model, reporter, cancel)
                # With a store, the sequences are read from its files. Without one, they go with the outcome, because
                # the captured calls are removed with the engine's scratch folder.
                if store is None:
                    outcome.keep_sequences(_sequences(capture))
                elif isinstance(store, RolloutStore) and capture.path.parent != store.captures:
                    store.keep_capture(plan.rollout_id, capture.path)
        except CaptureError as exc:
            outcome = rollout.refuse("env_failed", str(exc))
        if store is not None:
            with reporter.during("store", "storing"):
                store.add(outcome, plan.task, worktree=rollout.work, baseline=rollout.baseline, agent_log=rollout.log)
        reporter.phase = "done"
        reporter.say(f"{outcome.status}, reward {outcome.reward}")
        return outcome

    def _open_journal(self, plan: RolloutPlan, reporter: Reporter, stack: contextlib.ExitStack) -> None:
        """Write the events of a rollout without model calls to its journal; the stack closes it.

        Raises:
            CaptureError: The journal of a resumed rollout cannot be continued.
        """
        if self.options.store is None:
            return
        recorder = Recorder(self.options.store.captures / plan.rollout_id / FILE)
        if plan.is_resumed:
            recorder.reopen()
            recorder.note("resume")
        reporter.journal = partial(_journal, recorder)
        stack.enter_context(recorder.opened())

    def _run_recorded(
        self, plan: RolloutPlan, model: Model, reporter: Reporter, cancel: Cancellation
    ) -> tuple[RolloutRun, Outcome, Capture]:
        """Run a rollout with a journal.

        Raises:
            CaptureError: The journal cannot be opened.
            SandboxGone: As in `RolloutRun.run`.
        """
        assert self._capture is not None
        plan = self._with_files(plan)
        capture = self._open_capture(self._capture, plan, model)
        access = ModelAccess(self._capture, capture)
        if (store := self.options.store) is not None:
            # A proxy of the caller may write elsewhere; its calls are added at the end.
            is_here = capture.path.parent == store.captures
            recorder = capture.rollout.recorder if is_here else Recorder(store.captures / plan.rollout_id / FILE)
            reporter.journal = partial(_journal, recorder)
        rollout = RolloutRun(plan, access, reporter=reporter, cancel=cancel)
        with capture, capture.rollout.recorder.opened():
            outcome = rollout.run()
        if rollout.wrong_start is None or cancel.cancelled:
            return rollout, outcome, capture
        shutil.rmtree(plan.folder)
        plan.folder.mkdir()
        again = replace(plan, restored=None, repeats_because=rollout.wrong_start, is_resumed=True)
        return self._run_recorded(again, model, reporter, cancel)

    def _with_files(self, plan: RolloutPlan) -> RolloutPlan:
        """Return the plan of a branch with the files before its first own call, if they are recorded."""
        start, store = plan.start, self.options.store
        if start is None or not start.is_branch or not start.call or plan.repeats_because:
            return plan
        if not isinstance(store, RolloutStore) or not self.agent.can_skip(plan.options):
            return replace(plan, repeats_because=f"{self.agent.name} cannot skip work")
        with self._restoring:  # once for all branches
            if start not in self._restored:
                folder = self._folder / ".restored" / f"{start.rollout_id}-{start.call}"
                try:
                    self._restored[start] = restored_start(store, start, plan.backend.name, plan.home, folder)
                except (NotRestorable, CaptureError) as exc:
                    self._restored[start] = str(exc)
            restored = self._restored[start]
        if isinstance(restored, str):
            return replace(plan, repeats_because=restored)
        return replace(plan, restored=restored)

    def _open_capture(self, proxy: CaptureServer, plan: RolloutPlan, model: Model) -> Capture:
        if plan.start is None and not plan.is_resumed:
            return proxy.open(plan.rollout_id, model, budget=self._budget, metadata=plan.metadata)
        return proxy.reopen(plan.rollout_id, model, start=plan.start, budget=self._budget, metadata=plan.metadata)


def _journal(recorder: Recorder, event: Progress) -> None:
    """Write an event to the journal, except for those of model calls, which it has already."""
    if event.turn is None:
        recorder.event(event)


def _sequences(capture: Capture) -> list[TokenSequence]:
    """Return the sampled sequences of a finished rollout; none if they cannot be read."""
    try:
        return capture.sequences()
    except Exception:  # the agent wrote some of this input, and must not be able to remove its outcome
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
    **engine: Unpack[EngineArguments],
) -> Outcome:
    """Run a task once and return its outcome.

    A failure of the rollout is a status of the outcome, not an exception.

    Args:
        task: The task.
        rollout_id: The name of the rollout; by default a new one.
        on_progress: Called with each event of the rollout.
        cancel: Ends the rollout early.
        metadata: Labels that are stored with the outcome.
        progress: Show the progress in a terminal or a notebook; nothing is shown elsewhere.
        engine: The fields of `EngineOptions`, such as `agent`, `model` and `sandbox`.

    Raises:
        AgentUnavailable: the agent is not installed and cannot be downloaded.
        SandboxUnavailable: the backend cannot run here.
        TrustError: a check of the task has a lower trust level than required; nothing was run.
        TaskRefused: a check fails on the task's own solution; no agent was run.
        StoreError: the outcome could not be stored.
    """
    rollout_id = rollout_id or new_rollout_id()
    if on_progress is not None:  # the first use of an agent downloads it, which takes minutes
        engine.setdefault("on_install", Reporter(rollout_id, on_progress).say)
    with contextlib.ExitStack() as stack:
        if progress:
            bar = stack.enter_context(ProgressBar(1))
            on_progress = call_both(bar.on_progress, on_progress)
            engine["on_install"] = call_both(bar.on_install, engine.get("on_install"))
        shared = stack.enter_context(Engine(EngineOptions(**engine)))
        outcome = shared.run(task, rollout_id=rollout_id, on_progress=on_progress, cancel=cancel, metadata=metadata)
        if progress:
            bar.on_outcome(0, outcome)
        return outcome


class ProgressBar:
    """Shows the number of finished rollouts, their mean reward and the latest event in a terminal or a notebook.

    A context manager with callbacks as methods. It shows nothing elsewhere, for example in a log file.

    Args:
        count: The number of rollouts; None if unknown.
        console: The output; by default standard error, or the output of the notebook.
    """

    def __init__(self, count: int | None, *, console: Console | None = None) -> None:
        from rich.console import Console  # most rollouts show no bar
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        if console is None:
            console = Console()
            console = console if console.is_jupyter else Console(stderr=True)
        text = TextColumn("{task.description}", markup=False)
        visible = console.is_terminal or console.is_jupyter
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self._bar = RichProgress(*columns, console=console, disable=not visible)
        self._task = self._bar.add_task("", total=count)
        self._done = 0
        self._rewards: list[float] = []

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def on_install(self, message: str) -> None:
        """Show the installation of an agent, which can take minutes."""
        self._describe(message)

    def on_progress(self, event: Progress) -> None:
        """Show the latest event."""
        self._describe(f"{event.phase}: {event.message}")

    def on_outcome(self, number: int, outcome: Outcome) -> None:
        """Count a rollout."""
        self._done += 1
        if outcome.reward is not None:
            self._rewards.append(outcome.reward)
        self._describe(outcome.status)
        self._bar.update(self._task, completed=self._done)

    def _describe(self, text: str) -> None:
        mean = f"mean reward {sum(self._rewards) / len(self._rewards):.2f}, " if self._rewards else ""
        # An agent or an endpoint wrote some of the text: it must not contain control codes for the terminal.
        shown = "".join(char if char.isprintable() else " " for char in text[:_BAR_TEXT])
        self._bar.update(self._task, description=f"{mean}{shown}")


def call_both(first: Callable[_P, None], second: Callable[_P, None] | None) -> Callable[_P, None]:
    """Return a callback that calls two callbacks."""
    if second is None:
        return first

    def call(*arguments: _P.args, **named: _P.kwargs) -> None:
        first(*arguments, **named)
        second(*arguments, **named)

    return call


async def run_rollout_async(task: Task, *, cancel: Cancellation | None = None, **arguments: Any) -> Outcome:
    """Run a task once, outside the event loop; takes the arguments of `run_rollout`.

    Cancelling the coroutine ends the rollout and frees everything before the coroutine ends.
    """
    cancel = cancel or Cancellation()
    return await in_thread(lambda: run_rollout(task, cancel=cancel, **arguments), cancel)


async def in_thread(work: Callable[[], _T], cancel: Cancellation) -> _T:
    """Run blocking work in a thread. A cancelled coroutine cancels the work and waits for its end.

    The thread is a daemon outside the loop's executor: rollouts take minutes, and would occupy all its threads.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as exc:  # raised again in the coroutine
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
    """Return a random rollout ID."""
    return secrets.token_hex(8)


def seeded_model(model: Model, *facts: int | str) -> Model:
    """Return a model whose calls are sampled with seeds derived from the facts.

    Raises:
        ValueError: it has a seed already.
    """
    if model.seed is not None or "seed" in (*model.sampling, *model.agent_may_set):
        raise ValueError("pass either a seed for the run, or a model with a seed")
    return model.model_copy(update={"seed": derived_seed(*facts)})


def check_rollout_id(rollout_id: str) -> None:
    """Check that a text can be a rollout ID.

    Raises:
        ValueError: it contains other characters than an ID may have.
    """
    if not _ID.fullmatch(rollout_id):
        raise ValueError(f"{rollout_id!r} cannot be the id of a rollout: use letters, digits, '.', '_' and '-'")


def named_backend(sandbox: str | Sandboxes) -> Sandboxes:
    """Return a sandbox backend by its name; a backend is returned as it is."""
    if isinstance(sandbox, Sandboxes):
        return sandbox
    from openenv.sandboxes.base import backend  # loads no backend before it is needed

    return backend(sandbox)
