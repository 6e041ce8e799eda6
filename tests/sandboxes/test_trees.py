"""Trees as tar streams: what is packed, and that nothing is unpacked outside."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv.sandboxes import trees

Entry = tuple[str, str, str]


def archive(*entries: Entry) -> io.BytesIO:
    """Return a tar stream of (name, kind, value)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for name, kind, value in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o6755 if kind == "setuid" else 0o644
            info.type = {
                "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "dir": tarfile.DIRTYPE, "fifo": tarfile.FIFOTYPE,
                "device": tarfile.BLKTYPE,
            }.get(kind, tarfile.REGTYPE)  # fmt: skip
            if info.type == tarfile.REGTYPE:
                info.size = len(value)
                opened.addfile(info, io.BytesIO(value.encode()))
            else:
                info.mode = 0o755
                info.linkname = value
                opened.addfile(info)
    file.seek(0)
    return file


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def packed(root: Path) -> io.BytesIO:
    file = io.BytesIO()
    trees.pack(str(root), file)
    file.seek(0)
    return file


def test_a_tree_survives_packing_and_unpacking(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty").mkdir(mode=0o700)
    (source / "deep" / "er" / "file").write_bytes(bytes(range(256)) * 5000)
    (source / "run").write_text("x")
    (source / "run").chmod(0o751)
    (source / "link").symlink_to("/etc/passwd")
    (source / os.fsdecode(b"bad-\xff-name")).write_text("")
    (source / ("long" * 50)).write_text("long name")
    trees.unpack(packed(source), str(tmp_path / "copy"))
    assert listing(tmp_path / "copy") == listing(source)
    assert (tmp_path / "copy/deep/er/file").read_bytes() == (source / "deep/er/file").read_bytes()
    assert os.readlink(tmp_path / "copy/link") == "/etc/passwd"
    assert (tmp_path / "copy/run").stat().st_mode & 0o777 == 0o751
    assert (tmp_path / "copy/empty").stat().st_mode & 0o777 == 0o700
    assert int((tmp_path / "copy/run").stat().st_mtime) == int((source / "run").stat().st_mtime)


def test_pipes_and_sockets_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with tarfile.open(fileobj=packed(tmp_path)) as opened:
        assert opened.getnames() == ["."]


def test_a_file_that_shrinks_while_it_is_packed_is_filled_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1_000_000)

    class Sink(io.BytesIO):
        def write(self, data: object) -> int:
            assert isinstance(data, bytes)
            if data.startswith(b"file\0"):
                os.truncate(tmp_path / "file", 10)
            return super().write(data)

    sink = Sink()
    trees.pack(str(tmp_path), sink)
    sink.seek(0)
    with tarfile.open(fileobj=sink) as opened:
        assert opened.getmember("file").size == 1_000_000


@pytest.mark.parametrize("length", [99, 100, 101, 511, 512, 513, 1024])
def test_other_programs_read_long_and_odd_names(tmp_path: Path, length: int) -> None:
    folders = "/".join(["f" * 60] * (length // 70))
    name = f"{folders}/".lstrip("/").ljust(length, "n")
    (tmp_path / folders).mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"x" * length)
    (tmp_path / "link").symlink_to("t" * length)
    odd = os.fsdecode(b"\xff \n\xc3\xa4")
    (tmp_path / odd).write_text("odd")
    with tarfile.open(fileobj=packed(tmp_path), errors="surrogateescape") as opened:
        members = {member.name: member for member in opened}
        assert members[name].size == length
        assert members["link"].linkname == "t" * length
        assert opened.extractfile(odd).read() == b"odd"  # type: ignore[union-attr]


@pytest.mark.parametrize("date", [-5, 0, 8**11 - 1, 8**11])
def test_dates_before_1970_and_in_the_far_future_are_packed(tmp_path: Path, date: int) -> None:
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", (date, date))
    if int((tmp_path / "file").stat().st_mtime) != date:
        pytest.skip("this file system has no such dates")
    trees.unpack(packed(tmp_path), str(tmp_path / "copy"))
    assert int((tmp_path / "copy/file").stat().st_mtime) == date


def test_a_tree_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    trees.pack(str(tmp_path / "file"), io.BytesIO(), max_bytes=522)
    with pytest.raises(ValueError, match="more than 521 bytes"):
        trees.pack(str(tmp_path / "file"), io.BytesIO(), max_bytes=521)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "..", "a/.."])
def test_entries_that_lie_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="outside"):
        trees.unpack(archive((name, "file", "bad")), str(tmp_path / "root"))
    assert listing(tmp_path) == {"root"}


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "link", "../outside"), ("a/file", "file", "bad")],
        [("a", "link", "/OUTSIDE"), ("a/b/file", "file", "bad")],
        [("a", "link", "../outside/victim"), ("a", "file", "bad")],
        [("a", "hard", "../outside/victim")],
        [("a", "hard", "/OUTSIDE/victim"), ("a", "file", "bad")],
        [("s", "link", ".."), ("t", "link", "s/outside"), ("t/file", "file", "bad")],
        [("a", "link", "../outside"), ("b", "hard", "a/victim"), ("b", "file", "bad")],
    ],
)
def test_nothing_is_written_through_links(tmp_path: Path, entries: list[Entry]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("good")
    exact = [(name, kind, value.replace("/OUTSIDE", str(outside))) for name, kind, value in entries]
    for _ in range(2):  # the second time, the links are there already
        try:
            trees.unpack(archive(*exact), str(tmp_path / "root"))
        except (ValueError, OSError):
            pass
    assert listing(outside) == {"victim"}
    assert (outside / "victim").read_text() == "good"
    assert (outside / "victim").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("name", "target", "kept"),
    [
        ("link", "file", True),
        ("d/link", "../file", True),
        ("link", "d/../file", False),
        ("link", "..", False),
        ("d/link", "../..", False),
        ("link", "/etc/passwd", False),
        ("link", "s/..", False),
    ],
)
def test_links_that_leave_the_tree_can_be_left_out(tmp_path: Path, name: str, target: str, kept: bool) -> None:
    trees.unpack(archive(("s", "link", "."), (name, "link", target)), str(tmp_path), keep_outer_links=False)
    assert (tmp_path / name).is_symlink() is kept


def test_devices_pipes_and_set_id_bits_are_dropped(tmp_path: Path) -> None:
    stream = archive(("pipe", "fifo", ""), ("disk", "device", ""), ("program", "setuid", "x"))
    trees.unpack(stream, str(tmp_path))
    assert listing(tmp_path) == {"program"}
    assert (tmp_path / "program").stat().st_mode & 0o7777 == 0o755


def test_hard_links_inside_are_kept(tmp_path: Path) -> None:
    trees.unpack(archive(("a", "file", "one"), ("d/b", "hard", "a")), str(tmp_path))
    assert (tmp_path / "d/b").read_text() == "one"


def test_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than is allowed"):
        trees.unpack(archive(("a", "file", "x" * 60), ("b", "file", "x" * 60)), str(tmp_path), max_bytes=100)


def test_compressed_archives_are_read(tmp_path: Path) -> None:
    trees.unpack(io.BytesIO(gzip.compress(archive(("a", "file", "one")).getvalue())), str(tmp_path))
    assert (tmp_path / "a").read_text() == "one"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("odd", ["plain", "d/" * 70 + "x", "x" * 120, "ü", "\udcff"])
def test_every_form_of_an_archive_is_read(tmp_path: Path, form: int, odd: str) -> None:
    contents = {"empty": b"", "a/block": b"x" * 512, odd: b"y" * 1000, "large": bytes(range(256)) * 5000, "last": b"z"}
    file = io.BytesIO()
    try:
        with tarfile.open(fileobj=file, mode="w", format=form, errors="surrogateescape") as opened:
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = len(content), 0o640, 1_700_000_000
                opened.addfile(info, io.BytesIO(content))
    except ValueError:
        pytest.skip("this form has no such names")
    file.seek(0)
    trees.unpack(file, str(tmp_path))
    found = {os.fsencode(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == {
        os.fsencode(name): content for name, content in contents.items()
    }
    assert {(path.stat().st_mode & 0o777, path.stat().st_mtime) for path in found.values()} == {(0o640, 1_700_000_000)}


@pytest.mark.parametrize("size", [0, 100, 512, 600, 1024, 1500])
def test_an_archive_that_ends_too_early_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match="not a readable archive"):
        trees.unpack(io.BytesIO(archive(("a", "file", "x" * 600)).getvalue()[:size]), str(tmp_path))


@pytest.mark.parametrize("at", [0, 100, 124, 130, 148, 156, 257])
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, at: int) -> None:
    data = bytearray(archive(("a", "file", "x")).getvalue())
    data[at] ^= 0x41
    with pytest.raises(ValueError, match="not a readable archive"):
        trees.unpack(io.BytesIO(bytes(data)), str(tmp_path))


def test_a_plain_archive_is_unpacked_without_what_takes_long_to_import(tmp_path: Path) -> None:
    (tmp_path / "tree.tar").write_bytes(archive(("a/b", "file", "x"), ("c", "link", "a"), ("d", "dir", "")).getvalue())
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import trees\n"
        "trees.unpack(open(sys.argv[2], 'rb'), sys.argv[3])\n"
        "print(sorted({'tarfile', 're', 'typing'} & set(sys.modules)))"
    )
    folder = os.path.dirname(trees.__file__)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, folder, str(tmp_path / "tree.tar"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert listing(tmp_path / "out") == {"a", "a/b", "c", "d"}


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"nonsense" * 500, archive(("a", "file", "x" * 5000)).getvalue()[:1000]):
        with pytest.raises(ValueError, match="archive"):
            trees.unpack(io.BytesIO(content), str(tmp_path))


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the way"):
        trees.unpack(archive(("a", "file", "x"), ("a/b", "file", "x")), str(tmp_path))


part = st.sampled_from(["a", "b", "..", ".", "", "c", "/"])
path = st.lists(part, min_size=1, max_size=4).map("/".join)
entry = st.tuples(path, st.sampled_from(["file", "link", "hard", "dir"]), path)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(entries=st.lists(entry, max_size=8), leaving=st.booleans())
def test_no_archive_at_all_writes_outside(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], leaving: bool
) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "a").write_text("good")
    for _ in range(2):
        try:
            trees.unpack(archive(*entries), str(base / "b" / "c"), keep_outer_links=leaving)
        except (ValueError, OSError):
            pass
    assert set(os.listdir(base)) == {"a", "b"}
    assert set(os.listdir(base / "b")) == {"c"}
    assert (base / "a").read_text() == "good"
    assert (base / "a").stat().st_nlink == 1


def test_what_is_shut_is_packed_on_request_and_keeps_its_mode(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "shut").mkdir(parents=True)
    (source / "shut" / "file").write_text("x")
    (source / "shut" / "file").chmod(0)
    (source / "shut").chmod(0)
    file = io.BytesIO()
    trees.pack(str(source), file, force=True)
    file.seek(0)
    with tarfile.open(fileobj=file) as opened:
        assert {member.name: member.mode for member in opened if member.name != "."} == {"shut": 0, "shut/file": 0}


def test_a_tree_too_deep_to_be_read_is_refused(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(ValueError, match="cannot be read"):
        trees.pack(str(tmp_path), io.BytesIO())


def test_a_missing_tree_raises_what_the_system_says(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trees.pack(str(tmp_path / "none"), io.BytesIO())


def test_the_entry_of_the_tree_itself_can_be_left_out(tmp_path: Path) -> None:
    tree, file = tmp_path / "tree", tmp_path / "tree.tar"
    (tree / "folder").mkdir(parents=True)
    (tree / "folder" / "note").write_text("kept")
    (tree / "link").symlink_to("folder/note")
    for expected in (True, False):
        with file.open("wb") as stream:
            trees.pack(str(tree), stream)
        assert trees.drop_root(file) is expected
        with tarfile.open(file) as opened:
            assert sorted(opened.getnames()) == (["folder", "folder/note", "link"] if expected else [])
        with file.open("rb") as stream:
            trees.unpack(stream, str(tmp_path / "copy"))
        assert (tmp_path / "copy" / "link").read_text() == "kept"
        shutil.rmtree(tree)
        tree.mkdir()
