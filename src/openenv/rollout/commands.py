"""Setup and verify lines: what runs one of them, and the files that are laid out before.

Knows sandboxes and `CommandResult`. Must not know what a line's failure means.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from openenv.errors import SandboxError
from openenv.rollout.outcome import CommandResult
from openenv.sandboxes.base import ExecResult, Sandbox

MAX_OUTPUT = 256 * 1024
_CLEAR = """
while [ "$1" != -- ]; do
  if [ -L "$1" ] || { [ -e "$1" ] && [ ! -d "$1" ]; }; then rm -f -- "$1" || exit 1; fi
  shift
done
shift
for file in "$@"; do rm -rf -- "$file" || exit 1; done
"""


def run_line(
    sandbox: Sandbox, line: str, *, timeout: float, envs: Mapping[str, str] | None = None
) -> tuple[CommandResult, ExecResult]:
    """Run a shell line in the work folder; `timed_out` and the like are in the second value."""
    done = sandbox.exec(line, envs=envs, cwd=sandbox.workdir, timeout=timeout, max_output=MAX_OUTPUT)
    result = CommandResult(
        cmd=line, exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr, duration_s=done.duration_s
    )
    return result, done


def lay_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files, relative paths below the work folder."""
    for path, text in files.items():
        sandbox.write_text(posixpath.join(sandbox.workdir, path), text)


def lay_files_over(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files over a tree that nobody trusts: links and odd files in the way are removed first."""
    targets = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in files]
    if not targets:
        return
    below = f"{sandbox.workdir}/"
    parents = sorted({parent for path in targets if path.startswith(below) for parent in _parents(path, below)})
    done = sandbox.exec(["/bin/sh", "-c", _CLEAR, "sh", *parents, "--", *targets], cwd="/")
    if done.exit_code != 0:
        raise SandboxError(f"The verifier's files could not be laid out: {done.stderr.strip()}")
    lay_files(sandbox, files)


def _parents(path: str, below: str) -> list[str]:
    found = []
    parent = posixpath.dirname(path)
    while parent.startswith(below):
        found.append(parent)
        parent = posixpath.dirname(parent)
    return found
