"""The validation of a task's checks before its first agent: on the initial files, and on the task's solution.

Knows rollouts and files. A validation is a rollout of the solution whose verifier also looks at the initial files. Its
facts are kept by the content of the task, in this process and in the cache folder.
"""

# Engine.run ──> validate(task)
#                   │
#      in memory ───┤ yes ──────────────────────────────────────────> facts
#                   │ no
#      <cache>/checks/<key>.json: lock, read
#                   │ no facts (new task, other image, or the process that wrote them died)
#      setup ──> solution ──> collect ──> checks on the initial files ──> checks on the solution
#                   │
#                   ├── a check fails on the solution             TaskRefused, kept in this process only
#                   ├── sandbox, setup or verifier failed         nothing is kept
#                   └── facts: kept; a check without a verdict on the initial files is a warning
#
# The lock is held during a validation, so one rollout of a group validates and the others wait, in all processes of the
# machine. It ends with its process. The file is written in place: half a file cannot be parsed and counts as none.

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from openenv._lazy import load_package_version
from openenv.errors import SandboxError, TaskRefused
from openenv.rollout.agents.base import Installation
from openenv.rollout.agents.builtin import Noop, Oracle
from openenv.rollout.progress import Cancellation, Reporter
from openenv.rollout.run.phases import ModelAccess, RolloutPlan, RolloutRun
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.verdict import CheckFacts, References, Verdict, VerifierInput, Verify
from openenv.rollout.tasks.task import Check, Task, sandbox_spec
from openenv.sandboxes.base import HOME, Sandboxes
from openenv.sandboxes.host import try_locked

logger = logging.getLogger(__name__)

_FORMAT = 1
_POLL_S = 0.1
_ATTEMPTS = 2
"""Failures of a solution before its task is refused, because one may be an accident of a busy machine."""
_TAIL = 400
_NOT_IN_KEY = {"min_trust", "task_id", "metadata"}
"""The fields of a task that change no check. The instruction does: the agent may write the files that it names."""


class _StoredFacts(BaseModel):
    """The content of a file of the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = _FORMAT
    setup: tuple[CheckFacts, ...]
    solved: tuple[CheckFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Validation:
    """The result for a task that was not refused."""

    references: References = field(default_factory=References)
    failure: str | None = None
    """Why the checks could not be validated: the verifier fails without an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorOptions:
    """The parts of an engine that a validation uses.

    Args:
        backend: The backend of the agent's sandbox.
        verify_backend: The backend of the verifier's sandboxes.
        verify: The verifier.
        folder: A scratch folder.
        cache: The folder of all kept facts.
        home: The home inside the sandboxes.
        report: Receives messages.
    """

    backend: Sandboxes
    verify_backend: Sandboxes
    verify: Verify
    folder: Path
    cache: Path
    home: str = HOME
    report: Callable[[str], None]


class Validator:
    """Validates the checks of tasks, each once. Safe from many threads and processes."""

    def __init__(self, options: ValidatorOptions) -> None:
        self._options = options
        self._validations: dict[str, Validation | TaskRefused] = {}

    def key(self, task: Task) -> str:
        """Return a key that is equal for tasks whose checks do the same in the same sandboxes."""
        options = self._options
        specs = (options.backend, sandbox_spec(task)), (options.verify_backend, sandbox_spec(task, verifies=True))
        parts = [
            str(_FORMAT),
            load_package_version(),
            options.home,
            *(backend.fingerprint(spec) for backend, spec in specs),
            task.model_dump_json(exclude=_NOT_IN_KEY),
        ]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def validate(self, task: Task, cancel: Cancellation) -> Validation:
        """Validate the checks of a task, unless their facts are known.

        Raises:
            TaskRefused: a check fails on the task's own solution.
            RolloutCancelled: while waiting.
        """
        if not task.verify:
            return Validation()
        try:
            key = self.key(task)
        except SandboxError:  # the sandbox of the rollout will fail in the same way
            return Validation()
        if (known := self._known(key)) is not None:
            return known
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._locked(key, cancel))
            if (known := self._known(key)) is not None:  # another thread has validated it meanwhile
                return known
            try:
                validation = _stored(file, task) or self._validated(task, cancel, file)
            except TaskRefused as exc:
                self._validations[key] = exc
                raise
            if validation.references.setup:
                self._warn(task, validation.references)
                self._validations[key] = validation
            return validation

    def _known(self, key: str) -> Validation | None:
        known = self._validations.get(key)
        if isinstance(known, TaskRefused):
            raise TaskRefused(str(known))
        return known

    @contextlib.contextmanager
    def _locked(self, key: str, cancel: Cancellation) -> Iterator[int]:
        """Open the file of a task and wait for its lock. If the cache cannot be written, it is in the scratch folder.

        Raises:
            RolloutCancelled: while waiting.
        """
        stop = threading.Event()
        file = self._try_locked(key)
        with cancel.on_cancel(stop.set):
            while file is None:
                stop.wait(_POLL_S)
                cancel.check()
                file = self._try_locked(key)
        try:
            yield file
        finally:
            os.close(file)

    def _try_locked(self, key: str) -> int | None:
        cache, name = self._options.cache, f"{key}.json"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            return try_locked(cache / name)
        except OSError as exc:
            logger.info("the validation of checks is kept in this process only: %s", exc)
            return try_locked(self._options.folder / name)

    def _validated(self, task: Task, cancel: Cancellation, file: int) -> Validation:
        name = task.task_id or task.instruction[:40]
        self._options.report(f"validating the checks of task '{name}'")
        for attempt in range(_ATTEMPTS):
            run = _ValidationRun(task, self._options)
            outcome = run.run(cancel)
            cancel.check()
            failure = run.failure(outcome)
            if failure is not None:
                logger.warning("the checks of task '%s' could not be validated: %s", name, failure)
                return Validation(failure=failure if outcome.status == "grader_failed" else None)
            try:
                run.require_solution(outcome)
                break
            except TaskRefused as exc:
                if attempt + 1 == _ATTEMPTS:
                    raise
                logger.info("once more: %s", exc)
        references = References(setup=tuple(run.initial.facts), solved=tuple(run.solved.facts))
        _write(file, _StoredFacts(setup=references.setup, solved=references.solved).model_dump_json())
        return Validation(references)

    def _warn(self, task: Task, references: References) -> None:
        for number, facts in enumerate(references.setup, 1):
            if facts.distance > 0:
                logger.warning(
                    "check %d of task '%s' gives no verdict on the initial files (%s). An agent that changes nothing "
                    "earns %g for it, and so does every agent if the check is broken; make it end with an exit code.",
                    number,
                    task.task_id or task.instruction[:40],
                    facts.note,
                    task.missing_reward,
                )


class _ValidationRun:
    """A rollout of the task's solution, or of nothing, that is verified with and without its work."""

    def __init__(self, task: Task, options: ValidatorOptions) -> None:
        self._task, self._options = task, options
        self.initial = self.solved = Verdict()

    def run(self, cancel: Cancellation) -> Outcome:
        options, task = self._options, self._task
        rollout_id = f"validation-{secrets.token_hex(6)}"
        folder = options.folder / rollout_id
        folder.mkdir()
        plan = RolloutPlan(
            rollout_id=rollout_id,
            task=task,
            agent=Oracle() if task.solution else Noop(),
            installation=Installation(),
            backend=options.backend,
            verify_backend=options.verify_backend,
            verify=self._verify,
            folder=folder,
            home=options.home,
        )
        try:
            return RolloutRun(plan, ModelAccess(), reporter=Reporter(rollout_id), cancel=cancel).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _verify(self, task: Task, backend: Sandboxes, given: VerifierInput) -> Verdict:
        verify = self._options.verify
        initial = replace(given, worktree=None, references=References(validates="setup"))
        self.initial = verify(task, backend, initial)
        if self.initial.crash is not None or not task.solution:
            return self.initial
        references = References(setup=tuple(self.initial.facts), validates="solved")
        self.solved = verify(task, backend, replace(given, references=references))
        return self.solved

    def failure(self, outcome: Outcome) -> str | None:
        """Return why the checks could not be validated, or None."""
        if outcome.status in ("env_failed", "sandbox_failed", "grader_failed"):
            return f"{outcome.reason} (before any agent)"
        if outcome.status != "ok" and not self._task.solution:
            return outcome.reason
        return None

    def require_solution(self, outcome: Outcome) -> None:
        """Check that the task's own solution passes every check.

        Raises:
            TaskRefused: it does not.
        """
        task, name = self._task, self._task.task_id or self._task.instruction[:40]
        if not task.solution:
            return
        advice = (
            "Correct the check or the solution; `openenv rollouts run --agent oracle` repeats this. "
            "validate_checks=False (OPENENV_VALIDATE_CHECKS=0) runs the task as it is."
        )
        if outcome.status != "ok":
            output = _tail(outcome.agent_log_tail)
            raise TaskRefused(f"The solution of task '{name}' fails: {outcome.reason}.{output} {advice}")
        verdict, low = self.solved, task.reward_range[0]
        is_written = bool(verdict.rewards)
        for number, (check, result) in enumerate(zip(task.verify, verdict.results, strict=True), 1):
            has_failed = verdict.facts[number - 1].distance > 0
            if result.score is not None:
                has_failed = has_failed or result.score <= low
            elif not is_written:  # otherwise the reward file of a line decides
                has_failed = has_failed or result.exit_code != 0
            if has_failed:
                why = result.note or f"score {result.score:g}" if result.score is not None else result.note
                parts = result.stdout + result.stderr
                raise TaskRefused(
                    f"Check {number} of task '{name}' fails on the task's own solution with exit code "
                    f"{result.exit_code}{f' ({why})' if why else ''}: {_shown(check)}.{_tail(parts)} {advice}"
                )
        if verdict.reward is not None and verdict.reward <= low:
            raise TaskRefused(f"The solution of task '{name}' earns {verdict.reward:g}, the lowest reward. {advice}")


def _shown(check: str | Check) -> str:
    return str(check)[:_TAIL]


def _tail(output: str) -> str:
    text = output.strip()[-_TAIL:]
    return f" Its output ends with: {text!r}." if text else ""


def _stored(file: int, task: Task) -> Validation | None:
    with open(file, encoding="utf-8", closefd=False) as text:
        try:
            facts = _StoredFacts.model_validate_json(text.read())
        except (ValueError, OSError):  # a new file, or half of one
            return None
    complete = len(facts.setup) == len(task.verify) and len(facts.solved) == len(task.verify) * bool(task.solution)
    if facts.format != _FORMAT or not complete:
        return None
    return Validation(References(setup=facts.setup, solved=facts.solved))


def _write(file: int, text: str) -> None:
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)
        os.fsync(file)
    except OSError as exc:  # a full disk: the next process validates again
        logger.warning("the validation of checks is not kept: %s", exc)
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
