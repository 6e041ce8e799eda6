"""A case: what is verified, and the fresh sandboxes in which that is done.

Knows sandboxes, archives and tasks: what lies in a verifier's sandbox before anything runs there. Must not know what
the outcome of a check means.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.rollout.commands import lay_files
from openenv.rollout.progress import Cancellation
from openenv.rollout.task import Task
from openenv.sandboxes.base import HOME, ExecResult, Sandbox, Sandboxes, SandboxSpec

REWARD_FILE = "logs/verifier/reward.txt"
"""Below the home of a verifier's sandbox."""
_SLACK_S = 120.0


class NotStarted(Exception):
    """A sandbox did not start; the cause is the sandbox's own error."""

    def __init__(self, error: SandboxError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Case:
    """What is verified, and where.

    Args:
        task: What was to be done.
        backend: What starts sandboxes.
        worktree: The agent's work tree, merged; None leaves the work folder as the setup made it.
        baseline: The home as the setup left it, or None.
        home: Where the home is inside.
        cancel: What ends it early.
    """

    task: Task
    backend: Sandboxes
    worktree: Path | None
    baseline: Path | None
    home: str = HOME
    cancel: Cancellation = field(default_factory=Cancellation)

    @contextmanager
    def sandbox(self, *, with_work: bool, seconds: float) -> Iterator[Sandbox]:
        """Start a fresh sandbox that holds what the setup left and, `with_work`, what the agent made of it.

        Raises:
            NotStarted: the sandbox did not start.
            SandboxError: what belongs into it could not be laid out there.
        """
        self.cancel.check()
        spec = SandboxSpec(limits=self.task.limits, timeout_s=seconds + _SLACK_S, home=self.home)
        try:
            opened = self.backend.open(spec)
        except SandboxError as exc:
            self.cancel.check()
            raise NotStarted(exc) from exc
        with opened as sandbox, self.cancel.on_cancel(sandbox.kill):
            self._prepare(sandbox, self.worktree if with_work else None)
            yield sandbox

    def _prepare(self, sandbox: Sandbox, worktree: Path | None) -> None:
        folder = posixpath.join(sandbox.home, posixpath.dirname(REWARD_FILE))
        if self.baseline is not None:
            sandbox.unpack(self.baseline, sandbox.home)
        if worktree is not None:
            if self.baseline is not None:
                shut = ["-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
                run(sandbox, ["find", sandbox.workdir, *shut])  # the setup may have shut a folder
                run(sandbox, ["find", sandbox.workdir, "-mindepth", "1", "-delete"])
            sandbox.unpack(worktree, sandbox.workdir)
        lay_files(sandbox, {path: text for path, text in self.task.files.items() if _outside(path, sandbox.home)})
        run(sandbox, ["/bin/sh", "-c", 'rm -rf -- "$1" && mkdir -p -- "$1"', "sh", folder])


def clean_environment(home: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of verify lines: nothing in it points into the work tree.

    PATH is the sandbox's own, as it was for the setup and the agent: the checks run on the same Python.
    """
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A repository in the work tree must not bring commands along.
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
        **(more or {}),
    }


def crash_of(done: ExecResult, timeout: float) -> str | None:
    """Return why a verify line did not come to a result of its own, or None when it did."""
    if done.timed_out:
        return f"did not end within {timeout:g} s"
    if 128 < done.exit_code <= 192:
        return f"was ended by signal {done.exit_code - 128}"
    return None


def read_reward(sandbox: Sandbox) -> float | None:
    """Return the number in a sandbox's reward file, or None where there is none."""
    try:
        reward = float(sandbox.read_bytes(posixpath.join(sandbox.home, REWARD_FILE), max_bytes=1024))
    except SandboxGone:
        raise
    except (SandboxError, OSError, ValueError):  # nothing there, or no file, or no number
        return None
    return reward if math.isfinite(reward) else None


def run(sandbox: Sandbox, argv: list[str]) -> str:
    """Run a command of the verifier's own; return what it printed.

    Raises:
        SandboxError: it failed.
    """
    done = sandbox.exec(argv, cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"'{argv[0]}' failed in the verifier's sandbox: {done.stderr.strip()}")
    return done.stdout


def _outside(path: str, home: str) -> bool:
    return path.startswith("/") and not posixpath.normpath(path).startswith(f"{home}/")
