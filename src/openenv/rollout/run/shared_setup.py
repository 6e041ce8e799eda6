"""Shared setups: the first rollout of a group runs the setup, the others start from its snapshot.

    SharedSetups ── one per run_many ── has a `SetupGroup` for each setup that more than one rollout needs

    a rollout starts:  no result, no leader ──> it becomes the leader: runs the setup and publishes the result. If its
                                                sandbox dies or it is cancelled, it steps down and the next one leads
                       a leader is running  ──> it waits
                       the result exists    ──> snapshot: its sandbox starts from it
                                                failure: the rollout fails in the same way
                                                neither (the setup left processes running): it runs the setup itself

The snapshot is taken before any agent starts, and removed with the last rollout of the group. Knows nothing of phases.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from openenv.rollout.progress import Cancellation
from openenv.rollout.store.outcome import Label
from openenv.rollout.tasks.task import CommandResult, Task
from openenv.sandboxes.base import SandboxSnapshot, sweep_snapshots

_SETUP_FIELDS = {"files", "setup", "setup_timeout_s", "limits", "image", "build", "workdir", "folders", "network"}
"""The fields of a task that decide the sandbox's content before the agent starts."""


def setup_key(task: Task) -> str | None:
    """Return a key that is equal for tasks with equal setups.

    None for a task without setup lines, because writing files takes no time.
    """
    if not task.setup:
        return None
    parts = task.model_dump_json(include=_SETUP_FIELDS)
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class SetupResult:
    """The result of a setup."""

    rollout_id: str
    """The rollout that ran it."""
    results: list[CommandResult]
    snapshot: SandboxSnapshot | None = None
    failure: Label | None = None


class SetupGroup:
    """The rollouts that need the same setup; their threads share it.

    Args:
        members: The number of rollouts that will need it, as far as the caller knows.
    """

    def __init__(self, members: int = 0) -> None:
        self._changed = threading.Condition()
        self._has_leader = False
        self.result: SetupResult | None = None
        self.members = members
        """The number of rollouts that need it and have not ended, as far as the caller knows."""
        self.running = 0
        """The number of them that have started and not ended."""

    @property
    def is_pending(self) -> bool:
        """Whether another rollout would have to wait: others have started, and the result does not exist yet."""
        return self.running > 0 and self.result is None

    def lead(self) -> bool:
        """Make the calling rollout the leader, which runs the setup; False if there is a leader or a result."""
        with self._changed:
            if self._has_leader or self.result is not None:
                return False
            self._has_leader = True
            return True

    def wait(self, cancel: Cancellation) -> SetupResult | None:
        """Wait for the leader's result and return it. None if the leader stepped down: now the caller leads.

        Raises:
            RolloutCancelled: while waiting.
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
        """Stop leading; if nothing was published, another rollout leads."""
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
    """The groups of one `run_many`.

    A context manager: it first removes the snapshots of killed processes, and at the end its own.

    Args:
        tasks: All tasks of the batch. None if they are not known in advance: then only rollouts that run at the same
            time share a setup.
    """

    def __init__(self, tasks: Iterable[Task] | None) -> None:
        self._lock = threading.Lock()
        self._is_complete = tasks is not None
        keys = Counter(setup_key(task) for task in tasks or ())
        self._groups = {key: SetupGroup(members) for key, members in keys.items() if key is not None}

    def is_pending(self, key: str | None) -> bool:
        """Return whether a rollout with this setup would have to wait for another rollout."""
        with self._lock:
            return key is not None and key in self._groups and self._groups[key].is_pending

    def join(self, key: str | None) -> SetupGroup | None:
        """Return the group of a starting rollout, which must `leave` it at its end; None without a setup."""
        if key is None:
            return None
        with self._lock:
            group = self._groups.setdefault(key, SetupGroup())
            group.running += 1
            if not self._is_complete:
                group.members += 1
            return group

    def leave(self, key: str | None) -> None:
        """Remove an ended rollout from its group; the last one removes the snapshot."""
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
