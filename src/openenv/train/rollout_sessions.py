"""Rollouts as agent sessions for a trainer: any agent, in any sandbox, with exact tokens.

Pass `RolloutSessionFactory` to TRL's `HarnessRolloutWorker`. The module itself knows nothing of TRL.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from openenv.errors import RolloutCancelled, RolloutError
from openenv.protocol.tool_messages import Tool
from openenv.rollout.capture import CaptureOptions, CaptureServer, export
from openenv.rollout.capture import read as read_recording
from openenv.rollout.capture.training_trace import TrainingTrace
from openenv.rollout.progress import Cancellation
from openenv.rollout.run.agent_sessions import (
    Message,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
)
from openenv.rollout.run.engine import Engine, EngineOptions, new_rollout_id
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.tasks.task import Model, Task
from openenv.sandboxes.host import scratch

logger = logging.getLogger(__name__)

_NOT_SCORED = frozenset({"env_failed", "sandbox_failed", "grader_failed", "cancelled"})


class RolloutSessionFactory(ResourceSessionFactory["RolloutSession"]):
    """Creates a session for each prompt: a rollout, as with `run_rollout`.

    TRL's worker calls the factory with the trainer's sampling. Give the worker a partial with everything else:
    `functools.partial(RolloutSessionFactory, tasks, model=model, agent="opencode", sandbox="local")`.

    Args:
        tasks: The possible tasks. The last user message of a prompt must equal a task's instruction.
        model: The endpoint.
        sampling: All sampling parameters with the endpoint's names, as TRL's worker passes them. The capture proxy
            enforces them.
        engine: The fields of `EngineOptions`, such as `agent`, `sandbox`, `budget` and `store`.

    Raises:
        ValueError: Two tasks have the same instruction, or `tasks` is empty.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        model: Model,
        sampling: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            if task.instruction in self._tasks:
                raise ValueError(
                    f"two tasks have the instruction {task.instruction[:200]!r}: prompts cannot tell them apart"
                )
            self._tasks[task.instruction] = task
        if not self._tasks:
            raise ValueError("there is no task")
        self._model = model if sampling is None else Model(**{**dict(model), "sampling": dict(sampling)})
        self._engine_options = EngineOptions(**engine)
        self._has_warned = False
        self._lock = threading.Lock()
        self._shared: _SharedEngine | None = None

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> RolloutSession:
        """Start the rollout of a prompt.

        Args:
            task: A `Task`, an instruction, or the messages of a prompt.
            seed: Stored in the outcome's metadata; agents do not use it.
            episode_id: The ID of the rollout.

        Raises:
            ValueError: No task has this instruction.
            OpenEnvError: The agent or the sandbox cannot run here.
        """
        chosen = task if isinstance(task, Task) else self._task_of(task)
        with self._lock:
            if self._shared is None:
                self._shared = _SharedEngine(self._model, self._engine_options)
                # TRL does not close factories, so the engine closes when the process ends.
                weakref.finalize(self, self._shared.close)
            shared = self._shared
        return RolloutSession(shared, chosen, episode_id or new_rollout_id(), seed)

    def close(self) -> None:
        """Stop the capture proxy; close the sessions first."""
        with self._lock:
            shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def _task_of(self, prompt: Any) -> Task:
        text = prompt if isinstance(prompt, str) else _last_request(prompt)
        if not isinstance(prompt, str) and any(message.get("role") == "system" for message in prompt):
            self._warn_of_system_message()
        try:
            return self._tasks[text]
        except KeyError:
            raise ValueError(f"no task has the instruction {text[:200]!r}") from None

    def _warn_of_system_message(self) -> None:
        if not self._has_warned:
            logger.warning("Agents do not get the system message of a prompt: move it to the instruction of the task")
        self._has_warned = True


def _last_request(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of a user."""
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                content = "".join(str(part.get("text") or "") for part in content)
            return str(content)
    raise ValueError("the prompt has no message of a user")


class _SharedEngine:
    """The engine and capture proxy that the sessions of a factory share."""

    def __init__(self, model: Model, options: EngineOptions) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch())
            root: Path = folder / "captures" if options.store is None else options.store.captures
            capture = options.capture or stack.enter_context(CaptureServer(root, CaptureOptions(sockets=folder)))
            self.captures = capture.root
            self.keeps_records = options.store is not None or options.capture is not None
            self.engine = stack.enter_context(Engine(replace(options, model=model, capture=capture)))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Stop the engine and its proxy."""
        self._stack.close()


class RolloutSession(ResourceSession):
    """A running rollout as a `TrainableSession`; its agent has its own loop. `RolloutSessionFactory` creates it."""

    def __init__(self, shared: _SharedEngine, task: Task, rollout_id: str, seed: int | None) -> None:
        self.task = task
        self.rollout_id = rollout_id
        self._shared = shared
        self._cancel = Cancellation()
        self._outcome: Future[Outcome] = Future()
        self._trace: TrainingTrace | ValueError | None = None
        metadata = {} if seed is None else {"seed": seed}
        work = threading.Thread(target=self._run, args=(metadata,), name=f"openenv-{rollout_id}", daemon=True)
        work.start()

    def _run(self, metadata: dict[str, Any]) -> None:
        try:
            outcome = self._shared.engine.run(
                self.task, rollout_id=self.rollout_id, cancel=self._cancel, metadata=metadata
            )
            self._trace = self._read_trace()
            self._outcome.set_result(outcome)
        except BaseException as exc:  # raised again in the waiting thread
            self._outcome.set_exception(exc)

    def _read_trace(self) -> TrainingTrace | ValueError:
        records = self._shared.captures / self.rollout_id
        try:
            return export.training_trace(read_recording(records))
        except ValueError as exc:
            return exc
        finally:
            if not self._shared.keeps_records:
                shutil.rmtree(records, ignore_errors=True)

    # -- TrainableSession -------------------------------------------------------------------------------------------

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait for the rollout and its verification; return the agent's exit code.

        Raises:
            TimeoutError: The agent's time or budget ran out, or `timeout_s` has passed.
            RolloutError: The infrastructure failed, so the rollout gives no sample.
        """
        outcome = self._outcome.result(timeout_s)
        if outcome.status == "cancelled":
            raise RolloutCancelled(outcome.reason or "the session was closed")
        if outcome.status in _NOT_SCORED:
            raise RolloutError(f"{outcome.status}: {outcome.reason}")
        if outcome.status == "truncated":
            raise TimeoutError(outcome.reason)
        return outcome.agent_exit_code or 0

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the agent's calls: exact tokens, log-probabilities and masks.

        Raises:
            ValueError: They cannot be used for training; the message gives the reason.
            RuntimeError: The rollout has not ended, or it failed.
        """
        if not self._outcome.done() or self._trace is None:
            raise RuntimeError("the rollout has not ended: call wait_for_completion first")
        if isinstance(self._trace, ValueError):
            raise self._trace
        return self._trace

    # -- ResourceSession --------------------------------------------------------------------------------------------

    def initial_messages(self) -> list[Message]:
        """Return the instruction."""
        return [{"role": "user", "content": self.task.instruction}]

    def list_tools(self) -> list[Tool]:
        """Return nothing: the agent brings its own tools."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return an error, because the agent calls its tools itself."""
        return ToolResult(error=f"the agent runs its own tools; '{name}' cannot be called from here")

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Return the verdict of the checks; without a reward if the rollout failed."""
        outcome = self._outcome.result()
        reward = None if outcome.status in _NOT_SCORED else outcome.reward
        metrics = {"status": outcome.status, "trust": outcome.trust, "wall_s": outcome.wall_s}
        return VerifyResult(env_reward=reward, done=True, metrics=metrics)

    def close(self) -> None:
        """End the rollout, and wait until its sandboxes are gone."""
        self._cancel.cancel("the session was closed")
        self._outcome.exception()
