"""Run and judge apart: the agent's work runs in one sandbox, what came out of it is judged in another.

Knows sandboxes, archives and `Check`. What the agent wrote is data to the judge: no file of it lies where a program
looks for code, and the sandbox it ran in is gone before the judge's is started.
"""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openenv.errors import SandboxGone, SandboxTreeError
from openenv.rollout.case import Case, clean_environment, crash_of, read_reward, run
from openenv.rollout.commands import MAX_OUTPUT, lay_files_over
from openenv.rollout.outcome import CommandResult
from openenv.rollout.task import Check
from openenv.rollout.worktree import Patterns, UnusableWorktree, files_of, worktree_limit
from openenv.sandboxes.base import ExecResult, Sandbox, Stream

OUTPUT = "logs/output"
"""Below the home of the judge's sandbox: the folder that `$OUTPUT` names."""
MAX_STREAM = 16 * 1024 * 1024
"""So much of what `run` prints on either stream reaches the judge."""
MAX_KEPT = 64 * 1024 * 1024
_KILLED = 137
_WORDS = re.compile(r"[^\s'\"<>|;&()=,`]+")
_KINDS = """
cd -- "$1" || exit 1
shift
for path in "$@"; do
  kind=- here=
  if [ -f "$path" ]; then kind=f; elif [ -d "$path" ]; then kind=d; fi
  rest=$path
  while [ -n "$rest" ]; do
    part=${rest%%/*}
    case $rest in */*) rest=${rest#*/};; *) rest=;; esac
    here=$here$part
    if [ -L "$here" ]; then kind=-; fi
    here=$here/
  done
  printf %s "$kind"
done
"""
"""Says of each path whether it is a file, a folder or nothing to be kept; a link on the way is the latter."""


class JudgeCrash(Exception):
    """A judge died: there is no verdict."""

    def __init__(self, why: str, result: CommandResult) -> None:
        super().__init__(why)
        self.result = result


@dataclass(slots=True)
class _Output:
    """What came of `run`, as data."""

    done: ExecResult
    streams: dict[Stream, bytearray]
    files: dict[str, bytes] = field(default_factory=dict)
    problem: str | None = None
    """Why there is nothing to judge: the agent's work did not come to an end, or left what cannot be taken."""

    def result(self, check: Check) -> CommandResult:
        return CommandResult(
            cmd=check.run,
            exit_code=self.done.exit_code,
            stdout=_text(self.streams["stdout"]),
            stderr=_text(self.streams["stderr"]),
            duration_s=self.done.duration_s,
            note=self.problem,
        )


def run_and_judge(
    case: Case, check: Check, folder: Path, report: Callable[[str], None] = lambda message: None
) -> tuple[CommandResult, str]:
    """Run both parts of a check; return what the judge did, with what `run` did in it, and the first sandbox's id.

    Where `run` died there is no judge: the result has its exit code.

    Args:
        folder: A folder of the host for archives.
        report: Is told when the first part is over.

    Raises:
        JudgeCrash: the judge died.
        SandboxError: a sandbox failed.
    """
    sandbox_id = ""
    try:
        with case.sandbox(with_work=True, seconds=2 * case.task.verify_timeout_s) as sandbox:
            sandbox_id = sandbox.sandbox_id
            output = _run(case, check, sandbox, folder)
    except SandboxGone as exc:
        case.cancel.check()
        if "memory" not in exc.reason:
            raise
        done = ExecResult(_KILLED, "", "", oom=True)
        output = _Output(done, _streams(), problem="ran out of memory with its sandbox")
    if output.problem is not None:
        ran = output.result(check)
        note = f"not judged: its run {output.problem}"
        return CommandResult(cmd=check.judge, exit_code=ran.exit_code or 1, run=ran, note=note), sandbox_id
    report(f"ran with exit code {output.done.exit_code}, judging")
    with case.sandbox(with_work=False, seconds=case.task.verify_timeout_s) as sandbox:
        return _judge(case, check, sandbox, output, folder), sandbox_id


def needed(check: Check, verify_files: Mapping[str, str], workdir: str) -> dict[str, str]:
    """Return the verifier's files that a check's `run` sees."""
    if check.needs is not None:
        patterns = Patterns(check.needs)
        return {path: text for path, text in verify_files.items() if patterns.cover(posixpath.normpath(path))}
    words = {posixpath.normpath(posixpath.join(workdir, word)) for word in _WORDS.findall(check.run)}
    return {path: text for path, text in verify_files.items() if posixpath.join(workdir, path) in words}


def _text(said: bytearray) -> str:
    return bytes(said[:MAX_OUTPUT]).decode("utf-8", "replace")


def _streams() -> dict[Stream, bytearray]:
    return {"stdout": bytearray(), "stderr": bytearray()}


def _run(case: Case, check: Check, sandbox: Sandbox, folder: Path) -> _Output:
    task = case.task
    lay_files_over(sandbox, needed(check, task.verify_files, sandbox.workdir))
    streams = _streams()

    def feed(stream: Stream, chunk: bytes) -> None:
        said = streams[stream]
        said += chunk[: MAX_STREAM - len(said)]

    done = sandbox.exec(
        check.run,
        envs=clean_environment(sandbox.home),
        cwd=sandbox.workdir,
        timeout=task.verify_timeout_s,
        on_output=feed,
        max_output=1024,
    )
    output = _Output(done, streams, problem=crash_of(done, task.verify_timeout_s))
    if output.problem is None and check.keep:
        sandbox.stop_processes()  # nothing writes while it is taken
        try:
            output.files = _kept(sandbox, check.keep, folder, min(MAX_KEPT, worktree_limit(task.limits)))
        except SandboxGone:
            raise
        except (SandboxTreeError, UnusableWorktree, OSError) as exc:
            output.problem = f"left what cannot be kept: {exc}"
    return output


def _kept(sandbox: Sandbox, keep: tuple[str, ...], folder: Path, left: int) -> dict[str, bytes]:
    """Take files out of a sandbox whose user nobody trusts: regular ones, by their paths, within a size."""
    found: dict[str, bytes] = {}
    for path, kind in zip(keep, run(sandbox, ["/bin/sh", "-c", _KINDS, "sh", sandbox.workdir, *keep]), strict=True):
        inside = posixpath.join(sandbox.workdir, path)
        taken: dict[str, bytes] = {}
        if kind == "f":
            taken = {path: sandbox.read_bytes(inside, max_bytes=left + 1)}
        elif kind == "d":
            archive = folder / "kept.tar"
            sandbox.pack(inside, archive, max_bytes=2 * left)
            taken = {f"{path}/{name}": content for name, content in files_of(archive, max_bytes=left).items()}
        left -= sum(map(len, taken.values()))
        if left < 0:
            raise SandboxTreeError(f"'{path}' is too large")
        found.update(taken)
    return found


def _judge(case: Case, check: Check, sandbox: Sandbox, output: _Output, folder: Path) -> CommandResult:
    task = case.task
    lay_files_over(sandbox, task.verify_files)
    place = posixpath.join(sandbox.home, OUTPUT)
    _lay_output(sandbox, output, place, folder / "output.tar")
    if "isolation" in case.backend.features:  # elsewhere somebody has to be able to remove the folder
        run(sandbox, ["chmod", "-R", "a-w", "--", place])
    envs = clean_environment(sandbox.home, {"OUTPUT": place})
    done = sandbox.exec(
        check.judge, envs=envs, cwd=sandbox.workdir, timeout=task.verify_timeout_s, max_output=MAX_OUTPUT
    )
    result = CommandResult(
        cmd=check.judge,
        exit_code=done.exit_code,
        stdout=done.stdout,
        stderr=done.stderr,
        duration_s=done.duration_s,
        run=output.result(check),
    )
    crash = crash_of(done, task.verify_timeout_s)
    if crash is not None:
        raise JudgeCrash(crash, result)
    score = None if task.reward_file is False else read_reward(sandbox)
    return result.model_copy(update={"score": score})


def _lay_output(sandbox: Sandbox, output: _Output, place: str, archive: Path) -> None:
    """Lay out what is judged: plain files that can be read, and neither written nor run."""
    given: dict[str, bytes] = {str(name): bytes(said) for name, said in output.streams.items()}
    given["exit_code"] = f"{output.done.exit_code}\n".encode()
    given |= {f"files/{name}": content for name, content in output.files.items()}
    with tarfile.open(archive, "w:", format=tarfile.PAX_FORMAT) as out:
        top = tarfile.TarInfo("files")
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        out.addfile(top)
        for name, content in given.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o444
            out.addfile(entry, io.BytesIO(content))
    run(sandbox, ["rm", "-rf", "--", place])
    sandbox.unpack(archive, place)
    archive.unlink()
