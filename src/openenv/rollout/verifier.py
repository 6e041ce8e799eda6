"""Verification: the verify lines, in a fresh sandbox that the agent never touched, and the reward they earn.

Knows sandboxes, archives and tasks. Must not know agents, models or stores: what was stored can be verified again.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.rollout.cancel import Cancellation
from openenv.rollout.commands import lay_files, lay_files_over, run_line
from openenv.rollout.outcome import CommandResult
from openenv.rollout.task import Task
from openenv.sandboxes.base import HOME, ExecResult, Sandbox, Sandboxes, SandboxSpec

REWARD_FILE = "logs/verifier/reward.txt"
"""Below the home of the verifier's sandbox."""
_SLACK_S = 120.0


@dataclass(slots=True)
class Verdict:
    """What the verifier found. `crash` says why there is no reward although there are checks."""

    results: list[CommandResult] = field(default_factory=list)
    reward: float | None = None
    crash: str | None = None
    sandbox_id: str = ""
    ignored_reward_file: bool = False
    """A reward file was written, but the task does not say that it counts."""


def verify(
    task: Task,
    backend: Sandboxes,
    *,
    worktree: Path | None,
    baseline: Path | None,
    home: str = HOME,
    cancel: Cancellation | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Verdict:
    """Run a task's verify lines over a work tree.

    Args:
        worktree: The merged work tree; None leaves the work folder as the setup made it.
        baseline: The home as the setup left it, or None.
        home: Where the home is inside.

    Raises:
        SandboxError: the verifier's sandbox did not start. One that dies later is a `crash`.
    """
    verdict = Verdict()
    if not task.verify:
        return verdict
    cancel = cancel or Cancellation()
    cancel.check()
    lifetime = len(task.verify) * task.verify_timeout_s + _SLACK_S
    spec = SandboxSpec(limits=task.limits, timeout_s=lifetime, home=home)
    with ExitStack() as stack:
        sandbox = stack.enter_context(backend.open(spec))
        stack.enter_context(cancel.on_cancel(sandbox.kill))
        verdict.sandbox_id = sandbox.sandbox_id
        try:
            _prepare(sandbox, task, worktree, baseline)
            _run_lines(sandbox, task, verdict, report)
            if verdict.crash is None:
                _decide(sandbox, verdict, reads_file=reads_reward_file(task, baseline))
        except SandboxGone as exc:
            verdict.crash = f"the verifier's sandbox ended: {exc.reason}"
        except (SandboxError, OSError) as exc:
            verdict.crash = f"the verifier's sandbox failed: {exc}"
        cancel.check()
    return verdict


def clean_environment(home: str) -> dict[str, str]:
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
    }


def reads_reward_file(task: Task, baseline: Path | None = None) -> bool:
    """Say whether a reward file counts for this task: when it says so, or it or what its setup left names the file."""
    if task.reward_file is not None:
        return task.reward_file
    texts = [*task.verify, *task.setup, *task.verify_files.values(), *task.files.values()]
    if any("reward.txt" in text for text in texts):
        return True
    return baseline is not None and _names_reward_file(baseline)


def crash_of(done: ExecResult, timeout: float) -> str | None:
    """Return why a verify line did not come to a result of its own, or None when it did."""
    if done.timed_out:
        return f"did not end within {timeout:g} s"
    if 128 < done.exit_code <= 192:
        return f"was ended by signal {done.exit_code - 128}"
    return None


def _prepare(sandbox: Sandbox, task: Task, worktree: Path | None, baseline: Path | None) -> None:
    folder = posixpath.join(sandbox.home, posixpath.dirname(REWARD_FILE))
    if baseline is not None:
        sandbox.unpack(baseline, sandbox.home)
    if worktree is not None:
        if baseline is not None:
            shut = ["-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
            _run(sandbox, ["find", sandbox.workdir, *shut])  # the setup may have shut a folder
            _run(sandbox, ["find", sandbox.workdir, "-mindepth", "1", "-delete"])
        sandbox.unpack(worktree, sandbox.workdir)
    lay_files(sandbox, {path: text for path, text in task.files.items() if _outside(path, sandbox.home)})
    _run(sandbox, ["/bin/sh", "-c", 'rm -rf -- "$1" && mkdir -p -- "$1"', "sh", folder])


def _run_lines(sandbox: Sandbox, task: Task, verdict: Verdict, report: Callable[[str], None]) -> None:
    envs = clean_environment(sandbox.home)
    for number, line in enumerate(task.verify, 1):
        lay_files_over(sandbox, task.verify_files)  # again for each line: the one before ran the agent's code
        result, done = run_line(sandbox, line, timeout=task.verify_timeout_s, envs=envs)
        verdict.results.append(result)
        report(f"check {number} of {len(task.verify)}: exit code {result.exit_code}")
        crash = crash_of(done, task.verify_timeout_s)
        if crash is not None:
            verdict.crash = f"verify line {number} {crash}"
            return
        sandbox.stop_processes()  # what the agent's code started must not write after its check


def _decide(sandbox: Sandbox, verdict: Verdict, *, reads_file: bool) -> None:
    given = _reward_file(sandbox)
    if given is not None and reads_file:
        verdict.reward = given
        return
    verdict.ignored_reward_file = given is not None
    verdict.reward = sum(result.exit_code == 0 for result in verdict.results) / len(verdict.results)


def _names_reward_file(archive: Path) -> bool:
    name, before = b"reward.txt", b""
    with archive.open("rb") as file:
        while chunk := file.read(1024 * 1024):
            if name in before + chunk:
                return True
            before = chunk[-len(name) :]
    return False


def _reward_file(sandbox: Sandbox) -> float | None:
    try:
        reward = float(sandbox.read_bytes(posixpath.join(sandbox.home, REWARD_FILE), max_bytes=1024))
    except SandboxGone:
        raise
    except (SandboxError, OSError, ValueError):  # nothing there, or no file, or no number
        return None
    return reward if math.isfinite(reward) else None


def _outside(path: str, home: str) -> bool:
    return path.startswith("/") and not posixpath.normpath(path).startswith(f"{home}/")


def _run(sandbox: Sandbox, argv: list[str]) -> None:
    done = sandbox.exec(argv, cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"'{argv[0]}' failed in the verifier's sandbox: {done.stderr.strip()}")
