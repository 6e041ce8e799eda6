"""The files of a sandbox before each model call: `FileRecorder` records them, a branch starts from them.

Only changes are recorded. Contents are stored by their digest, beside the journal. The recorder reads the sandbox from
outside: nothing runs inside, and no link is followed. If the files before a call are not recorded, a branch from there
runs the agent's commands again.
"""

# The journal of a rollout with three calls. `command` entries have the results of commands that pass through us:
#
#   {"k":"files","call":0,"base":null}                            the initial files, or files of the parent
#   call 1
#   {"k":"command","len":93}  {"cmd":"echo 1 > a","exit_code":0,...}
#   {"k":"files","call":2,"commands":1,"len":81}                  {"changed":{"home/user/workdir/a":[...]},"gone":[]}
#   call 2
#   {"k":"files","call":3,"why":"a process runs in the background"}
#   call 3
#
# captures/ID/files/3f2a...      a content, by its SHA-256
#
# The recorded files are those of one moment. The agent waits for its model meanwhile, so its files rest:
#
#   - No process runs except those that the agent had at its first call. Looked at before and after.
#   - No file changes while it is read: its status is the same before and after.
#
# Otherwise this call has no files. A file counts as unchanged if its inode and its times are. The clock of files ticks
# every few milliseconds, so a file that changed just before the last look is read again.
#
# A restored sandbox has the files, folders and links of the home, the work folder, /tmp and /dev/shm, with their modes,
# and times to the second. Sockets are left out. Named pipes, large files and links between folders cannot be restored.

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openenv.errors import OpenEnvError, RolloutError
from openenv.rollout.capture.encoding import Json, dumps, loads
from openenv.rollout.capture.records import Recorder, RecordingReader, read_entries
from openenv.rollout.store.archives import BROKEN_ARCHIVE, WORK, Archive, copy_member
from openenv.rollout.store.store import RolloutStore, stored_outcome
from openenv.rollout.tasks.task import BranchPoint, CommandResult
from openenv.sandboxes.base import ExecResult, Sandbox, SandboxSnapshot

FOLDER = "files"
"""The folder of recorded contents, beside the journal."""
MAX_BYTES = 64 * 1024 * 1024
"""The size limit of a rollout's recorded contents."""
MAX_ENTRIES = 50_000
"""Larger trees are not recorded: a look at each entry would take too long."""
MAX_DEPTH = 64
_TICK_NS = 20_000_000
_PATIENCE_S = 0.2
_BUSY = "a process runs in the background"
_BLOCK = 1024 * 1024
_UNPACKED_PER_S = 100e6
"""Bytes of restored files per second; below the speed of both local and Docker sandboxes, so an estimate."""
_OUTER = ("tmp", "dev/shm")
_FOLLOW_NOTHING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
Signature = tuple[int, ...]
"""The status of an entry: all of it that changes with the entry."""


class NotRestorable(RolloutError):
    """The files before a call cannot be recorded, or not be restored; the text says why."""

    code = "NOT_RESTORABLE"


class FileRecorder:
    """Records the files of a sandbox, and the results of commands, in the journal of its rollout.

    Failures are noted in the journal and never change the rollout.

    Args:
        sandbox: The agent's sandbox, before the agent starts.
        journal: The rollout's journal.
        folder: The folder of the journal.
    """

    def __init__(self, sandbox: Sandbox, journal: Recorder, folder: Path) -> None:
        self._journal = journal
        self._folder = folder / FOLDER
        self._sandbox = sandbox
        self._places = tuple(path.lstrip("/") for path in (sandbox.home, *_outside_home(sandbox))) + _OUTER
        self._seen: dict[str, Signature] = {}
        self._looked_at_ns = 0
        self._most_processes: int | None = None
        self._commands = 0
        self._bytes = 0
        self._why = ""
        self._is_on = False

    def start(self, restored: RestoredStart | None) -> None:
        """Look at the files before the agent starts: those of another rollout, or the task's initial files."""
        base = None if restored is None else {"rollout_id": restored.rollout_id, "call": restored.call}
        try:
            with self._root() as root:
                self._require_rest(root, most=self._sandbox.own_processes)
                self._looked_at_ns = time.time_ns()
                # /tmp and /dev/shm are empty in a restored sandbox, so everything in them is a change.
                self._seen = _look(root, self._places if restored is not None else self._places[: -len(_OUTER)])
        except (OSError, OpenEnvError) as exc:
            self._note(0, exc)
            return
        self._is_on = self._journal.fact("files", {"call": 0, "base": base})
        self._commands = 0 if restored is None else len(restored.commands)

    def expect_no_processes(self) -> None:
        """Expect no process between two commands, because the agent's loop runs outside."""
        self._most_processes = self._sandbox.own_processes

    def before_call(self) -> None:
        """Record the changes since the last time; called while the agent waits for a model call to begin."""
        if not self._is_on:
            return
        call = self._journal.next_number
        try:
            with self._root() as root:
                self._record(root, call)
        except (OSError, OpenEnvError) as exc:
            self._note(call, exc)

    def command(self, cmd: str, done: ExecResult) -> None:
        """Record the result of a command that passed through us."""
        if self._is_on:
            self._commands += 1
            self._is_on = self._journal.fact("command", {}, dumps({"cmd": cmd, **asdict(done)}))

    def _record(self, root: int, call: int) -> None:
        if self._most_processes is None:
            self._most_processes = _process_count(root)
        self._require_rest(root, most=self._most_processes)
        looked_at_ns = time.time_ns()
        seen = _look(root, self._places)
        recent = self._looked_at_ns - _TICK_NS
        changed = {
            path: status
            for path, status in seen.items()
            if self._seen.get(path) != status or (stat.S_ISREG(status[0]) and status[4] > recent)
        }
        links = _hard_links(seen, changed)
        entries: Json = {}
        for path, status in changed.items():
            entries[path] = self._entry(root, path, status, links)
        gone = [path for path in self._seen if path not in seen]
        self._require_rest(root, most=self._most_processes)
        payload = dumps({"changed": entries, "gone": gone}) if entries or gone else b""
        if not self._journal.fact("files", {"call": call, "commands": self._commands}, payload):
            raise NotRestorable("the journal cannot be written")
        self._seen, self._looked_at_ns, self._why = seen, looked_at_ns, ""

    # ["folder", mode], ["link", mode, time, target], ["file", mode, time, digest, size], and for another name of a file
    # ["same", mode, time, first name].
    def _entry(self, root: int, path: str, status: Signature, links: Mapping[str, str]) -> list[Any]:
        mode = stat.S_IMODE(status[0])
        if stat.S_ISDIR(status[0]):
            return ["folder", mode]
        if path in links:
            return ["same", mode, status[3], links[path]]
        folder, _, name = path.rpartition("/")
        with _opened(root, folder) as parent:
            if stat.S_ISLNK(status[0]):
                return ["link", mode, status[3], os.readlink(name, dir_fd=parent)]
            with os.fdopen(os.open(name, _FOLLOW_NOTHING, dir_fd=parent), "rb", buffering=0) as file:
                return ["file", mode, status[3], self._kept(file, path, status), status[2]]

    def _kept(self, file: io.FileIO, path: str, status: Signature) -> str:
        """Store the content of a file, and return its digest."""
        if _signature(os.fstat(file.fileno())) != status:
            raise NotRestorable(f"{path} changed while it was read")
        if self._bytes + status[2] > MAX_BYTES:
            raise NotRestorable(
                f"{path} has {status[2]:,} bytes: the recorded files of a rollout may have {MAX_BYTES:,} in total"
            )
        content = file.read(status[2])
        if len(content) != status[2] or _signature(os.fstat(file.fileno())) != status:
            raise NotRestorable(f"{path} changed while it was read")
        digest = hashlib.sha256(content).hexdigest()
        target = self._folder / digest
        if not target.exists():
            self._folder.mkdir(exist_ok=True)
            draft = self._folder / f".{secrets.token_hex(8)}"
            draft.write_bytes(content)
            draft.rename(target)
            self._bytes += len(content)
        return digest

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        root = self._sandbox.open_root()
        try:
            yield root
        finally:
            os.close(root)

    def _require_rest(self, root: int, *, most: int) -> None:
        """Return if no other process runs.

        Raises:
            NotRestorable: Another one does, and not because it is about to end.
        """
        deadline = time.monotonic() + (0.0 if self._why == _BUSY else _PATIENCE_S)
        while _process_count(root) > most:
            if time.monotonic() > deadline:
                raise NotRestorable(_BUSY)
            time.sleep(0.001)  # the supervisor of the last command ends a moment after it

    def _note(self, call: int, exc: Exception) -> None:
        if str(exc) != self._why:
            self._why = str(exc)
            self._journal.fact("files", {"call": call, "why": self._why})


def record_files(sandbox: Sandbox, journal: Recorder, folder: Path, restored: RestoredStart | None) -> FileRecorder:
    """Begin to record the files of a sandbox, which has those of another rollout, or the task's initial files."""
    recorder = FileRecorder(sandbox, journal, folder)
    recorder.start(restored)
    return recorder


def _outside_home(sandbox: Sandbox) -> list[str]:
    return [] if sandbox.workdir.startswith(f"{sandbox.home}/") else [sandbox.workdir]


# ---- a look at a tree from outside ----


def _signature(about: os.stat_result) -> Signature:
    if stat.S_ISDIR(about.st_mode):  # other entries in it are changes of their own
        return (about.st_mode,)
    return (
        about.st_mode,
        about.st_ino,
        about.st_size,
        about.st_mtime_ns,
        about.st_ctime_ns,
        about.st_nlink,
        about.st_dev,
    )


def _look(root: int, places: Sequence[str]) -> dict[str, Signature]:
    """Return the status of every entry below some folders, by path.

    Raises:
        NotRestorable: An entry cannot be restored, there are too many, or a folder is not readable.
    """
    entries: dict[str, Signature] = {}
    for place in places:
        with _opened(root, place) as folder:
            _look_in(folder, place, entries, MAX_DEPTH)
    return entries


def _look_in(folder: int, path: str, entries: dict[str, Signature], depth: int) -> None:
    if depth == 0:
        raise NotRestorable(f"there are more than {MAX_DEPTH} folders in each other")
    below = []
    with os.scandir(folder) as listing:
        for entry in listing:
            about = entry.stat(follow_symlinks=False)
            kind = stat.S_IFMT(about.st_mode)
            if kind == stat.S_IFSOCK:
                continue
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                raise NotRestorable(f"{path}/{entry.name} is a named pipe or a device")
            entries[f"{path}/{entry.name}"] = _signature(about)
            if kind == stat.S_IFDIR:
                below.append(entry.name)
    if len(entries) > MAX_ENTRIES:
        raise NotRestorable(f"there are more than {MAX_ENTRIES:,} files")
    for name in below:
        with _opened(folder, name) as child:
            _look_in(child, f"{path}/{name}", entries, depth - 1)


@contextlib.contextmanager
def _opened(folder: int, path: str) -> Iterator[int]:
    """Open a folder below another one, step by step, so that no link is followed."""
    opened = os.dup(folder)
    try:
        for name in path.split("/"):
            child = os.open(name, _FOLLOW_NOTHING | os.O_DIRECTORY, dir_fd=opened)
            os.close(opened)
            opened = child
        yield opened
    except OSError as exc:
        raise NotRestorable(f"{path} cannot be read from outside: {exc.strerror}") from exc
    finally:
        os.close(opened)


def _process_count(root: int) -> int:
    with _opened(root, "proc") as folder:
        return sum(name.isdigit() for name in os.listdir(folder))


def _hard_links(seen: Mapping[str, Signature], changed: dict[str, Signature]) -> dict[str, str]:
    """Return the further names of changed files, with their first name; add unchanged ones to the changes.

    Raises:
        NotRestorable: A file has a name in another folder.
    """
    names: dict[tuple[int, int], list[str]] = {}
    for path, status in seen.items():
        if stat.S_ISREG(status[0]) and status[5] > 1:
            names.setdefault((status[6], status[1]), []).append(path)
    links: dict[str, str] = {}
    for group in names.values():
        if any(path in changed for path in group):
            first, *others = sorted(group)
            if len(group) != seen[first][5]:
                raise NotRestorable(f"{first} has a hard link that is not recorded")
            changed.update((each, seen[each]) for each in group)  # after a rename of their folder, for example
            links |= dict.fromkeys(others, first)
    return links


# ---- the files before a call ----


@dataclass(slots=True)
class RecordedFiles:
    """The files before a call, as changes of the task's initial files."""

    call: int
    changed: dict[str, tuple[list[Any], Path]] = field(default_factory=dict)
    """By path: kind, mode, time in ns and content; and the folder with the contents."""
    gone: set[str] = field(default_factory=set)
    commands: list[Json] = field(default_factory=list)
    """The commands so far with their results."""
    agent_s: float = 0.0
    """How long the agent worked between its calls so far."""

    @classmethod
    def before(cls, captures: Path, rollout_id: str, call: int) -> RecordedFiles:
        """Read the files before a call, or before an earlier one if a recording is missing.

        Args:
            captures: The folder of all journals.
            rollout_id: The rollout.
            call: The call.

        Raises:
            NotRestorable: No files were recorded up to there; the text says why.
            CaptureError: The journal cannot be read.
        """
        folder = captures / rollout_id
        entries = read_entries(folder)
        places = [
            (head["call"], number)
            for number, (head, _) in enumerate(entries)
            if head.get("k") == "files" and "commands" in head and head["call"] <= call
        ]
        if places:
            return cls._read(captures, folder, entries[: max(places)[1] + 1])
        parent = next((head["parent"] for head, _ in entries if head.get("parent")), None)
        if parent is not None and parent["call"] is not None:
            return cls.before(captures, parent["rollout_id"], min(call, parent["call"] + 1))
        whys = [head["why"] for head, _ in entries if head.get("k") == "files" and "why" in head]
        raise NotRestorable(whys[0] if whys else "no files were recorded")

    @classmethod
    def _read(cls, captures: Path, folder: Path, entries: Sequence[tuple[Json, bytes]]) -> RecordedFiles:
        """Put the changes of a journal together, up to its last entry."""
        files = cls(0)
        commands: list[Json] = []
        answered_at: float | None = None
        for head, payload in entries:
            kind = head.get("k")
            if kind == "files" and "base" in head:  # a run of the agent begins
                base = head["base"]
                files = cls(0) if base is None else cls.before(captures, base["rollout_id"], base["call"])
                if base is not None and files.call != base["call"]:
                    raise NotRestorable("the files that this rollout began with are no longer recorded")
                commands, answered_at = list(files.commands), None
            elif kind == "files" and "commands" in head:
                content = loads(payload) if payload else {"changed": {}, "gone": []}
                for path in content["gone"]:
                    files.changed.pop(path, None)
                    files.gone.add(path)
                for path, about in content["changed"].items():
                    files.changed[path] = (about, folder / FOLDER)
                    files.gone.discard(path)
                files.call = head["call"]
            elif kind == "command":
                commands.append(loads(payload))
            elif kind == "end":
                answered_at = head.get("at")
            elif kind == "call" and answered_at is not None:
                files.agent_s += max(0.0, head["at"] - answered_at)
        if answered_at is not None:
            files.agent_s += max(0.0, entries[-1][0]["at"] - answered_at)
        own = entries[-1][0]["commands"]
        files.commands = commands
        if len(commands) != own:
            raise NotRestorable("the results of some commands were not recorded")
        return files

    def bytes(self) -> int:
        """Return the size of the changed files."""
        return sum(about[4] for about, _ in self.changed.values() if about[0] == "file")


@dataclass(frozen=True, slots=True)
class RestoredStart:
    """The start of a branch from recorded files. Its agent skips the work that these files are the result of."""

    rollout_id: str
    """The rollout that the files are from."""
    call: int
    """They are those before this call."""
    snapshot: SandboxSnapshot
    baseline: Path | None
    """The task's initial files, for the verifier."""
    commands: tuple[Json, ...] = ()
    """The commands before the call with their results; the agent gets the results again."""
    requests: tuple[Json, ...] = ()
    """The requests of the agent up to the call."""
    setup_results: tuple[CommandResult, ...] = ()


def _restored_folders(home: str, workdir: str) -> list[str]:
    outside = [] if workdir.startswith(f"{home}/") else [workdir]
    return [home, *outside, *(f"/{path}" for path in _OUTER)]


def _inner_path(name: str, home: str, workdir: str) -> str:
    """Return the path of a member of a home archive (`store/archives.py`), without the first slash."""
    path = f"{workdir}{name[len(WORK) :]}" if f"{name}/".startswith(f"{WORK}/") else f"{home}/{name}"
    return path.lstrip("/")


def restored_start(store: RolloutStore, start: BranchPoint, backend: str, home: str, folder: Path) -> RestoredStart:
    """Return the files before the call after a branch point, or before an earlier call, as archives in a new folder.

    Raises:
        NotRestorable: They are not recorded, or the agent's work would take less time than they do.
        CaptureError: The journal cannot be read.
    """
    parent, call = start.rollout_id, (start.call or 0) + 1
    files = RecordedFiles.before(store.captures, parent, call)
    task, outcome = store.task(parent), stored_outcome(store, parent)
    workdir = task.workdir or f"{home}/workdir"
    baseline: Path | None = store.live_file(parent, "baseline.tar")
    if baseline is None or not baseline.is_file():
        if task.files or task.setup or task.workdir:
            raise NotRestorable("the task's initial files are not in the store")
        baseline = None
    size = files.bytes() + (0 if baseline is None else baseline.stat().st_size)
    if size / _UNPACKED_PER_S > files.agent_s:
        raise NotRestorable(f"the work took {files.agent_s:.1f} s, less than restoring {size:,} bytes")
    folder.mkdir(parents=True)
    archives = {}
    try:
        with contextlib.ExitStack() as stack:
            source = None if baseline is None else stack.enter_context(Archive(baseline))
            members = () if source is None else source.members
            initial = {_inner_path(name, home, workdir): member for name, member in members}
            for number, path in enumerate(_restored_folders(home, workdir)):
                archive = folder / f"{number}.tar"
                if _write_archive(archive, path, files, source, initial):
                    archives[path] = archive
    except (*BROKEN_ARCHIVE, OSError, RolloutError) as exc:
        raise NotRestorable(f"the recorded files cannot be put together: {exc}") from exc
    return RestoredStart(
        parent,
        files.call,
        SandboxSnapshot(backend, home, folder, archives),
        baseline,
        tuple(files.commands),
        tuple(_requests(store.captures / parent, files.call)),
        () if outcome is None else tuple(outcome.setup_results),
    )


def _requests(folder: Path, last: int) -> list[Json]:
    """Return the requests of the answered calls before a call, and of this call.

    Raises:
        NotRestorable: The call is missing.
    """
    reader = RecordingReader(folder)
    calls = {each.number: each for each in [*reader.advance(), *reader.unfinished(), *reader.builder.unanswered]}
    calls |= reader.builder.answered
    if last not in calls:
        raise NotRestorable(f"call {last} was not recorded")
    return [
        calls[each].request
        for each in sorted(calls)
        if each == last or (each < last and each in reader.builder.answered)
    ]


def _write_archive(
    target: Path, place: str, files: RecordedFiles, source: Archive | None, initial: Mapping[str, tarfile.TarInfo]
) -> bool:
    """Write the files of one folder, the changed ones instead of the initial ones; return whether there are any."""
    start = f"{place.lstrip('/')}/"
    is_empty = True
    with tarfile.open(target, "w:", format=tarfile.GNU_FORMAT, encoding="utf-8") as out:
        for path, member in initial.items():
            if source is not None and path.startswith(start) and path not in files.gone and path not in files.changed:
                copy_member(out, path[len(start) :], source, member)
                is_empty = False
        for path in sorted(files.changed):  # a folder before its content, a file before its further names
            if path.startswith(start):
                about, contents = files.changed[path]
                entry, content = _member(path[len(start) :], about, contents, start)
                out.addfile(entry, io.BytesIO(content))
                is_empty = False
    return not is_empty


def _member(name: str, about: list[Any], contents: Path, start: str) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    kind, entry.mode = about[0], about[1] & 0o777
    if kind == "folder":
        entry.type = tarfile.DIRTYPE
        return entry, b""
    entry.mtime = about[2] // 1_000_000_000
    if kind == "file":
        content = (contents / about[3]).read_bytes()
        if hashlib.sha256(content).hexdigest() != about[3]:
            raise NotRestorable(f"the recorded content of {name} is damaged")
        entry.size = len(content)
        return entry, content
    entry.type = tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE
    entry.linkname = about[3] if kind == "link" else about[3].removeprefix(start)
    if kind == "same" and not about[3].startswith(start):
        raise NotRestorable(f"{name} has a hard link in another folder")
    return entry, b""
