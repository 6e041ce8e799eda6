"""Local sandboxes that fail as a broken node does. Workers of a cluster find them by `failing_sandboxes:NAME`.

`OPENENV_TEST_FOLDER` holds a file for each sandbox that an agent was to get, named by the rollout.
"""

from __future__ import annotations

import os
from pathlib import Path

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes.base import SandboxSnapshot, SandboxSpec
from openenv.sandboxes.local import LocalSandbox, LocalSandboxes

VARIABLE = "OPENENV_TEST_FOLDER"


def opened(folder: Path) -> dict[str, int]:
    """Return how often a sandbox was opened for the agent of each rollout."""
    counts: dict[str, int] = {}
    for path in folder.iterdir():
        rollout_id = path.name.partition("~")[0]
        counts[rollout_id] = counts.get(rollout_id, 0) + 1
    return counts


class CountedSandboxes(LocalSandboxes):
    """Work, and count."""

    failures = 0
    """How many of the first ones of each rollout fail."""

    def open(self, spec: SandboxSpec | None = None, *, from_snapshot: SandboxSnapshot | None = None) -> LocalSandbox:
        rollout_id = "" if spec is None else spec.metadata.get("rollout_id", "")
        if rollout_id:
            folder = Path(os.environ[VARIABLE])
            number = opened(folder).get(rollout_id, 0) + 1
            (folder / f"{rollout_id}~{number}").touch()
            if number <= self.failures:
                raise SandboxError(f"no sandbox at attempt {number}")
        return super().open(spec, from_snapshot=from_snapshot)


class FailingOnce(CountedSandboxes):
    """Fail for the first attempt of each rollout."""

    failures = 1


class FailingAlways(CountedSandboxes):
    """Fail for all attempts."""

    failures = 1_000_000


class Missing(LocalSandboxes):
    """Say that this machine has no sandboxes."""

    def check(self) -> None:
        raise SandboxUnavailable("bubblewrap is not installed on this node: apt-get install -y bubblewrap")
