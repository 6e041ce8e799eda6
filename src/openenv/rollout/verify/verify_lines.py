"""Verify lines: shell lines that run beside the agent's work, and the defences behind their exit codes.

Knows one `VerificationCase`. Must not know judged checks.
"""

# The agent's code may run in the same processes as the line, so exit code 0 alone is not enough:
#
#   attempt      run the line in a fresh sandbox; a lost sandbox is tried once more
#      |
#   proof        `os._exit(0)` in the agent's module must not pass: the line proves that it reached its end (`Proof`)
#      |
#   own files    the verifier's files are as before: content, and also inode and change date, which reveal files
#      |         that were changed and put back. A line that changes its files without the agent's work too is excused
#   killed       a signal or the time limit fails the line, unless `ReferenceRuns` show that the infrastructure fails
#      |         it (`CheckCrash`)
#      |
#   reward file  a plain file with a number in the range, and no process is left that could have written it later
#
# Each step either passes the attempt on or refuses it: exit code 1 and a note. The facts of the same line on the
# initial files, or on the task's solution, show whether the agent's work is the cause (`references.py`).

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone
from openenv.rollout.store.archives import ancestors, write_archive
from openenv.rollout.store.verdict import CheckFacts, FileChange, Source
from openenv.rollout.tasks.task import CommandResult, Trust
from openenv.rollout.verify.attempts import (
    REFUSED,
    CheckCrash,
    Evidence,
    LineRun,
    attempt_line,
    invalid_reward,
    lost_line,
    read_reward,
    retry_lost,
)
from openenv.rollout.verify.cases import (
    ReadySandbox,
    VerificationCase,
    clean_environment,
    is_plain,
    processes_in,
    run_script,
)
from openenv.rollout.verify.references import Reference, ReferenceRuns
from openenv.sandboxes.base import Sandbox

_ESCAPED = frozenset("\\\n\r")
"""Characters that sha256sum escapes in names; files with such names are not watched."""


@dataclass(slots=True)
class _LineReward:
    """The reward that a line wrote, if any, and the facts that decide whether it withheld one."""

    number: int
    line: str
    value: float | None
    has_passed: bool
    is_isolated: bool
    """Whether the agent's code never ran in the line."""


class LineChecks:
    """Runs the verify lines of a case, each in a fresh sandbox.

    Args:
        case: The case.
        references: The facts of the lines over files that no agent changed.
        reads_file: Whether a reward file counts.
    """

    def __init__(self, case: VerificationCase, references: ReferenceRuns, *, reads_file: bool) -> None:
        self._case, self._references = case, references
        self._reads_file = reads_file
        # Without isolation, a sandbox shows all processes of the host.
        case.counts_processes = reads_file and {"isolation", "trees"} <= case.backend.features
        self._rewards: list[_LineReward] = []
        self.written: Mapping[str, float] = {}
        """All numbers of the last reward file that counts."""
        self.ignored_file = False
        """Whether a reward file was written that does not count."""

    def run(self, number: int, line: str, trust: Trust) -> CommandResult:
        """Run a line; its exit code is 0 only if the check passed.

        Raises:
            CheckCrash: the infrastructure fails the line, also without the agent's work.
            SandboxNotStarted: a sandbox did not start.
        """
        attempt = retry_lost(lambda: self._attempt(line, "work", proves=self._must_prove(line)))
        self._references.noted[number] = self._facts(attempt)
        if attempt.crash is None:
            attempt = self._proven(number, line, attempt)
        if attempt.crash is None:
            attempt = self._with_own_files(number, line, attempt)
        if attempt.crash is not None:
            attempt = self._killed(number, line, attempt, attempt.crash)
        elif self._reads_file:
            attempt = self._with_valid_reward(number, line, attempt)
        value = attempt.written.value if attempt.written is not None and self._reads_file else None
        if attempt.written is not None and value is not None:
            self.written = attempt.written.rewards
        self.ignored_file = self.ignored_file or (attempt.written is not None and not self._reads_file)
        has_passed = attempt.result.exit_code == 0
        self._rewards.append(_LineReward(number, line, value, has_passed, trust == "isolated"))
        return attempt.result

    def _facts(self, attempt: LineRun) -> CheckFacts:
        return attempt.facts(reads_file=self._reads_file)

    def _reference(self, number: int, line: str, source: Reference) -> CheckFacts:
        return self._references.facts(number, source, partial(self._run_reference, line))

    def _run_reference(self, line: str, source: Reference) -> CheckFacts:
        """Run a line over files that no agent changed."""
        attempt = retry_lost(lambda: self._attempt(line, source, proves=self._must_prove(line)))
        if attempt.evidence is not None and not attempt.evidence.seen:  # a wrapper may have kept the line from running
            attempt = retry_lost(lambda: self._attempt(line, source, proves=False))
        return self._facts(attempt)

    def reward(self, share: float) -> float | None:
        """Return the reward of the last line that wrote one, or None if the share of passed checks counts.

        A line may have written no reward only because the agent's work kept it from writing. It counts as a missing
        reward: blocking the verifier must not pay more than an honest failure.
        """
        low = self._case.task.missing_reward
        if not self._reads_file:
            return None
        for number, reward in reversed(list(enumerate(self._rewards))):
            if reward.value is not None:
                return reward.value
            has_earlier = any(earlier.value is not None for earlier in self._rewards[:number])
            if (has_earlier or share > low) and self._is_withheld(reward):
                return low
        return None

    def _is_withheld(self, reward: _LineReward) -> bool:
        """Return whether a line without a reward writes one without the agent's work."""
        source: Reference = "setup"
        if reward.has_passed:
            # `make test || echo 0 > reward.txt` writes a reward only if it fails, so the initial files prove nothing
            # here: the line passed. The solution shows its behaviour when it passes. An isolated line has shown it.
            if reward.is_isolated:
                return False
            source = "solved" if self._case.task.solution else "setup"
        return self._reference(reward.number, reward.line, source).writes_reward

    def _must_prove(self, line: str) -> bool:
        task = self._case.task
        if task.proof is not None:
            return task.proof
        if runs_pytest(line) or with_wrapper(line, task.verify_sources) != line:
            return True
        named = (text for path, text in task.verify_sources.items() if posixpath.basename(path) in line)
        return any(proves_itself(text) for text in (line, *named))

    def _attempt(self, line: str, source: Source, *, proves: bool) -> LineRun:
        """Run a line in a fresh sandbox, and read its traces."""
        try:
            with self._case.use(self._case.need(line, source)) as ready:
                return self._run_in(ready, line, proves=proves)
        except (SandboxError, OSError) as exc:
            self._case.cancel.check()
            return lost_line(line, exc)

    def _run_in(self, ready: ReadySandbox, line: str, *, proves: bool) -> LineRun:
        task, place, sandbox = self._case.task, self._case.place(), ready.sandbox
        envs, command, proof = place.environment(sandbox), line, None
        if proves:
            proof = Proof(line, sandbox.home, sandbox.workdir, task.verify_sources)
            proof.lay(sandbox, self._case.folder / "proof.tar")
            envs, command = {**envs, **proof.environment()}, proof.command()
        before = _file_states(sandbox, task.verify_sources)
        attempt = attempt_line(
            sandbox,
            place.command(command, sandbox),
            timeout=task.verify_timeout_s,
            envs={**task.verify_env, **clean_environment(sandbox.home, envs)},
            cmd=line,
        )
        # The order matters: look for processes while they live, stop them, then read files that nothing can change.
        left = self._case.counts_processes and self._left_processes(ready)
        sandbox.stop_processes()
        evidence = None if proof is None else proof.read(sandbox)
        written = read_reward(sandbox, task)
        if written is not None and self._reads_file and not is_plain(sandbox, written.file):
            # The agent's code may have made its own reward file read-only, or linked it to a file that holds a 1.
            written = replace(written, text="a link, or a closed file,", value=None, rewards={})
        changes = _changes(before, _file_states(sandbox, task.verify_sources))
        ready.is_unchanged = attempt.crash is None and proof is None and not changes
        return replace(attempt, evidence=evidence, left_processes=left, written=written, changes=changes)

    def _left_processes(self, ready: ReadySandbox) -> bool:
        """Return whether a process of a line outlived it. If the list cannot be read, assume one did."""
        try:
            return bool(processes_in(ready.sandbox) - ready.processes)
        except SandboxGone:
            raise
        except SandboxError:
            return True

    def _proven(self, number: int, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line that exits with 0 and does not prove its end, unless it cannot prove anything."""
        evidence, result = attempt.evidence, attempt.result
        if evidence is None or evidence.problem is None:
            return attempt
        unloaded = result.exit_code != 0 and could_not_load(result.stdout + result.stderr)
        may_hide = self._case.task.proof is None and not evidence.seen and (result.exit_code == 0 or unloaded)
        # A line such as `env -i pytest` hides its pytest from the proof in each run: accept it as it is.
        if may_hide and not any(self._reference(number, line, source).proves for source in self._references.sources):
            if unloaded:
                attempt = self._attempt(line, "work", proves=False)
                self._references.noted[number] = self._facts(attempt)
            return attempt
        if result.exit_code != 0:
            return attempt
        return self._refused(attempt, evidence.problem)

    def _with_own_files(self, number: int, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line during which a verifier file changed, unless it changes so without the agent's work."""
        if not attempt.changes or (attempt.result.exit_code != 0 and attempt.written is None):
            return attempt
        # A new file in a folder changes the folder's date, and is harmless. Moving the folder away and back also
        # changes the date of its parent.
        changes = frozenset(
            (path, aspect)
            for path, aspect in attempt.changes
            if aspect != "entries" or (posixpath.dirname(path), "entries") in attempt.changes
        )
        for source in self._references.sources:
            if changes:
                changes -= frozenset(self._reference(number, line, source).changes)
        if not changes:
            return attempt
        return self._refused(attempt, f"{min(changes)[0]} was changed while it ran")

    def _with_valid_reward(self, number: int, line: str, attempt: LineRun) -> LineRun:
        """Refuse a line if its reward file is invalid, or may have been written or removed after its end."""
        written = attempt.written
        if attempt.left_processes and (written is not None or self._reference(number, line, "setup").writes_reward):
            return self._refused(attempt, "a process that it started outlived it, and could write the reward")
        if written is None or written.value is not None:
            return attempt
        problem = invalid_reward(written, self._case.task)
        self._require_infrastructure(number, line, attempt, problem)
        refused = self._refused(attempt, problem)
        return replace(refused, result=self._missing(refused.result))

    def _require_infrastructure(self, number: int, line: str, attempt: LineRun, problem: str) -> None:
        """Check that the agent's work, and not the infrastructure, keeps a line from a verdict.

        Raises:
            CheckCrash: the line fails so on the initial files, too, and did not when the task was validated.
        """
        if self._references.is_broken(number, self._facts(attempt), partial(self._run_reference, line)):
            raise CheckCrash(problem, attempt.result)

    def _refused(self, attempt: LineRun, why: str) -> LineRun:
        """Return the line as failed; its reward file does not count."""
        self.ignored_file = self.ignored_file or attempt.written is not None
        code = attempt.result.exit_code
        note = f"exited with {code}, but {why}"
        result = attempt.result.model_copy(update={"exit_code": code or REFUSED, "note": note})
        return replace(attempt, result=result, written=None)

    def _killed(self, number: int, line: str, attempt: LineRun, crash: str) -> LineRun:
        """Fail a line that did not end by itself, unless the infrastructure is the cause."""
        self._require_infrastructure(number, line, attempt, crash)
        self.ignored_file = self.ignored_file or attempt.written is not None
        result = attempt.result.model_copy(update={"exit_code": attempt.result.exit_code or REFUSED, "note": crash})
        return replace(attempt, result=self._missing(result), written=None)

    def _missing(self, result: CommandResult) -> CommandResult:
        """Return the result of a line without a verdict, with the task's reward for that. 0 is a failed check."""
        return result.model_copy(update={"score": self._case.task.missing_reward or None})


@dataclass(frozen=True, slots=True)
class _FileState:
    """The state of a verifier file. No user can choose an inode or a change date, so both show a file put back."""

    inode: str = ""
    """With the file's kind: a link in place of a file differs."""
    date: str = ""
    content: str = ""
    """The hash of a file; empty for a folder."""


def _file_states(sandbox: Sandbox, files: Mapping[str, str]) -> dict[str, _FileState]:
    """Return the states of the verifier's files, and of the folders between them and the work folder."""
    root = sandbox.workdir
    paths = [posixpath.normpath(posixpath.join(root, path)) for path in files if not _ESCAPED & set(path)]
    if not paths:
        return {}
    below = [path for path in paths if path.startswith(f"{root}/")]
    folders = {f"{root}/{above}".rstrip("/") for path in below for above in ancestors(path[len(root) + 1 :])}
    done = run_script(sandbox, "file_states.sh", *folders, *paths, timeout=60)
    about, _, hashes = f"\n{done.stdout}".partition("\n--\n")
    digests = {line[66:]: line[:64] for line in hashes.splitlines()}
    if done.exit_code == 127:  # the image has no sha256sum
        digests = {path: _digest(sandbox, path) for path in paths}
    states = {path: _FileState(content=digest) for path, digest in digests.items()}
    for line in about.splitlines():  # 123 2026-11-16 13:48:12.123456789 +0000 regular file /home/user/workdir/check.sh
        state, _, path = line.partition(" /")
        inode, date, clock, zone, kind = (*state.split(" ", 4), *[""] * 5)[:5]
        content = digests.get(f"/{path}", "")
        states[f"/{path}"] = _FileState(f"{inode} {kind}", f"{date} {clock} {zone}", content)
    return states


def _changes(before: Mapping[str, _FileState], after: Mapping[str, _FileState]) -> frozenset[FileChange]:
    """Return the verifier's files and folders that changed, and how."""
    changes: set[FileChange] = set()
    for path, old in before.items():
        new = after.get(path, _FileState())
        if old.inode != new.inode:
            changes.add((path, "inode"))
        if old.content != new.content:
            changes.add((path, "content"))
        if old.date != new.date:
            changes.add((path, "date" if old.content else "entries"))
    return frozenset(changes)


def _digest(sandbox: Sandbox, path: str) -> str:
    try:
        return hashlib.sha256(sandbox.read_bytes(path)).hexdigest()
    except OSError:
        return ""


# ---- proof that a line reached its end: the half on the host (`openenv_proof.py` runs in the sandbox) ----
#
# Example: the line `pytest -q tests`. A test imports the agent's `solution.py`, which calls `os._exit(0)`.
#
#   host                                       verifier's sandbox
#   lay:  ~/.openenv-<random>/pass-000         {"serial": 0, "secret": "8d1f..."}, then {"root": ..., "ours": [...]}
#   run:  PYTEST_PLUGINS=openenv_proof         the plug-in, from the verifier's place, reads pass-000 and
#         OPENENV_PROOF=~/.openenv-<random>    deletes it, with its own traces in the environment, before any test is
#                                              imported; writes {"begun": 0} to mark-*
#                                              solution.py ends the process: nothing writes the end
#   read: mark-*                               {"begun": 0} without {"ended": 0, "secret": "8d1f...", "ok": true}
#   -> exit code 0 does not count: "it was ended from within, before its own end"
#
# `python -c`, `python -m unittest` and scripts of the verifier run through the same module: the line becomes
# `python -m openenv_proof SCRIPT`. A pass works once, so a line that starts pytest twice has two.

_MODULE = "openenv_proof"
_MAX_BYTES = 1024 * 1024
_SHOW = ("sh", "-c", 'for file; do case $file in */pass-*) head -n 1 "$file";; *) cat "$file"; echo;; esac; done', "sh")
"""Shows marks, and the first lines of passes. Without line breaks between them, one mark could spoil the next."""
_READ_S = 30.0
_WORD = re.compile(r"(?<!import )(?<!install )(?<![\w.-])(?:pytest|py\.test)(?![\w./=-])")
_REPEATS = re.compile(r"[$`]|\(\)|(?<![\w.-])(?:for|while|until|xargs|-exec|parallel|eval)(?![\w.-])")
"""Shell syntax that may run a part of a line more than once."""
_PYTHON = re.compile(
    r"(?<![\w./-])((?:[\w.~-]*/)*python[\d.]*)(\s+)(-c(?=\s)|-m\s+unittest(?![\w.])|[\w./-]+\.py(?![\w./-]))"
)


@dataclass(slots=True)
class Proof:
    """The passes for one run of one line, and the judgement of its marks.

    Args:
        line: The line.
        home: The home inside; the proof lies beside the work folder, not in it.
        root: The work folder inside.
        files: The verifier's files.
    """

    line: str
    home: str
    root: str
    files: Mapping[str, str] = field(default_factory=dict)
    _secrets: list[str] = field(default_factory=list)
    _name: str = field(default_factory=lambda: f".openenv-{secrets.token_hex(8)}")

    @property
    def folder(self) -> str:
        """The folder of passes and marks inside."""
        return f"{self.home}/{self._name}"

    def environment(self) -> dict[str, str]:
        """Return the variables that lead pytest and scripts to the proof."""
        return {"PYTEST_PLUGINS": _MODULE, "OPENENV_PROOF": self.folder}

    def command(self) -> str:
        """Return the line with a wrapper around each Python that runs a check."""
        return with_wrapper(self.line, self.files)

    def lay(self, sandbox: Sandbox, archive: Path) -> None:
        """Copy the passes into a sandbox, through an archive on the host."""
        places = len(_WORD.findall(self.line)) + len(_PYTHON.findall(self.line))
        count = max(1, places) * (64 if _REPEATS.search(self.line) else 1)
        ours = sorted(posixpath.normpath(posixpath.join(self.root, path)) for path in self.files)
        self._secrets = [secrets.token_hex(16) for _ in range(count)]
        files: dict[str, bytes] = {}
        for serial, secret in enumerate(self._secrets):
            lines = ({"serial": serial, "secret": secret}, {"root": self.root, "ours": ours})
            files[f"pass-{serial:03}"] = "\n".join(map(json.dumps, lines)).encode()
        write_archive(archive, files, mode=0o600)
        sandbox.unpack(archive, self.folder)

    def read(self, sandbox: Sandbox) -> Evidence:
        """Read the marks and the remaining passes in a sandbox, and judge them."""
        files = ["(", "-name", "pass-*", "-o", "-name", "mark-*", "-size", "-64k", ")"]
        find = ["find", self.folder, "-maxdepth", "1", "-type", "f", *files]
        done = sandbox.exec([*find, "-exec", *_SHOW, "{}", "+"], cwd="/", timeout=_READ_S, max_output=_MAX_BYTES)
        marks = [mark for mark in map(_parsed, done.stdout.splitlines()) if mark is not None]
        return self.judge(marks)

    def judge(self, marks: list[dict[str, object]]) -> Evidence:
        """Judge marks: every serial that begins must end, with its own secret.

        A serial has also begun if its pass is gone: the agent's code can remove the mark of a beginning, but it cannot
        write a pass again.
        """
        begun = [mark["begun"] for mark in marks if "begun" in mark]
        unused = {serial for mark in marks if (serial := self._serial(mark, "serial")) is not None}
        if begun or unused:  # else the folder is gone
            begun += [serial for serial in range(len(self._secrets)) if serial not in unused]
        if not begun:
            return Evidence(seen=False, problem="nothing in it proved that it came to its end")
        ended = {serial: mark for mark in marks if (serial := self._serial(mark, "ended")) is not None}
        for begin in begun:
            mark = ended.get(begin) if isinstance(begin, int) else None
            if mark is None:
                return Evidence(seen=True, problem="it was ended from within, before its own end")
            if mark.get("ok") is not True:
                return Evidence(seen=True, problem=str(mark.get("why") or "it did not run its tests")[:500])
        return Evidence(seen=True)

    def _serial(self, mark: dict[str, object], name: str) -> int | None:
        """Return the serial of an end mark or a pass, or None for a forged one."""
        serial, secret = mark.get(name), mark.get("secret")
        if not isinstance(serial, int) or not 0 <= serial < len(self._secrets) or not isinstance(secret, str):
            return None
        given = secret.encode("utf-8", "replace")  # a forged mark may have surrogates
        return serial if secrets.compare_digest(given, self._secrets[serial].encode()) else None


def with_wrapper(line: str, files: Mapping[str, str]) -> str:
    """Return the line with `-c`, unittest and scripts of the verifier wrapped in the proof module."""
    return _PYTHON.sub(partial(_wrapped, files), line)


def _wrapped(files: Mapping[str, str], match: re.Match[str]) -> str:
    target = match[3]
    if target[0] != "-":
        path = posixpath.normpath(target)
        texts = [
            text for name, text in files.items() if f"/{posixpath.normpath(name)}".endswith(f"/{path.lstrip('/')}")
        ]
        if not texts or any(proves_itself(text) or "os._exit" in text for text in texts):
            return match[0]
    return f"{match[1]}{match[2]}-m {_MODULE} {target}"


def runs_pytest(line: str) -> bool:
    """Return whether a shell line runs pytest."""
    return _WORD.search(line) is not None


def proves_itself(text: str) -> bool:
    """Return whether a script or a line begins a proof itself."""
    return _MODULE in text


def could_not_load(output: str) -> bool:
    """Return whether Python failed to load the proof module: the line hides the environment from it."""
    return _MODULE in output and ("mport" in output or "No module named" in output)


def _parsed(line: str) -> dict[str, object] | None:
    try:
        mark = json.loads(line)
    except (ValueError, RecursionError):  # code of the agent may write files there, too
        return None
    return mark if isinstance(mark, dict) else None
