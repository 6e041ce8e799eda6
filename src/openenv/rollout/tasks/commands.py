"""A task's sandbox: its specification, its files, and shell lines that run in it with a `CommandResult`.

Setup lines, checks and solutions all run through `run_line`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from openenv.rollout.tasks.task import Task, as_bytes
from openenv.rollout.tasks.trust_levels import Trust
from openenv.sandboxes.base import ExecResult, Sandbox, SandboxSpec

MAX_OUTPUT = 256 * 1024
"""Bytes of each output stream that a `CommandResult` keeps."""


class CommandResult(BaseModel):
    """The result of a setup line, a verify line or the `judge` of a check. A failed check never has exit code 0."""

    cmd: str
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    run: CommandResult | None = None
    """The result of `Check.run`, for a judge."""
    score: float | None = None
    """The reward that the judge wrote, or None. A written reward counts instead of the exit code."""
    note: str | None = None
    """Why the check counts differently from its exit code."""
    trust: Trust | None = None
    """The trust level of a check; None for other commands."""


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of a shell line."""

    result: CommandResult
    crash: str | None = None
    """Why the line did not end by itself; None if it did."""
    timed_out: bool = False


def run_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str] | None = None, cmd: str | None = None
) -> CommandRun:
    """Run a shell line in the work folder; the result shows `cmd` instead of `line` if it is set."""
    done = sandbox.exec(line, envs=envs, cwd=sandbox.workdir, timeout=timeout, max_output=MAX_OUTPUT)
    result = CommandResult(
        cmd=cmd or line, exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, duration_s=done.duration_s
    )
    return CommandRun(result, crash_of(done, timeout), done.timed_out)


def crash_of(done: ExecResult, timeout: float) -> str | None:
    """Return why a command did not end by itself, or None if it did."""
    if done.timed_out:
        return f"did not end within {timeout:g} s"
    if 128 < done.exit_code <= 192:
        return f"was ended by signal {done.exit_code - 128}"
    return None


def lay_files(sandbox: Sandbox, files: Mapping[str, str | bytes]) -> None:
    """Write files, relative paths below the work folder."""
    for path, content in files.items():
        sandbox.write_bytes(posixpath.join(sandbox.workdir, path), as_bytes(content))


def lay_outer_files(sandbox: Sandbox, task: Task) -> None:
    """Write the task's files outside the home and the work folder; archives contain the others."""
    inner = (f"{sandbox.home}/", f"{sandbox.workdir}/")
    outer = {path: text for path, text in task.files.items() if path.startswith("/")}
    lay_files(sandbox, {path: text for path, text in outer.items() if not posixpath.normpath(path).startswith(inner)})


def sandbox_spec(task: Task, *, verifies: bool = False) -> SandboxSpec:
    """Return the specification of the sandboxes of a task, or of its verifier."""
    image, build = task.image, task.build
    if verifies and task.verify_image is not None:
        image, build = task.verify_image, task.verify_build
    return SandboxSpec(
        limits=task.limits,
        image=image,
        build=None if build is None else Path(build),
        build_timeout_s=task.build_timeout_s,
        workdir=task.workdir,
        folders=task.folders,
    )
