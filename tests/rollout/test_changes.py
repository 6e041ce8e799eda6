"""What an agent changed: added, removed and changed files, line by line, with limits for what is made to be slow."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path

from openenv.rollout.store.archives import write_archive
from openenv.rollout.store.changes import MOST_FILES, MOST_LINES, TreeChanges, compare_trees


def compared(tmp_path: Path, before: dict[str, bytes], after: dict[str, bytes]) -> TreeChanges:
    work, base = tmp_path / "work.tar", tmp_path / "base.tar"
    write_archive(work, after, mode=0o644)
    write_archive(base, {f"workdir/{name}": content for name, content in before.items()} | {"out": b""}, mode=0o644)
    return compare_trees(work, base)


def lines(changes: TreeChanges, path: str) -> list[tuple[str, str, int | None, int | None]]:
    [file] = [file for file in changes.files if file.path == path]
    return [(line.mark, line.text, line.old, line.new) for line in file.lines]


def test_added_removed_and_changed_files_are_told_apart(tmp_path: Path) -> None:
    before = {"same.txt": b"x\n", "old.txt": b"a\nb\n", "edit.py": b"one\ntwo\nthree\n"}
    changes = compared(tmp_path, before, {"same.txt": b"x\n", "edit.py": b"one\n2\nthree\n", "new.txt": b"n"})
    assert [(file.path, file.change, file.added, file.removed) for file in changes.files] == [
        ("edit.py", "changed", 1, 1),
        ("new.txt", "added", 1, 0),
        ("old.txt", "removed", 0, 2),
    ]
    assert changes.unchanged == 1
    assert lines(changes, "edit.py") == [
        ("@", "line 1", None, None),
        (" ", "one", 1, 1),
        ("-", "two", 2, None),
        ("+", "2", None, 2),
        (" ", "three", 3, 3),
    ]
    assert lines(changes, "new.txt")[1] == ("+", "n (no newline at the end)", None, 1)


def test_only_what_is_around_a_change_is_shown(tmp_path: Path) -> None:
    old = "".join(f"{n}\n" for n in range(100))
    new = old.replace("20\n", "twenty\n", 1).replace("80\n", "eighty\n", 1)
    shown = lines(compared(tmp_path, {"a": old.encode()}, {"a": new.encode()}), "a")
    assert [line[1] for line in shown if line[0] == "@"] == ["line 18", "line 78"]
    assert len(shown) == 2 * (1 + 3 + 2 + 3)


def test_without_a_setup_everything_is_new_and_without_a_tree_there_is_nothing(tmp_path: Path) -> None:
    write_archive(tmp_path / "work.tar", {"a.txt": b"a\n"}, mode=0o644)
    assert [file.change for file in compare_trees(tmp_path / "work.tar", None).files] == ["added"]
    assert compare_trees(None, None).note == "The work tree was not kept."


def test_what_is_no_text_too_large_or_a_link_is_named(tmp_path: Path) -> None:
    after = {"bin": b"\0\1", "odd": b"\xff\xfe", "large": b"x" * 300_000}
    changes = compared(tmp_path, {"bin": b"\0\2"}, after)
    assert {file.path: file.note for file in changes.files} == {
        "bin": "no text",
        "odd": "no text",
        "large": "too large to be shown",
    }
    with tarfile.open(tmp_path / "links.tar", "w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        raw = tarfile.TarInfo("b\udcffd")
        tar.addfile(raw, io.BytesIO(b""))
    links = compare_trees(tmp_path / "links.tar", None)
    assert ("+", "link to /etc/passwd (no newline at the end)", None, 1) in lines(links, "link")
    assert "b\\udcffd" in [file.path for file in links.files]


def test_a_change_of_the_mode_is_a_change(tmp_path: Path) -> None:
    write_archive(tmp_path / "work.tar", {"run.sh": b"x\n"}, mode=0o755)
    write_archive(tmp_path / "base.tar", {"workdir/run.sh": b"x\n"}, mode=0o644)
    [file] = compare_trees(tmp_path / "work.tar", tmp_path / "base.tar").files
    assert (file.change, file.note) == ("changed", "only its mode has changed")


def test_many_files_and_long_files_are_cut(tmp_path: Path) -> None:
    many = compared(tmp_path, {}, {f"f{n:04}": b"x\n" for n in range(MOST_FILES + 7)})
    assert (len(many.files), many.left_out) == (MOST_FILES, 7)
    assert many.files[-1].note == "not shown: there are many changed files"
    [long] = compared(tmp_path, {}, {"a": b"x\n" * (MOST_LINES + 500)}).files
    assert (long.added, len(long.lines)) == (MOST_LINES + 500, MOST_LINES)
    assert "only the first" in long.note


def test_files_that_are_made_to_be_slow_are_compared_in_time(tmp_path: Path) -> None:
    one = "".join("ab"[n * 7919 % 13 % 2] + "\n" for n in range(20_000)).encode()
    other = "".join("ba"[n * 104729 % 17 % 2] + "\n" for n in range(20_000)).encode()
    began = time.process_time()
    changes = compared(tmp_path, {f"f{n}": one for n in range(3)}, {f"f{n}": other for n in range(3)})
    assert len(changes.files) == 3
    assert time.process_time() - began < 30  # aligning them line by line takes hours


def test_a_broken_archive_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "work.tar").write_bytes(b"no archive" * 100)
    assert "cannot be read" in compare_trees(tmp_path / "work.tar", None).note
