"""Compare an agent's work tree with the task's initial files, line by line.

Both are tar files in a store. An agent can write files that are slow to compare, so every step has a limit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tarfile import TarInfo
from typing import Literal

from openenv.rollout.store.archives import BROKEN_ARCHIVE, MAX_MEMBERS, Archive, UnusableWorktree
from openenv.rollout.tasks.task import writable

Change = Literal["added", "removed", "changed"]
LineMark = Literal[" ", "+", "-", "@"]
"""A line in both files, only in the new file, or only in the old file; `@` starts a part of the file."""

MOST_FILES = 500
"""The most changed files in a list."""
MOST_SHOWN = 100
"""The most files that are compared line by line."""
MOST_BYTES = 256 * 1024
"""The largest file that is compared line by line."""
MOST_LINES = 2000
"""The most lines per file."""
_MOST_COMPARED = 512 * 1024 * 1024
_MOST_ALIGNED = 1500  # difflib takes quadratic time, or more for malicious files
_CONTEXT = 3
_BLOCK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line of a comparison."""

    mark: LineMark
    text: str
    old: int | None = None
    """The line number in the old file."""
    new: int | None = None


@dataclass(slots=True)
class FileChange:
    """A changed file."""

    path: str
    change: Change
    size: int
    """The size in bytes; for a removed file, its old size."""
    added: int = 0
    removed: int = 0
    """The number of lines."""
    lines: list[DiffLine] = field(default_factory=list)
    note: str = ""
    """The reason why lines are missing."""


@dataclass(slots=True)
class TreeChanges:
    """All changed files."""

    files: list[FileChange] = field(default_factory=list)
    unchanged: int = 0
    left_out: int = 0
    """The number of changed files beyond the list."""
    note: str = ""
    """The reason why the comparison is incomplete."""


def compare_trees(worktree: Path | None, baseline: Path | None, *, workdir: str = "workdir") -> TreeChanges:
    """Compare a packed work tree with the initial files.

    Args:
        worktree: The archive of the agent's work folder; None if it could not be packed.
        baseline: The archive of the home after the setup; None without a setup.
        workdir: The name of the work folder in the home.
    """
    if worktree is None:
        return TreeChanges(note="The work tree was not kept.")
    changes = TreeChanges()
    try:
        with Archive(worktree, max_members=MAX_MEMBERS) as new:
            if baseline is None:
                _compare(new, {}, None, changes)
            else:
                with Archive(baseline) as old:
                    prefix = f"{workdir}/"
                    below = {name[len(prefix) :]: member for name, member in old.members if name.startswith(prefix)}
                    _compare(new, below, old, changes)
    except (UnusableWorktree, *BROKEN_ARCHIVE) as exc:
        changes.note = f"The work tree cannot be read any further: {exc}"
    return changes


def _compare(new: Archive, before: dict[str, TarInfo], old: Archive | None, changes: TreeChanges) -> None:
    after = dict(new.members)
    left = _MOST_COMPARED
    for name in sorted(after.keys() | before.keys()):
        now, then = after.get(name), before.get(name)
        if all(member is None or member.isdir() for member in (now, then)):
            continue
        if now is not None and then is not None and _kind(now) == _kind(then):
            left -= now.size
            if left < 0:
                changes.note = "The rest of the work tree was not compared: it is too large."
                return
            if old is not None and _is_same(new, now, old, then):
                changes.unchanged += 1
                continue
        if len(changes.files) >= MOST_FILES:
            changes.left_out += 1
            continue
        shown = len(changes.files) < MOST_SHOWN
        changes.files.append(_change(name, _Side(new, now), _Side(old, then), shown=shown))


def _kind(member: TarInfo) -> str:
    if member.issym():
        return "link"
    return "folder" if member.isdir() else "file"


def _is_same(new: Archive, now: TarInfo, old: Archive, then: TarInfo) -> bool:
    if now.issym():
        return now.linkname == then.linkname
    now, then = new.file(now), old.file(then)
    if now.size != then.size or (now.mode ^ then.mode) & 0o100:
        return False
    with new.open(now) as one, old.open(then) as other:
        while True:
            block = one.read(_BLOCK)
            if block != other.read(_BLOCK):
                return False
            if not block:
                return True


@dataclass(frozen=True, slots=True)
class _Side:
    """A file in one of the two trees; it may be absent."""

    archive: Archive | None
    member: TarInfo | None

    @property
    def is_there(self) -> bool:
        return self.member is not None and not self.member.isdir()

    @property
    def size(self) -> int:
        if self.archive is None or self.member is None:
            return 0
        return self.archive.file(self.member).size

    def lines(self) -> list[str] | None:
        """Return its lines with their ends; None if the file is binary or too large."""
        if self.archive is None or self.member is None or not self.is_there:
            return []
        if self.member.issym():
            return [f"link to {writable(self.member.linkname)}"]
        content = self.archive.read(self.archive.file(self.member), MOST_BYTES)
        try:
            text = None if content is None or b"\0" in content else content.decode()
        except UnicodeDecodeError:
            return None
        # `splitlines` would also split at characters that other tools do not treat as the end of a line.
        return None if text is None else [f"{line}\n" for line in text.split("\n")[:-1]] + _last_line(text)


def _last_line(text: str) -> list[str]:
    rest = text.rpartition("\n")[2]
    return [rest] if rest else []


def _change(name: str, new: _Side, old: _Side, *, shown: bool) -> FileChange:
    change: Change = "changed"
    if not old.is_there:
        change = "added"
    elif not new.is_there:
        change = "removed"
    entry = FileChange(writable(name), change, new.size if new.is_there else old.size)
    if not shown:
        entry.note = "not shown: there are many changed files"
        return entry
    before, after = old.lines(), new.lines()
    if before is None or after is None:
        larger = max(new.size, old.size) > MOST_BYTES
        entry.note = "too large to be shown" if larger else "no text"
        return entry
    for line in _diff(before, after):
        entry.added += line.mark == "+"
        entry.removed += line.mark == "-"
        if len(entry.lines) < MOST_LINES:
            entry.lines.append(line)
        else:
            entry.note = f"only the first {MOST_LINES} lines are shown"
    if not entry.lines and change == "changed":
        entry.note = "only its mode has changed"
    return entry


def _diff(before: list[str], after: list[str]) -> Iterator[DiffLine]:
    """Yield the changed parts with a few lines around them."""
    for group in _grouped(_operations(before, after)):
        yield DiffLine("@", f"line {group[0][3] + 1}")
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                for index in range(old_to - old_from):
                    yield _line(" ", before[old_from + index], old_from + index, new_from + index)
                continue
            for index in range(old_from, old_to):
                yield _line("-", before[index], index, None)
            for index in range(new_from, new_to):
                yield _line("+", after[index], None, index)


def _line(mark: LineMark, text: str, old: int | None, new: int | None) -> DiffLine:
    if text.endswith("\n"):
        text = text[:-1]
    elif mark != " ":
        text = f"{text} (no newline at the end)"
    return DiffLine(mark, text, None if old is None else old + 1, None if new is None else new + 1)


_Operation = tuple[str, int, int, int, int]


def _operations(before: list[str], after: list[str]) -> list[_Operation]:
    """Return the result of difflib's `get_opcodes`; if aligning would take too long, replace the whole middle."""
    start, most = 0, min(len(before), len(after))
    while start < most and before[start] == after[start]:
        start += 1
    end = 0
    while end < most - start and before[-1 - end] == after[-1 - end]:
        end += 1
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    operations: list[_Operation] = [("equal", 0, start, 0, start)] if start else []
    if max(len(old), len(new)) <= _MOST_ALIGNED:
        matcher = difflib.SequenceMatcher(None, old, new)
        operations += [(tag, start + a, start + b, start + c, start + d) for tag, a, b, c, d in matcher.get_opcodes()]
    else:
        operations.append(("replace", start, start + len(old), start, start + len(new)))
    if end:
        operations.append(("equal", len(before) - end, len(before), len(after) - end, len(after)))
    return operations


def _grouped(operations: list[_Operation]) -> Iterator[list[_Operation]]:
    """Yield groups of nearby changes. difflib has the same function, but only for its own operations."""
    group: list[_Operation] = []
    for number, (tag, a, b, c, d) in enumerate(operations):
        if tag != "equal":
            group.append((tag, a, b, c, d))
            continue
        is_first, is_last = number == 0, number == len(operations) - 1
        if not is_first and (is_last or b - a > 2 * _CONTEXT):
            ending = min(_CONTEXT, b - a)
            yield [*group, ("equal", a, a + ending, c, c + ending)]
            group = []
        if not is_last:
            lead = b - a if group else min(_CONTEXT, b - a)
            group.append(("equal", b - lead, b, d - lead, d))
    if any(operation[0] != "equal" for operation in group):
        yield group
