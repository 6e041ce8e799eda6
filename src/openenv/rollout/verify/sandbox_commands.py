"""The verifier's own commands in a sandbox: shell scripts beside this file, their arguments and their output.

Must not know checks. The agent's code may have run in the same sandbox, so any output can be wrong or missing.
"""

# script            used for
# ----------------  --------------------------------------------------------------------------------------------
# clear_paths.sh    remove links and odd files before the verifier's files are written over the agent's tree
# path_kinds.sh     decide which paths of `Check.keep` can be taken out of the sandbox
# is_plain.sh       refuse a reward file that the agent closed, or replaced by a link
# processes.sh      find processes that outlive a verify line
# file_states.sh    find changed verifier files (read by `verify_lines`)
#
# All of them run in `/bin/sh`, on images without Python as well.

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from functools import cache
from importlib import resources

from openenv.errors import SandboxError
from openenv.rollout.tasks.commands import lay_files
from openenv.sandboxes.base import ExecResult, Sandbox

_DEAD_STATES = "ZX"
"""The states of processes that have ended: zombie and dead."""


@cache
def _script(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def run_script(sandbox: Sandbox, name: str, *args: str, timeout: float | None = None) -> ExecResult:
    """Run one of the shell scripts beside this file."""
    argv = ["/bin/sh", "-c", _script(name), "sh", *args]
    return sandbox.exec(argv, cwd="/") if timeout is None else sandbox.exec(argv, cwd="/", timeout=timeout)


def run_command(sandbox: Sandbox, argv: list[str]) -> str:
    """Run a command and return its output.

    Raises:
        SandboxError: the command failed.
    """
    return _output(sandbox.exec(argv, cwd="/"), argv[0])


def path_kinds(sandbox: Sandbox, paths: tuple[str, ...]) -> str:
    """Return one letter for each path below the work folder: `f` file, `d` folder, `-` anything else.

    Raises:
        SandboxError: the script failed.
    """
    return _output(run_script(sandbox, "path_kinds.sh", sandbox.workdir, *paths), "path_kinds.sh")


def _output(done: ExecResult, command: str) -> str:
    if done.exit_code != 0:
        raise SandboxError(f"'{command}' failed in the verifier's sandbox: {done.stderr.strip()}")
    return done.stdout


def is_plain(sandbox: Sandbox, file: str) -> bool:
    """Return whether a file is writable and not reached through a link.

    Links above the home are part of the image and allowed.
    """
    top = sandbox.home if file.startswith(f"{sandbox.home}/") else "/"
    return run_script(sandbox, "is_plain.sh", top, posixpath.relpath(file, top), timeout=30).exit_code == 0


def lay_files_over(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files over the agent's tree, after removing links and odd files that are in the way.

    Raises:
        SandboxError: a path cannot be cleared.
    """
    targets = [posixpath.normpath(posixpath.join(sandbox.workdir, path)) for path in files]
    if not targets:
        return
    below = f"{sandbox.workdir}/"
    parents: set[str] = set()
    for path in targets:
        while (path := posixpath.dirname(path)).startswith(below):
            parents.add(path)
    done = run_script(sandbox, "clear_paths.sh", *sorted(parents), "--", *targets)
    if done.exit_code != 0:
        raise SandboxError(f"The verifier's files cannot be written over the work tree: {done.stderr.strip()}")
    lay_files(sandbox, files)


def processes_in(sandbox: Sandbox) -> set[tuple[int, int]]:
    """Return the processes in a sandbox as (number, start time), without this command and its parents.

    Raises:
        SandboxError: the list is cut or garbled: processes hide, or leave no room for another one.
    """
    done = run_script(sandbox, "processes.sh", timeout=30)
    *lines, shell = done.stdout.splitlines() or [""]
    parents: dict[int, int] = {}
    starts: dict[int, int] = {}
    for line in lines:
        # "12 (a (b) c) S 1 ...": a process chooses its name, so look for the last parenthesis
        pid, _, rest = line.partition(" (")
        fields = rest.rpartition(") ")[2].split()
        if not pid.isdigit() or len(fields) < 20:
            raise SandboxError("its processes cannot be listed")
        if fields[0] not in _DEAD_STATES:
            parents[int(pid)], starts[int(pid)] = int(fields[1]), int(fields[19])
    if not shell.isdigit():
        raise SandboxError("its processes cannot be listed")
    chain = [int(shell)]
    while parents.get(chain[-1], 0) > 1:
        chain.append(parents[chain[-1]])
    # If this shell descends from PID 1, the other children of PID 1 supervise commands; they are not commands.
    is_supervised = parents.get(chain[-1]) == 1
    skipped = {1, *chain} | {
        pid for pid, parent in parents.items() if parent == int(shell) or (is_supervised and parent == 1)
    }
    return {(pid, start) for pid, start in starts.items() if pid not in skipped}


def clean_environment(home: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a check's commands; no variable points into the work tree.

    PATH stays as it was for the setup and the agent, so the checks use the same Python.
    """
    # Git must not run commands that a repository in the work tree configures.
    git = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "safe.bareRepository": "explicit"}
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_COUNT": str(len(git)),
        **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(git)},
        **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(git.values())},
        **(more or {"PYTHONNOUSERSITE": "1"}),
    }
