"""Tar files that come out of a sandbox are cleaned before anything on the host reads them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from openenv.errors import SandboxError
from openenv.sandboxes.shell import clean_archive


def write(path: Path, *entries: tuple[str, bytes, str, bytes]) -> Path:
    """Write entries of name, type, link and content."""
    with tarfile.open(path, "w") as tar:
        for name, kind, link, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size, entry.mode = kind, link, len(content), 0o6755
            entry.uid, entry.uname = 1234, "user"
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_only_files_folders_and_links_below_are_kept(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "raw.tar",
        ("./a/file", tarfile.REGTYPE, "", b"text"),
        ("a/hard", tarfile.LNKTYPE, "./a/file", b""),
        ("a/soft", tarfile.SYMTYPE, "/etc/passwd", b""),
        ("a/pipe", tarfile.FIFOTYPE, "", b""),
        ("a/disk", tarfile.BLKTYPE, "", b""),
        ("../out", tarfile.REGTYPE, "", b"x"),
        ("/abs", tarfile.REGTYPE, "", b"y"),
        ("a/wild", tarfile.LNKTYPE, "../../etc/passwd", b""),
    )
    clean_archive(raw, tmp_path / "clean.tar", max_bytes=100)
    with tarfile.open(tmp_path / "clean.tar") as tar:
        members = {member.name: member for member in tar}
    assert set(members) == {"a/file", "a/hard", "a/soft", "abs"}
    assert members["a/hard"].linkname == "a/file"
    assert members["a/soft"].linkname == "/etc/passwd"
    assert all((member.uid, member.uname, member.mode & 0o7000) == (0, "", 0) for member in members.values())


def test_a_tree_that_is_too_large_leaves_nothing(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.tar", ("a", tarfile.REGTYPE, "", b"x" * 60), ("b", tarfile.REGTYPE, "", b"x" * 60))
    with pytest.raises(SandboxError, match="more than 100"):
        clean_archive(raw, tmp_path / "clean.tar", max_bytes=100)
    assert not (tmp_path / "clean.tar").exists()


@pytest.mark.parametrize("content", [b"", b"no tar file at all" * 100, b"\x00" * 10])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "raw.tar").write_bytes(content)
    with pytest.raises(SandboxError, match="archive"):
        clean_archive(tmp_path / "raw.tar", tmp_path / "clean.tar", max_bytes=100)
    assert not (tmp_path / "clean.tar").exists()
