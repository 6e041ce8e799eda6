"""The phases of one rollout, from an empty sandbox to an outcome.

Knows the order of the phases, and frees the resources of each phase on every path. The agent's sandbox is closed before
the verifier's sandbox is used, which a backend may have started earlier. Only a tar file of the work tree passes from
one to the other.
"""

# The phases, and the status if one of them fails:
#
#   sandbox ──> setup ──> agent ──> collect ──> verify ──> store ──> done
#      │          │         │          │           │         │
#      │          │         │          │           │         └─ StoreError
#      │          │         │          │           └─ grader_failed: the infrastructure fails a check
#      │          │         │          └─ policy_failed: the work tree cannot be packed
#      │          │         └─ truncated (time, budget), policy_failed (exit code, lost sandbox), env_failed (calls
#      │          │            were not recorded; the endpoint does not answer the host either)
#      │          └─ env_failed: a setup line failed, or the initial files cannot be packed
#      └─ sandbox_failed: no sandbox could be opened
#
#   setup    writes the task's files and runs its setup lines. Then it packs the home folder as the baseline, which has
#            the initial files. If another rollout ran the same setup, the sandbox starts from its snapshot.
#   agent    starts the agent. Its model calls pass the capture proxy with a key that is revoked when the agent ends.
#   collect  stops the agent's processes and packs the work tree.
#   verify   runs the checks in fresh sandboxes. Skipped after env_failed, and after truncated if `verify_truncated` is
#            off.
#   store    is done by the engine, after the outcome exists.
#
# Every failure after the agent has started counts as the agent's failure. Otherwise an agent could remove its failures
# from the training data by breaking its rollout. The agent cannot influence the exceptions:
#
#   the sandbox was killed             If model calls are recorded, the rollout runs once more in a fresh sandbox, and
#                                      the agent gets the recorded answers.
#   the sandbox or collecting failed   `_control_run` repeats the operation in a fresh sandbox with the initial files.
#                                      If it fails there too, the rollout is sandbox_failed.
#   a model call failed                `ModelAccess.ask_endpoint` sends a request from the host. If it gets no answer
#                                      either, the rollout is env_failed.
#
# If the work tree cannot be packed, the initial files are verified instead: the agent earns the reward of `noop`.
#
# A cancellation ends any phase with `cancelled`. It kills the sandbox, so an error of the phase is only a consequence.
# Only ok, policy_failed and truncated have a reward. With another status, a number would say nothing about the policy.

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openenv.errors import CaptureError, RolloutCancelled, RolloutError, SandboxError, SandboxGone, SandboxTreeError
from openenv.rollout.agents.base import Agent, AgentRun, Installation, Launch, LoopTools, ModelCallFailed
from openenv.rollout.capture.encoding import dumps, load_object
from openenv.rollout.capture.training_trace import RolloutTurn
from openenv.rollout.progress import Alarms, Cancellation, Phase, Reporter
from openenv.rollout.run.recorded_files import NotRestorable, RestoredStart, record_files
from openenv.rollout.run.shared_setup import SetupGroup, SetupResult
from openenv.rollout.store.archives import (
    MAX_MEMBERS,
    UnusableWorktree,
    WorktreeFiles,
    join_home,
    pack_home,
    read_files,
    unpack_home,
    worktree_limit,
)
from openenv.rollout.store.outcome import (
    NO_CHECKS,
    AgentFacts,
    Label,
    ModelUse,
    Outcome,
    Status,
    is_endpoint_suspect,
    is_hopeless,
    label_of,
)
from openenv.rollout.store.verdict import References, Verdict, VerifierInput, Verify
from openenv.rollout.tasks.task import (
    BranchPoint,
    CommandResult,
    Task,
    lay_files,
    lay_outer_files,
    run_line,
    sandbox_spec,
)
from openenv.rollout.verify.worktree import Merged, merge_for
from openenv.sandboxes.base import (
    HOME,
    TIMED_OUT,
    WORKDIR,
    ExecResult,
    Sandbox,
    Sandboxes,
    SandboxSnapshot,
    SandboxSpec,
    Stream,
)
from openenv.sandboxes.fixed_clock import fix_clock

if TYPE_CHECKING:
    from openenv.rollout.capture.capture_server import Capture, CaptureServer
    from openenv.rollout.capture.records import Recorder


logger = logging.getLogger(__name__)

AGENT_PORT = 7000
"""The port of the capture proxy inside the agent's sandbox."""
MAX_LOG_BYTES = 16 * 1024 * 1024
COLLECT_S = 180.0
"""Time limit for stopping the agent's processes and packing its work tree."""
_TAIL = 256 * 1024
_LOG_TAIL = 2000
_FACT = 4000  # characters of a command in its event
_SLACK_S = COLLECT_S + 120.0
_POLL_S = 0.25


class AgentLog:
    """The agent's output: on disk up to a limit, the end of it in memory. A context manager.

    An agent that prints without end fills neither disk nor memory. A full disk does not end the rollout.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._file = path.open("wb", buffering=0)  # so that each write raises its own error
        self._lock = threading.Lock()
        self._left = max_bytes
        self._tail = bytearray()

    def feed(self, stream: Stream, data: bytes) -> None:
        """Add output of either stream."""
        with self._lock:
            if self._left > 0 and not self._file.closed:
                try:
                    self._file.write(data[: self._left])
                    self._left -= len(data)
                except OSError as exc:
                    logger.warning("the rest of an agent's log is lost: %s", exc)
                    self._left = 0
            self._tail += data[-_TAIL:]
            if len(self._tail) > 2 * _TAIL:
                del self._tail[:-_TAIL]

    def tail(self, chars: int = _TAIL) -> str:
        """Return the end of the output."""
        with self._lock:
            return bytes(self._tail).decode("utf-8", "replace")[-chars:]

    def __enter__(self) -> AgentLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._file.close()


class ModelAccess:
    """A rollout's access to its model: a key of the capture proxy. Empty for an agent without a model.

    Also converts the proxy's counts into the facts that decide the rollout's status.
    """

    def __init__(self, server: CaptureServer | None = None, capture: Capture | None = None) -> None:
        self._capture = capture
        self._revoked = False
        self._lost: str | None = None
        self._outage: str | None = None
        self.socket: Path | None = None if server is None else server.socket
        """The unix socket that the agent's sandbox may reach."""
        self.key = "" if capture is None else capture.key

    def use(self) -> ModelUse:
        """Return the host's counts of the calls so far."""
        if self._capture is None:
            return ModelUse(needed=False)
        stats = self._capture.stats()
        error = stats.last_error or {}
        return ModelUse(
            needed=True,
            calls=stats.calls,
            answered=stats.endings.get("complete", 0),
            tokens=stats.completion_tokens,
            refused=(stats.budget_exhausted or "calls") if stats.budget_stops else None,
            failures=stats.failures_in_a_row,
            last_status=error.get("status"),
            last_error=str(error.get("message", "")),
            unrecorded=stats.record_failure or self._lost,
            outage=self._outage or stats.outage,
            skipped_s=stats.skipped_s,
        )

    def ask_endpoint(self, cancel: Cancellation) -> bool:
        """Send the endpoint a request that the host wrote; return whether it answers.

        Raises:
            RolloutCancelled: before the answer came.
        """
        if self._capture is None or self._outage is not None:
            return self._outage is None
        try:
            answer = self._capture.ask_endpoint()
            with cancel.on_cancel(answer.cancel):
                failure = answer.result()
        except concurrent.futures.CancelledError:
            cancel.check()
            failure = "the capture proxy was stopped"
        except CaptureError as exc:
            failure = str(exc)
        if failure is not None:
            self._outage = f"no answer to the host either: {failure}"
        return failure is None

    def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int | None, bytes]:
        """Make a model call from this process; return the status, None after `timeout_s`, and the response.

        Raises:
            CaptureError: the agent has no model, or the capture proxy does not run.
        """
        if self._capture is None:
            raise CaptureError("the agent has no model")
        late = time.monotonic() + timeout_s
        try:
            reply = self._capture.post_and_wait(path, body, timeout_s=timeout_s)
        except CaptureError:
            if time.monotonic() < late:
                raise
            return None, b""
        return reply.status, reply.body

    @property
    def skipped_s(self) -> float:
        """The seconds of an interrupted run that count (`ModelUse.skipped_s`)."""
        return 0.0 if self._capture is None else self._capture.rollout.spending.skipped_s

    @property
    def folder(self) -> Path | None:
        """The folder of the rollout's journal."""
        return None if self._capture is None else self._capture.path

    @property
    def journal(self) -> Recorder | None:
        """The rollout's journal."""
        return None if self._capture is None else self._capture.rollout.recorder

    def record_files(self, before_call: Callable[[], None]) -> None:
        """Call a function before each call that is sampled."""
        if self._capture is not None:
            self._capture.rollout.before_call = before_call

    def require_replay(self, before: int) -> None:
        """Refuse requests that differ from the recorded ones, up to a call."""
        if self._capture is not None and self._capture.rollout.replay is not None:
            self._capture.rollout.replay.required = before

    def missed_replay(self) -> str | None:
        """Return why the agent did not repeat the calls that it had to; None if it did."""
        replay = None if self._capture is None else self._capture.rollout.replay
        return None if replay is None or not replay.must_match else replay.divergence or "it ended before them"

    def replay_notes(self) -> dict[str, Any]:
        """Return facts about recorded answers that the agent got again, for the outcome's metadata."""
        stats = None if self._capture is None else self._capture.stats()
        if stats is None or not (stats.replayed or stats.divergence):
            return {}
        return {"replayed": stats.replayed, **({"divergence": stats.divergence} if stats.divergence else {})}

    def turns(self) -> list[RolloutTurn]:
        """Return the recorded calls in the form for trainers."""
        return [] if self._capture is None else self._capture.turns()

    def revoke(self) -> None:
        """Revoke the key; running calls are ended and recorded."""
        if self._capture is None:
            return
        if not self._revoked:
            self._revoked = True
            if self._capture.stats().revoked:  # not by this method: the proxy has stopped
                self._lost = "the capture proxy was stopped while the agent ran"
        self._capture.revoke()


class LoopTimeout(Exception):
    """The time of an agent's loop is over."""


class HostLoop(LoopTools):
    """The sandbox and the model of an agent's loop.

    Args:
        sandbox: Runs the commands.
        model: Answers the calls.
        log: Receives the lines of the loop.
        limit_s: The time of the loop. A model call or a command that takes longer raises `LoopTimeout`.
        envs: Environment variables of the commands.
        report: Receives the commands and their results.
    """

    on_command: Callable[[str, ExecResult], None] | None = None
    """Records the commands with their results."""
    done: Sequence[Mapping[str, Any]] = ()
    """The commands that the files of the sandbox are the result of, with their results; they are not run."""

    def __init__(
        self,
        sandbox: Sandbox,
        model: ModelAccess,
        log: AgentLog,
        *,
        limit_s: float,
        envs: Mapping[str, str],
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._sandbox, self._model, self._log, self._envs = sandbox, model, log, dict(envs) or None
        self._report = report
        self._end = time.monotonic() + limit_s

    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        status, data = self._model.post("/v1/chat/completions", dumps(dict(body)), self._rest_s())
        if status is None:
            raise LoopTimeout
        reply = load_object(data)
        if status != 200 or reply is None:
            raise ModelCallFailed(
                f"the model call failed with status {status}: {data[:500].decode('utf-8', 'replace')}"
            )
        return reply

    def run(self, command: str, *, timeout_s: float, max_output: int) -> ExecResult:
        rest = self._rest_s()
        if self.done:
            earlier, self.done = dict(self.done[0]), self.done[1:]
            if (recorded := earlier.pop("cmd")) != command:
                raise NotRestorable(f"the agent ran {command[:200]!r} instead of {recorded[:200]!r}")
            return ExecResult(**earlier)
        began = time.monotonic()
        done = self._sandbox.exec(
            command,
            envs=self._envs,
            cwd=self._sandbox.workdir,
            timeout=min(timeout_s, rest),
            max_output=max_output,
        )
        facts = {"cmd": command[:_FACT], "exit_code": done.exit_code, "seconds": round(time.monotonic() - began, 3)}
        self._report(f"command: exit code {done.exit_code}", facts)
        if self.on_command is not None:
            self.on_command(command, done)
        if done.timed_out and timeout_s > rest:
            raise LoopTimeout
        return done

    def log(self, text: str) -> None:
        self._log.feed("stdout", f"{text}\n".encode("utf-8", "replace"))

    def _rest_s(self) -> float:
        rest = self._end - time.monotonic() - self._model.skipped_s
        if rest <= 0:
            raise LoopTimeout
        return rest


@contextmanager
def watch_turns(
    model: ModelAccess,
    reporter: Reporter,
    *,
    cancel: Cancellation,
    give_up: Callable[[], None],
    alarms: Alarms,
    limit_s: float = math.inf,
) -> Iterator[threading.Event]:
    """Report each model call while the block runs; call `give_up` if the endpoint is dead, because agents retry.

    Also call it, and set the event, if a resumed agent has used the rest of its time: its interrupted runs count.
    """
    late = threading.Event()
    if model.socket is None:
        yield late
        return
    stop, watching = threading.Event(), threading.Lock()
    began = time.monotonic()
    seen = 0

    def report(calls: int) -> None:
        nonlocal seen
        while seen < calls:
            seen += 1
            reporter.say(f"model call {seen}", turn=seen)

    def watch() -> None:
        excused = 0  # failures that the agent caused: the endpoint answered the host
        while not stop.is_set():
            use = model.use()
            if use.skipped_s and time.monotonic() - began + use.skipped_s > limit_s:
                late.set()
                give_up()
                return
            excused = min(excused, use.failures)
            if is_hopeless(replace(use, failures=use.failures - excused)):
                if not model.ask_endpoint(cancel):
                    reporter.say(f"giving up: {use.last_error}")
                    give_up()
                    return
                excused = use.failures
            report(use.calls)
            stop.wait(_POLL_S)

    def watch_quietly() -> None:
        with watching, contextlib.suppress(RolloutCancelled, SandboxError):  # the sandbox has ended
            watch()

    try:
        with alarms.after(_POLL_S, watch_quietly):
            yield late
    finally:
        stop.set()
        with watching:
            report(model.use().calls)


@contextmanager
def _closing(sandbox: Sandbox) -> Iterator[Sandbox]:
    """Close a sandbox after the block; an error while closing is logged and does not change the rollout."""
    try:
        yield sandbox
    finally:
        try:
            sandbox.close()
        except SandboxError:
            logger.exception("sandbox %s could not be closed", sandbox.sandbox_id)


def _kill_quietly(sandbox: Sandbox) -> None:
    with contextlib.suppress(SandboxError):  # `_closing` reports it
        sandbox.kill()


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that is only read a second name."""
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copyfile(source, target)


class PhaseFailed(Exception):
    """Ends the rollout with this status."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.label = Label(status, reason)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """All decisions that are made before a rollout starts."""

    rollout_id: str
    task: Task
    agent: Agent
    installation: Installation
    backend: Sandboxes
    verify_backend: Sandboxes
    verify: Verify
    folder: Path
    home: str = HOME
    model_name: str = ""
    max_seconds: float | None = None
    options: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    agent_envs: dict[str, str] = field(default_factory=dict)
    """More environment variables of the agent's process."""
    clock: int | None = None
    """The time that the agent's commands see, in seconds since 1970."""
    verify_truncated: bool = True
    log: Path | None = None
    """The file for the agent's output; by default in `folder`."""
    places: Path | None = None
    """A folder for files of the verifier that all rollouts of an engine share."""
    alarms: Alarms = field(default_factory=Alarms)
    """Watches the time limits of all rollouts of an engine."""
    setup_group: SetupGroup | None = None
    """The rollouts that share the setup of this one."""
    references: References = field(default_factory=References)
    """The facts of the checks from the validation of the task."""
    start: BranchPoint | None = None
    """The call of another rollout at which this one starts."""
    is_resumed: bool = False
    """Whether the rollout was interrupted and runs again: its agent gets its own recorded answers first."""
    may_restart: bool = False
    """Whether `RolloutRun.run` raises `SandboxGone`, because the rollout can run again from its journal."""
    restored: RestoredStart | None = None
    """The files of a branch at its start; None if the agent repeats its work."""
    repeats_because: str = ""
    """Why a branch does not start from recorded files."""
    record_files: bool = False
    """Whether to record the files before each model call."""


class RolloutRun:
    """A rollout that runs once.

    Args:
        plan: The decisions about the rollout. The caller creates and removes its folder.
        model: The agent's access to its model.
        reporter: Receives the progress.
        cancel: Ends the rollout early.
    """

    def __init__(self, plan: RolloutPlan, model: ModelAccess, *, reporter: Reporter, cancel: Cancellation) -> None:
        self._plan, self._model, self._reporter, self._cancel = plan, model, reporter, cancel
        self._label: Label | None = None
        self._label_phase: Phase = "done"
        self._verdict = Verdict()
        self._exit_code: int | None = None
        self._log_tail = ""
        self._setup: list[CommandResult] = []
        self._setup_rollout_id: str | None = None  # the rollout that ran the shared setup
        self._sandbox_id, self._workdir = "", WORKDIR
        self._merged: Merged | None = None
        self._lost_worktree = False
        self._in_doubt: tuple[Phase, Exception] | None = None  # the first failure after the agent started
        self.wrong_start: str | None = None
        """Why the work does not fit to the restored files; the rollout must run again without them."""
        self.work = plan.folder / "worktree.tar"
        self.baseline = plan.folder / "baseline.tar"
        self.log = plan.log or plan.folder / "agent.log"

    def run(self) -> Outcome:
        """Run all phases; failures become labels.

        Raises:
            SandboxGone: A sandbox was killed, and the plan says that the rollout may restart.
        """
        started_at = time.time()
        complete = False
        try:
            self._agent_side()
            self._verify_side()
            complete = True
        except PhaseFailed as stop:
            self._set(stop.label)
        except RolloutCancelled as stop:
            self._set(Label("cancelled", str(stop)))
        except SandboxError as exc:
            if self._can_restart(exc):
                raise
            self._set(Label("sandbox_failed", str(exc)))
        except (RolloutError, OSError) as exc:
            self._set(Label("env_failed", str(exc)))
        except Exception as exc:  # the boundary of a rollout: the others go on
            logger.exception("rollout %s failed", self._plan.rollout_id)
            self._set(Label("env_failed", f"{type(exc).__name__}: {exc}"))
        if self._cancel.cancelled and not complete:  # the error of the phase is a consequence
            self._set(Label("cancelled", self._cancel.reason))
        return self._outcome(started_at)

    def refuse(self, status: Status, reason: str) -> Outcome:
        """Return the outcome of a rollout that cannot start."""
        self._set(Label(status, reason))
        return self._outcome(time.time())

    def _set(self, label: Label) -> None:
        self._label, self._label_phase = label, self._reporter.phase

    def _agent_side(self) -> None:
        plan = self._plan
        with ExitStack() as stack:
            sandbox = self._ready_sandbox(stack)
            with self._reporter.during("agent", f"starting {plan.agent.name}"):
                facts = self._run_agent(sandbox)
            if self._plan.restored is not None:
                self.wrong_start = self.wrong_start or self._model.missed_replay()
                if self.wrong_start is not None:
                    raise PhaseFailed("env_failed", f"the branch cannot start from files: {self.wrong_start}")
            with self._reporter.during("collect", "taking the work tree"):
                problem = self._collect(sandbox)
        use = self._model.use()
        if is_endpoint_suspect(use):
            self._model.ask_endpoint(self._cancel)
            use = self._model.use()
        label = label_of(facts, use)
        if label is not None:
            self._label, self._label_phase = label, "agent"
        elif problem is not None:
            self._label, self._label_phase = Label("policy_failed", problem), "collect"
        self._cancel.check()
        if self._in_doubt is not None and self._can_restart(self._in_doubt[1]):
            raise self._in_doubt[1]
        if self._in_doubt is not None and (label is None or label.status != "env_failed"):
            self._control_run(*self._in_doubt)

    def _ready_sandbox(self, stack: ExitStack) -> Sandbox:
        """Open a sandbox that is ready for the agent; the stack closes it.

        The first rollout of a group runs the setup. The others wait, and start from its snapshot or fail like it. If it
        could neither take a snapshot nor finish, they run the setup themselves.
        """
        if self._plan.restored is not None and (restored := self._restored_sandbox(stack, self._plan.restored)):
            return restored
        group = self._plan.setup_group
        if group is None:
            return self._sandbox_after_setup(stack, None)
        shared = group.result
        if shared is None and not group.lead():
            with self._reporter.during("setup", "waiting for another rollout that runs this setup"):
                shared = group.wait(self._cancel)
        if shared is None:
            try:
                return self._sandbox_after_setup(stack, group)
            finally:
                group.step_down()
        if shared.snapshot is None and shared.failure is None:
            return self._sandbox_after_setup(stack, None)
        with self._reporter.during("setup", f"set up by rollout {shared.rollout_id}"):
            self._setup, self._setup_rollout_id = list(shared.results), shared.rollout_id
            if shared.failure is not None:
                raise PhaseFailed(shared.failure.status, f"{shared.failure.reason} (in rollout {shared.rollout_id})")
            if shared.snapshot is not None:
                self._take_baseline(shared.snapshot)
        sandbox = self._open_sandbox(stack, replace(self._spec(), from_snapshot=shared.snapshot))
        if self._plan.task.folders:  # snapshots do not contain folders outside the home
            lay_outer_files(sandbox, self._plan.task)
        return sandbox

    def _restored_sandbox(self, stack: ExitStack, start: RestoredStart) -> Sandbox | None:
        """Open a sandbox with recorded files; None if that fails, for example because it has no room for them."""
        with self._reporter.during("setup", f"restoring the files before call {start.call}"):
            try:
                sandbox = self._open_sandbox(stack, replace(self._spec(), from_snapshot=start.snapshot))
            except SandboxError as exc:
                self._cancel.check()
                self._plan = replace(self._plan, restored=None, repeats_because=str(exc))
                return None
            if start.baseline is not None:
                link_or_copy(start.baseline, self.baseline)
            self._setup, self._setup_rollout_id = list(start.setup_results), start.rollout_id
            self._model.require_replay(start.call)
        return sandbox

    def _sandbox_after_setup(self, stack: ExitStack, group: SetupGroup | None) -> Sandbox:
        """Open a sandbox, run the setup in it, and publish the result to the group."""
        with ExitStack() as own:
            sandbox = self._open_sandbox(own, replace(self._spec(), fills_workdir=True, network=self._has_network))
            with self._reporter.during("setup", "setting up"):
                try:
                    self._set_up(sandbox)
                    self._keep_setup(sandbox, group)
                except PhaseFailed as stop:
                    if group is not None and not self._cancel.cancelled:
                        group.publish(SetupResult(self._plan.rollout_id, list(self._setup), failure=stop.label))
                    raise
            if not self._has_network:
                stack.push(own.pop_all())
                return sandbox
        # A second sandbox, instead of the first one without its network: this ends all connections and processes of
        # the setup, which could reach the network for the agent.
        sandbox = self._open_sandbox(stack, self._spec())
        with self._reporter.during("setup", "moving the setup to a sandbox without a network"):
            unpack_home(sandbox, self.baseline)
            lay_outer_files(sandbox, self._plan.task)
        return sandbox

    @property
    def _has_network(self) -> bool:
        return self._plan.task.network == "setup" and bool(self._plan.task.setup)

    def _open_sandbox(self, stack: ExitStack, spec: SandboxSpec) -> Sandbox:
        backend, snapshot = self._plan.backend, spec.from_snapshot
        builds = "" if spec.build is None else f", image {spec.image}"
        with self._reporter.during("sandbox", f"starting a sandbox ({backend.name}{builds})"):
            self._cancel.check()
            sandbox = stack.enter_context(_closing(backend.open(spec)))
            stack.enter_context(self._cancel.on_cancel(sandbox.kill))
            if sandbox.from_snapshot is not snapshot:  # a wrapping backend that replaces the spec
                raise SandboxError(f"{backend.name} cannot start from a snapshot: use run_many(share_setup=False)")
            self._sandbox_id, self._workdir = sandbox.sandbox_id, sandbox.workdir
        return sandbox

    def _spec(self) -> SandboxSpec:
        task = self._plan.task
        lifetime = len(task.setup) * task.setup_timeout_s + self._agent_limit() + _SLACK_S
        return replace(
            sandbox_spec(task),
            mounts=self._plan.installation.mounts,
            timeout_s=lifetime,
            home=self._plan.home,
            metadata={"rollout_id": self._plan.rollout_id},
        )

    def _agent_limit(self) -> float:
        limit = self._plan.task.agent_timeout_s
        return limit if self._plan.max_seconds is None else min(limit, self._plan.max_seconds)

    def _set_up(self, sandbox: Sandbox) -> None:
        task = self._plan.task
        lay_files(sandbox, task.files)
        for number, line in enumerate(task.setup, 1):
            self._cancel.check()
            ran = run_line(sandbox, line, timeout=task.setup_timeout_s)
            self._setup.append(ran.result)
            exit_code = ran.result.exit_code
            facts = ran.result.model_dump(mode="json", exclude_defaults=True)
            self._reporter.say(f"setup {number} of {len(task.setup)}: exit code {exit_code}", facts=facts)
            if ran.timed_out:
                raise PhaseFailed("env_failed", f"setup line {number} did not end within {task.setup_timeout_s:g} s")
            if exit_code != 0:
                raise PhaseFailed("env_failed", f"setup line {number} exited with code {exit_code}")

    def _keep_setup(self, sandbox: Sandbox, group: SetupGroup | None) -> None:
        """Pack the initial files for the verifier, and take a snapshot for the other rollouts of the group."""
        is_shared = group is not None and group.members > 1
        snapshot = self._snapshot(sandbox) if is_shared else None
        try:
            if snapshot is not None:
                self._take_baseline(snapshot)
            elif self._plan.task.files or self._plan.task.setup or self._plan.task.workdir:
                self._pack_baseline(sandbox)
        except BaseException:
            if snapshot is not None:
                snapshot.close()
            raise
        if group is not None and is_shared:
            group.publish(SetupResult(self._plan.rollout_id, list(self._setup), snapshot))

    def _snapshot(self, sandbox: Sandbox) -> SandboxSnapshot | None:
        """Return a snapshot, or None if the backend cannot take one: then each rollout runs its own setup."""
        try:
            return sandbox.snapshot()
        except SandboxGone:
            raise
        except (SandboxError, OSError) as exc:
            self._reporter.say(f"the setup is not shared: {exc}")
            return None

    def _pack_baseline(self, sandbox: Sandbox) -> None:
        try:
            pack_home(sandbox, self.baseline, max_bytes=worktree_limit(self._plan.task.limits))
        except SandboxGone:
            raise
        except SandboxError as exc:
            raise PhaseFailed("env_failed", f"the initial files cannot be packed for the verifier: {exc}") from exc

    def _take_baseline(self, snapshot: SandboxSnapshot) -> None:
        source = snapshot.archives[snapshot.home]
        workdir = self._plan.task.workdir
        if workdir is not None and workdir in snapshot.archives:
            join_home(source, snapshot.archives[workdir], self.baseline)
            return
        link_or_copy(source, self.baseline)

    def _prepare_agent(self, sandbox: Sandbox) -> Launch:
        plan = self._plan
        base_url = ""
        if self._model.socket is not None and not plan.agent.is_loop:
            base_url = sandbox.expose(self._model.socket, port=AGENT_PORT).rstrip("/") + "/v1"
        run = AgentRun(
            task=plan.task,
            base_url=base_url,
            api_key=self._model.key,
            model=plan.model_name,
            home=sandbox.home,
            workdir=sandbox.workdir,
            installation=plan.installation,
            options=plan.options,
            skipped=() if plan.restored is None else plan.restored.requests,
        )
        launch = plan.agent.prepare(sandbox, run)
        if plan.clock is not None:
            plan.agent_envs.update(fix_clock(sandbox, plan.clock))
        self._cancel.check()
        return launch

    def _run_agent(self, sandbox: Sandbox) -> AgentFacts:
        limit = self._agent_limit()
        plan, model, on_command = self._plan, self._model, None
        # Folders outside of the home are not part of the task's initial files.
        can_skip = plan.agent.can_skip(plan.options) and not plan.task.folders
        files = None
        if plan.record_files and can_skip and model.journal is not None and model.folder is not None:
            files = record_files(sandbox, model.journal, model.folder, plan.restored)
            model.record_files(files.before_call)
            on_command = files.command
        launch = self._prepare_agent(sandbox)
        if files is not None and launch.loop is not None:
            files.expect_no_processes()
        with AgentLog(self.log) as log:
            try:
                return self._follow_agent(sandbox, launch, log, on_command)
            except Exception as exc:
                failure = f"the agent's end was not observed: {self._doubt(exc)}"
                return AgentFacts(self._exit_code, timed_out=False, limit_s=limit, failure=failure)
            finally:
                self._log_tail = log.tail(_LOG_TAIL)

    def _follow_agent(
        self,
        sandbox: Sandbox,
        launch: Launch,
        log: AgentLog,
        on_command: Callable[[str, ExecResult], None] | None,
    ) -> AgentFacts:
        limit = self._agent_limit()
        try:
            with watch_turns(
                self._model,
                self._reporter,
                cancel=self._cancel,
                give_up=sandbox.stop_processes,
                alarms=self._plan.alarms,
                limit_s=limit,
            ) as late:
                if launch.loop is not None:
                    tools = HostLoop(
                        sandbox,
                        self._model,
                        log,
                        limit_s=limit,
                        envs=self._plan.agent_envs,
                        report=lambda text, facts: self._reporter.say(text, facts=facts),
                    )
                    tools.on_command = on_command
                    tools.done = () if self._plan.restored is None else self._plan.restored.commands
                    done = self._run_loop(launch.loop, tools)
                else:
                    done = sandbox.exec(
                        launch.argv,
                        envs={**self._plan.agent_envs, **(launch.envs or {})},
                        cwd=launch.cwd or sandbox.workdir,
                        timeout=limit,
                        on_output=log.feed,
                        max_output=64 * 1024,
                    )
        finally:
            self._model.revoke()
        self._exit_code = done.exit_code
        self._reporter.say(f"the agent ended with exit code {done.exit_code}")
        failure = self._plan.agent.failure(done.exit_code, log.tail())
        return AgentFacts(done.exit_code, done.timed_out or late.is_set(), limit, failure)

    def _run_loop(self, loop: Callable[[LoopTools], int], tools: HostLoop) -> ExecResult:
        """Run an agent's loop in this thread."""
        with self._cancel.on_cancel(self._model.revoke):  # ends a model call that it waits for
            try:
                return ExecResult(loop(tools), "", "")
            except LoopTimeout:
                return ExecResult(TIMED_OUT, "", "", timed_out=True)
            except NotRestorable as exc:
                self.wrong_start = str(exc)
                return ExecResult(1, "", "")

    def _collect(self, sandbox: Sandbox) -> str | None:
        """Stop the agent's processes and pack its work tree; return the problem if that fails, else None."""
        try:
            with self._plan.alarms.after(COLLECT_S, partial(_kill_quietly, sandbox)):
                sandbox.stop_processes()
                self._merged = self._take_worktree(sandbox, self.work, self._plan.folder / "merged.tar")
        except Exception as exc:
            self._lost_worktree = True
            problem = f"the work tree cannot be taken: {self._doubt(exc)}"
            self.work.unlink(missing_ok=True)
            return problem
        return None

    def _take_worktree(self, sandbox: Sandbox, work: Path, merged: Path) -> Merged:
        """Pack the work tree into `work`, and write the verifier's view of it to `merged`.

        Raises:
            UnusableWorktree, SandboxError, OSError: it cannot be packed.
        """
        try:
            # Saves the host minutes: otherwise it would pack a million entries and then refuse them.
            if sandbox.count_entries(sandbox.workdir, most=MAX_MEMBERS) > MAX_MEMBERS:
                raise UnusableWorktree(f"the work tree holds more than {MAX_MEMBERS} entries")
        except NotADirectoryError:
            raise UnusableWorktree("the work folder is gone, or something else is in its place") from None
        limit = worktree_limit(self._plan.task.limits)
        try:
            sandbox.pack(sandbox.workdir, work, max_bytes=limit)
        except PermissionError:  # the agent removed permissions
            sandbox.exec(["chmod", "-R", "u+rwX", "--", sandbox.workdir], cwd="/")
            sandbox.pack(sandbox.workdir, work, max_bytes=limit)
        baseline = self.baseline if self.baseline.exists() else None
        return merge_for(self._plan.task, work, baseline, merged, root=sandbox.workdir, max_bytes=limit)

    # Somebody outside may have killed the sandbox, or its node has died. An agent that did it itself does it again: it
    # gets the same answers up to that command. The second time, the control run decides.
    def _can_restart(self, exc: Exception) -> bool:
        """Return whether the sandbox was killed, and the rollout can run again from its journal."""
        return self._plan.may_restart and isinstance(exc, SandboxGone) and not self._cancel.cancelled

    def _doubt(self, exc: Exception) -> str:
        """Record a failure after the agent started, and return its text. A control run decides later who caused it.

        Raises:
            RolloutCancelled: a cancellation caused the failure.
            OSError: the host's folder of this rollout was removed. (A full disk proves nothing: the agent's tree can
                fill it.)
        """
        self._cancel.check()
        if isinstance(exc, OSError) and not self._plan.folder.is_dir():
            raise exc
        self._in_doubt = self._in_doubt or (self._reporter.phase, exc)
        if isinstance(exc, SandboxError | UnusableWorktree | OSError):
            return str(exc)
        logger.error("rollout %s failed", self._plan.rollout_id, exc_info=exc)
        return f"{type(exc).__name__}: {exc}"

    def _control_run(self, phase: Phase, exc: Exception) -> None:
        """Repeat the failed operation in a fresh sandbox with the initial files.

        Raises:
            PhaseFailed: it fails there too, so the agent did not cause it.
        """
        work, merged = self._plan.folder / "control.tar", self._plan.folder / "control-merged.tar"
        try:
            with self._reporter.during(phase, f"{exc}: starting a control run without the agent"), ExitStack() as stack:
                sandbox = stack.enter_context(_closing(self._plan.backend.open(self._spec())))
                stack.enter_context(self._cancel.on_cancel(sandbox.kill))
                stack.enter_context(self._plan.alarms.after(COLLECT_S, partial(_kill_quietly, sandbox)))
                if self.baseline.exists():
                    unpack_home(sandbox, self.baseline)
                done = sandbox.exec(["true"])
                if done.exit_code != 0:
                    raise SandboxError(f"a command that does nothing exited with code {done.exit_code}")
                sandbox.stop_processes()
                self._take_worktree(sandbox, work, merged)
        except Exception as again:
            self._cancel.check()
            is_of_the_task = isinstance(again, UnusableWorktree | SandboxTreeError)
            status: Status = "env_failed" if is_of_the_task else "sandbox_failed"
            raise PhaseFailed(status, f"{exc} (and in a control run without the agent: {again})") from again
        finally:
            work.unlink(missing_ok=True)
            merged.unlink(missing_ok=True)

    def _verify_side(self) -> None:
        status = "ok" if self._label is None else self._label.status
        if status == "env_failed" or (status == "truncated" and not self._plan.verify_truncated):
            return
        if not self._plan.task.verify:
            return
        with self._reporter.during("verify", "verifying in a fresh sandbox"):
            try:
                self._verdict = self._verify(with_work=self._merged is not None)
            except (RolloutCancelled, SandboxError):
                raise
            except Exception as exc:
                if self._merged is None:
                    raise
                logger.exception("the work of rollout %s cannot be verified", self._plan.rollout_id)
                self._verdict = self._verify(with_work=False)
                self._set(Label("policy_failed", f"its work cannot be verified: {type(exc).__name__}: {exc}"))
        if self._verdict.crash is not None:
            before = "" if self._label is None else f" (before that, {self._label.status}: {self._label.reason})"
            self._label, self._label_phase = Label("grader_failed", f"{self._verdict.crash}{before}"), "verify"

    def _verify(self, *, with_work: bool) -> Verdict:
        given = VerifierInput(
            worktree=self._plan.folder / "merged.tar" if with_work else None,
            baseline=self.baseline if self.baseline.exists() else None,
            references=self._plan.references,
            home=self._plan.home,
            folder=self._plan.folder,
            places=self._plan.places,
            cancel=self._cancel,
            report=self._reporter.say,
        )
        return self._plan.verify(self._plan.task, self._plan.verify_backend, given)

    def _outcome(self, started_at: float) -> Outcome:
        plan, label, verdict = self._plan, self._label, self._verdict
        files = self._files()
        trusted = label is None or label.status in ("policy_failed", "truncated")
        return Outcome(
            rollout_id=plan.rollout_id,
            task_id=plan.task.task_id,
            status="ok" if label is None else label.status,
            phase=self._label_phase,
            reason=self._reason(),
            reward=verdict.reward if trusted else None,
            trust=verdict.trust if "isolation" in plan.backend.features else verdict.trust and "shared",
            agent=plan.agent.name,
            model=plan.model_name,
            agent_exit_code=self._exit_code,
            agent_log_tail=self._log_tail,
            setup_results=self._setup,
            verify_results=verdict.results,
            turns=self._turns(),
            files=files.texts,
            files_extra=files.others,
            sandbox=plan.backend.name,
            sandbox_id=self._sandbox_id,
            started_at=started_at,
            wall_s=self._reporter.elapsed_s,
            phase_s=dict(self._reporter.phase_s),
            metadata=self._metadata(),
            start=plan.start,
        )

    def _reason(self) -> str | None:
        """Return why the status is not `ok`, or why there is no reward."""
        label, task = self._label, self._plan.task
        if label is None:
            return None if task.verify else NO_CHECKS
        reason = label.reason or f"{label.status} in the {self._label_phase} phase"
        if label.status in ("policy_failed", "truncated") and self._verdict.reward is None:
            return f"{reason} ({'not verified: verify_truncated is off' if task.verify else NO_CHECKS})"
        return reason

    # An agent writes some of the input of these two methods. It must not be able to remove its outcome that way.

    def _turns(self) -> list[RolloutTurn]:
        try:
            return self._model.turns()
        except Exception:
            logger.exception("the model calls of rollout %s cannot be read", self._plan.rollout_id)
            return []

    def _files(self) -> WorktreeFiles:
        try:
            return read_files(self.work, root=self._workdir) if self.work.exists() else WorktreeFiles()
        except Exception:
            logger.exception("the work tree of rollout %s cannot be read", self._plan.rollout_id)
            return WorktreeFiles()

    def _metadata(self) -> dict[str, Any]:
        notes: dict[str, Any] = {}
        if self._setup_rollout_id is not None:
            notes["setup_rollout_id"] = self._setup_rollout_id
        if self._plan.installation.version:
            notes["agent_version"] = self._plan.installation.version
        if self._verdict.sandbox_id:
            notes["verify_sandbox_id"] = self._verdict.sandbox_id
        if len(self._verdict.rewards) > 1:
            notes["rewards"] = self._verdict.rewards
        if self._verdict.ignored_reward_file:
            notes["ignored_reward_file"] = True
        if self._lost_worktree:
            notes["lost_worktree"] = True
        if self._merged is not None and (self._merged.removed or self._merged.restored):
            notes["protected"] = {"removed": self._merged.removed[:100], "restored": self._merged.restored[:100]}
        if self._plan.restored is not None:
            notes["restored_call"] = self._plan.restored.call
        elif self._plan.repeats_because:
            notes["repeats_because"] = self._plan.repeats_because
        return {**self._plan.metadata, **notes, **self._model.replay_notes()}
