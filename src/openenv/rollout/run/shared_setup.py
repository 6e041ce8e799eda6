"""Setups that rollouts share: the first of a group runs it, the others begin with a snapshot of what it left.

    SharedSetups ── one per run_many ── has a `SetupGroup` for each setup that more than one rollout needs

    a rollout comes:   no result, no leader ──> it leads: runs the setup, publishes a result, or steps down (its sandbox
                                                died, it was cancelled), and the next one leads
                       a leader is at work  ──> it waits
                       a result is there    ──> snapshot: its sandbox is opened from it
                                                failure: the rollout fails in the same way
                                                neither (a setup that left processes running): it runs the setup itself

The snapshot is taken before any agent starts, and is removed with the last rollout of the group. Knows no phases.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from openenv.rollout.cancellation import Cancellation
from openenv.rollout.store.outcome import Label
from openenv.rollout.tasks.commands import CommandResult
from openenv.rollout.tasks.task import Task
from openenv.sandboxes.base import SandboxSnapshot, sweep_snapshots

_SETUP_FIELDS = {"files", "setup", "setup_timeout_s", "limits", "image", "build", "workdir", "folders", "network"}
"""What a sandbox is before the agent comes."""


def setup_key(task: Task) -> str | None:
    """Return what tasks have in common whose setups leave the same: all that the sandbox gets before the agent.

    None for a task without setup lines: to write files takes no time.
    """
    if not task.setup:
        return None
    parts = task.model_dump_json(include=_SETUP_FIELDS)
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class SetupResult:
    """How a setup ended."""

    rollout_id: str
    """The rollout that ran it."""
    results: list[CommandResult]
    snapshot: SandboxSnapshot | None = None
    failure: Label | None = None


class SetupGroup:
    """The rollouts that need the same setup; their threads share it.

    Args:
        members: How many rollouts are known to need it.
    """

    def __init__(self, members: int = 0) -> None:
        self._changed = threading.Condition()
        self._has_leader = False
        self.result: SetupResult | None = None
        self.members = members
        """How many rollouts need it that are known of and have not ended, this one included."""
        self.running = 0
        """How many of them have begun and not ended."""

    @property
    def is_pending(self) -> bool:
        """Whether one more rollout would have to wait: others have begun, and there is no result yet."""
        return self.running > 0 and self.result is None

    def lead(self) -> bool:
        """Return whether a rollout is to run the setup: no other does, and there is no result."""
        with self._changed:
            if self._has_leader or self.result is not None:
                return False
            self._has_leader = True
            return True

    def wait(self, cancel: Cancellation) -> SetupResult | None:
        """Wait for the result of the leader, and return it; None if there is none: now this rollout leads.

        Raises:
            RolloutCancelled: before that.
        """
        with cancel.on_cancel(self._wake), self._changed:
            self._changed.wait_for(lambda: cancel.cancelled or self.result is not None or not self._has_leader)
            cancel.check()
            if self.result is None:
                self._has_leader = True
            return self.result

    def publish(self, result: SetupResult) -> None:
        """Pass the leader's result to the others."""
        with self._changed:
            self.result = result
            self._changed.notify_all()

    def step_down(self) -> None:
        """End the leader's part; if it has published nothing, another rollout leads."""
        with self._changed:
            self._has_leader = False
            self._changed.notify_all()

    def close(self) -> None:
        """Remove the snapshot."""
        if self.result is not None and self.result.snapshot is not None:
            self.result.snapshot.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class SharedSetups:
    """The groups of one `run_many`. Also a context manager, which removes all snapshots at its end, and first those of
    processes that were killed.

    Args:
        tasks: All tasks that will come. None where that is not known: then a group has those that have begun, and a
            rollout that comes alone shares nothing.
    """

    def __init__(self, tasks: Iterable[Task] | None) -> None:
        self._lock = threading.Lock()
        self._is_complete = tasks is not None
        keys = Counter(setup_key(task) for task in tasks or ())
        self._groups = {key: SetupGroup(members) for key, members in keys.items() if key is not None}

    def is_pending(self, key: str | None) -> bool:
        """Return whether a rollout with this setup would have to wait for another's."""
        with self._lock:
            return key is not None and key in self._groups and self._groups[key].is_pending

    def join(self, key: str | None) -> SetupGroup | None:
        """Return the group of a rollout that begins, which has to `leave` it; None for one without a setup."""
        if key is None:
            return None
        with self._lock:
            group = self._groups.setdefault(key, SetupGroup())
            group.running += 1
            if not self._is_complete:
                group.members += 1
            return group

    def leave(self, key: str | None) -> None:
        """Note that a rollout has ended; the last of a group removes its snapshot."""
        if key is None:
            return
        with self._lock:
            group = self._groups[key]
            group.running -= 1
            group.members -= 1
            if group.members > 0:
                return
            del self._groups[key]
        group.close()

    def __enter__(self) -> SharedSetups:
        sweep_snapshots()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for group in self._groups.values():
            group.close()
