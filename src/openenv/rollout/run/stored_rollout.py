"""Stored rollouts that go on: `StoredRollout.resume` after an interruption, `StoredRollout.branch` from any model call.

Knows which options a rollout was run with. `engine` runs it, `capture/replay.py` gives its agent the recorded answers.
"""

# A rollout of six calls, and two branches from call 4. Their agents start in fresh sandboxes with the same setup and
# get the answers 1 to 4 again, so that files and processes are as they were. Then each goes its own way:
#
#   a41f   1 ── 2 ── 3 ── 4 ── 5 ── 6
#   77b0                  └─── 5 ── 6 ── 7       start a41f at 4, group "a41f@4-9c"
#   c0de                  └─── 5
#
# On disk a branch has its own calls only, with a reference to the journal of its parent. It is a rollout like any
# other, with an outcome, a work tree and a group. Its trainable tokens are those that were sampled for it.

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from typing_extensions import Unpack

from openenv import settings
from openenv.errors import CaptureError, StoreError
from openenv.rollout.capture.records import Call, Recording, RecordingReader
from openenv.rollout.progress import Cancellation, OnProgress
from openenv.rollout.run.batch import CONCURRENCY, OnOutcome, RunManyArguments, run_many
from openenv.rollout.run.engine import Engine, EngineArguments, EngineOptions
from openenv.rollout.store.outcome import Outcome
from openenv.rollout.store.store import BegunRollout, RolloutStore, stored_outcome
from openenv.rollout.tasks.task import BranchPoint, Budget, Model

PLAYED = "play"
"""The metadata key in the journal of a played episode; its value has the options of `play`, and the server."""


class StoredRollout:
    """A finished or interrupted rollout of a store.

        rollout = StoredRollout(store, "3f2a")
        outcomes = rollout.branch(call=5, samples=8)

    Args:
        store: The store.
        rollout_id: The rollout; a unique prefix of its ID is enough.

    Raises:
        StoreError: There is no such rollout.
    """

    def __init__(self, store: RolloutStore, rollout_id: str) -> None:
        self.store = store
        interrupted = [each for each in store.interrupted() if rollout_id and each.startswith(rollout_id)]
        self.is_interrupted = len(interrupted) == 1
        """Whether its engine died before its end."""
        self.rollout_id = interrupted[0] if self.is_interrupted else store.resolve(rollout_id)

    @property
    def is_played(self) -> bool:
        """Whether it is an episode of `play`."""
        with contextlib.suppress(StoreError):
            return PLAYED in self.answered()[0].metadata
        return False

    def options(self) -> dict[str, Any]:
        """Return the options that the rollout was run with, as far as the store knows them, for `EngineOptions`.

        The model has no key: its endpoint gets `OPENENV_MODEL_KEY`.
        """
        with contextlib.suppress(StoreError):
            if engine := self.store.begun(self.rollout_id).engine:
                return described_options(engine)
        outcome = stored_outcome(self.store, self.rollout_id)
        described: dict[str, Any] = {} if outcome is None else {"agent": outcome.agent, "sandbox": outcome.sandbox}
        with contextlib.suppress(StoreError):  # an episode of `play` has no engine, but a model
            # The seed was derived for this rollout: with it, all branches would be equal.
            described["model"] = {name: value for name, value in self.answered()[0].model.items() if name != "seed"}
        return described_options(described)

    def resume(self, **engine: Unpack[EngineArguments]) -> Outcome:
        """Run an interrupted rollout again; its agent gets the recorded answers first.

        Args:
            engine: Options that replace those of the rollout, such as `model`.

        Raises:
            StoreError: It has ended, or runs in another process.
        """
        options = {**self.options(), **engine, "store": self.store}
        with Engine(EngineOptions(**options)) as shared:
            return shared.resume(self.rollout_id)

    def branch(self, *, call: int, samples: int = 8, **options: Unpack[RunManyArguments]) -> list[Outcome]:
        """Run several continuations from the state after the answer of a call, as one group.

        Each has its own sandbox. Its agent gets the answers up to `call` again, then the model samples.

        Args:
            call: The number of the last shared call, from 1; 0 runs the task from its start.
            samples: The number of continuations.
            options: Options of `run_many` that replace those of the rollout, such as `concurrency` and `model`.

        Raises:
            ValueError: A number is out of range.
            StoreError: The rollout has no such call, or is an episode of `play`.
        """
        if samples < 1:
            raise ValueError("samples must be at least 1")
        recording, answered = self.answered()
        if PLAYED in recording.metadata:
            raise StoreError(f"'{self.rollout_id}' is an episode of `play`; branch it with `openenv.train.branch`")
        if call != 0 and call not in answered:
            numbers = f"1 to {max(answered)}" if answered else "none"
            raise StoreError(f"The rollout '{self.rollout_id}' has no answer of call {call}; its calls: {numbers}")
        arguments: dict[str, Any] = {**self.options(), "seed": None}  # with its seed, branches could be equal
        if "model" in arguments:
            arguments["model"] = arguments["model"].model_copy(update={"seed": None})
        arguments |= {**options, "store": self.store}
        group = f"{self.rollout_id[:8]}@{call}-{secrets.token_hex(2)}"
        arguments["metadata"] = {"group": group, **(options.get("metadata") or {})}
        arguments["start"] = BranchPoint(self.rollout_id, call)
        return run_many([self.store.task(self.rollout_id)] * samples, **arguments)

    def answered(self) -> tuple[Recording, dict[int, Call]]:
        """Return the facts about the rollout in its journal, and its answered calls by number.

        Raises:
            StoreError: The journal cannot be read.
        """
        try:
            reader = RecordingReader(self.store.captures / self.rollout_id)
            reader.advance()
        except CaptureError as exc:
            raise StoreError(f"The rollout '{self.rollout_id}' cannot be branched: {exc}") from exc
        return reader.recording, reader.builder.answered


def described_options(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options from their description in a store."""
    options = {name: value for name, value in described.items() if value is not None}
    if "model" in options:
        key = settings.model_key()
        fields = {name: value for name, value in options["model"].items() if name in Model.model_fields}
        options["model"] = Model.model_validate({**fields, **({"api_key": key} if key else {})})
    if "budget" in options:
        options["budget"] = Budget.model_validate(options["budget"])
    return options


def resume_rollouts(
    store: RolloutStore,
    /,
    *,
    concurrency: int = CONCURRENCY,
    on_progress: OnProgress | None = None,
    on_outcome: OnOutcome | None = None,
    cancel: Cancellation | None = None,
    **engine: Unpack[EngineArguments],
) -> list[Outcome]:
    """Run all interrupted rollouts of a store again, each with the options that it was run with.

    Those that another process resumes at the same time are left to it.

    Args:
        store: The store.
        concurrency: The number of rollouts at once.
        on_progress: Called with the events of all rollouts.
        on_outcome: Called with a number from 0 and an outcome as soon as it exists.
        cancel: Ends all running rollouts.
        engine: Options that replace those of the rollouts, such as `model`.

    Raises:
        AgentUnavailable, SandboxUnavailable: An agent or a sandbox backend cannot run here.
        StoreError: An outcome could not be stored; or, after all others have ended, some rollouts do not say how they
            were run, or their journals are damaged.
    """
    cancel = cancel or Cancellation()
    waiting = [each for each in store.running() if not each.is_running and store.is_begun(each.rollout_id)]
    unknown = [each for each in waiting if each.damage or (not each.engine and "agent" not in engine)]
    waiting = [each for each in waiting if each not in unknown]
    outcomes: list[Outcome] = []
    while waiting:
        # One engine for all rollouts with the same options.
        same = [each for each in waiting if _settings(each) == _settings(waiting[0])]
        waiting = [each for each in waiting if each not in same]
        options: dict[str, Any] = {**described_options(same[0].engine), **engine, "store": store}
        with Engine(EngineOptions(**options)) as shared, ThreadPoolExecutor(concurrency, "openenv-rollout") as pool:
            run = partial(shared.resume, on_progress=on_progress, cancel=cancel)
            futures = {pool.submit(run, each.rollout_id): each.rollout_id for each in same}
            try:
                for future in as_completed(futures):
                    try:
                        outcomes.append(future.result())
                    except StoreError:
                        if futures[future] in store.interrupted():
                            raise
                        continue  # another process has resumed it meanwhile
                    if on_outcome is not None:
                        on_outcome(len(outcomes) - 1, outcomes[-1])
            except BaseException:
                cancel.cancel("interrupted")
                pool.shutdown(cancel_futures=True)
                raise
    if unknown:
        _refuse_unknown(unknown)
    return outcomes


def _refuse_unknown(rollouts: list[BegunRollout]) -> None:
    names = ", ".join(each.damage or each.rollout_id for each in rollouts[:5])
    raise StoreError(
        f"{len(rollouts)} rollouts do not say how they were run: {names}. Pass agent, model and sandbox, or run the "
        f"damaged ones again"
    )


def _settings(begun: BegunRollout) -> Mapping[str, Any]:
    return begun.engine or {"agent": begun.agent, "sandbox": begun.sandbox}
