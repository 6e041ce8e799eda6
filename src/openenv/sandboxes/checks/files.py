"""Contract checks of files, whole trees and snapshots."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

from openenv.errors import SandboxError, SandboxGone, SandboxTreeError, SandboxUnsupported
from openenv.sandboxes.base import Sandbox, SandboxSpec
from openenv.sandboxes.checks.bench import CheckBench, CheckGroup, holds, raises, same

_NAMES = (
    "with space", "quo'te", 'dou"ble', "new\nline", "-dash", "dollar$HOME", "star*", "snow☃", "back\\slash", "..odd",
)  # fmt: skip

FILES = CheckGroup()
SNAPSHOTS = CheckGroup()


@FILES.check("file.content", "Files hold exactly what was written.")
def _contents(bench: CheckBench) -> None:
    for content in (b"", b"\x00", bytes(range(256)) * 100, "☃".encode(), b"no end of line", b"\r\n\n"):
        bench.box.write_bytes("content", content)
        same(bench.box.read_bytes("content"), content, "what was read")
    bench.box.write_text("text", "snow ☃\n")
    same(bench.box.read_text("text"), "snow ☃\n", "the text")
    bench.box.write_bytes("text", b"a\xffb")
    same(bench.box.read_text("text"), "a\ufffdb", "a text that is not UTF-8")


@FILES.check("file.large", "20 MB go in and come out.")
def _large(bench: CheckBench) -> None:
    content = bytes(range(251)) * 80_000
    bench.box.write_bytes("large", content)
    same(bench.box.exec(["wc", "-c", "large"]).stdout.split()[0], str(len(content)), "the size inside")
    holds(bench.box.read_bytes("large") == content, "it is not the same when read again")
    bench.box.exec(["rm", "large"])


@FILES.check("file.parents", "Folders above a file are made, and its mode is set.")
def _parents(bench: CheckBench) -> None:
    bench.box.write_bytes("made/on/the/way.sh", b"#!/bin/sh\necho run\n", mode=0o755)
    same(bench.box.exec(["made/on/the/way.sh"]).stdout, "run\n", "the script's output")
    bench.box.write_bytes("made/plain", b"")
    holds("-rw-r--r--" in bench.box.exec(["ls", "-l", "made/plain"]).stdout, "the default mode is not 0644")


@FILES.check("file.missing", "What is no file raises what open() would.")
def _missing(bench: CheckBench) -> None:
    with raises(FileNotFoundError):
        bench.box.read_bytes("no/such/file")
    with raises(IsADirectoryError):
        bench.box.read_bytes("/tmp")
    bench.box.exec("touch closed; chmod 000 closed")
    with raises((IsADirectoryError, PermissionError, NotADirectoryError, SandboxError)):
        bench.box.write_bytes("/tmp", b"")


@FILES.check("file.part", "The beginning of a file can be read.")
def _part(bench: CheckBench) -> None:
    bench.box.write_bytes("digits", b"0123456789")
    same(bench.box.read_bytes("digits", max_bytes=4), b"0123", "the beginning")
    same(bench.box.read_bytes("digits", max_bytes=100), b"0123456789", "all of it")
    same(bench.box.read_bytes("digits", max_bytes=0), b"", "nothing of it")


@FILES.check("file.owner", "Files belong to the sandbox's user.")
def _owner(bench: CheckBench) -> None:
    bench.box.write_text("mine", "old")
    same(bench.box.exec("echo new > mine && chmod 600 mine && rm mine").exit_code, 0, "the exit code")
    bench.box.exec("echo secret > own; chmod 600 own")
    same(bench.box.read_text("own"), "secret\n", "a file of the sandbox's user")


@FILES.check("file.names", "Any name is just a name.")
def _names(bench: CheckBench) -> None:
    for name in _NAMES:
        path = f"names/{name}/{name}"
        bench.box.write_text(path, name)
        same(bench.box.read_text(path), name, f"the content of {name!r}")
        holds(bench.box.exists(path), f"{name!r} does not exist")
    same(bench.box.exec("ls names | wc -l", cwd=bench.box.workdir).exit_code, 0, "the exit code")


@FILES.check("file.overwrite", "Writing replaces what was there, also behind a link.")
def _overwrite(bench: CheckBench) -> None:
    bench.box.write_text("over", "a long text")
    bench.box.write_text("over", "short")
    same(bench.box.read_text("over"), "short", "the content")
    bench.box.exec("ln -sf over over-link")
    bench.box.write_text("over-link", "linked")
    same(bench.box.read_text("over"), "linked", "the content of the file behind the link")


@FILES.check("file.exists", "exists() knows files, folders and links to them.")
def _exist(bench: CheckBench) -> None:
    box = bench.box
    box.exec("touch there; mkdir -p folder; ln -sfn nowhere dangling")
    same(
        [box.exists(path) for path in ("there", "folder", "/", "not-there", "dangling")],
        [True, True, True, False, False],
    )


@FILES.check("file.not-files", "Pipes and devices are refused, and nothing hangs.")
def _not_files(bench: CheckBench) -> None:
    bench.box.exec("mkfifo pipe")
    for path in ("pipe", "/dev/zero"):
        with raises((OSError, SandboxError)):
            bench.box.read_bytes(path)
    with raises((OSError, SandboxError)):
        bench.box.write_bytes("pipe", b"x" * 1_000_000)
    same(bench.box.exec("echo on").stdout, "on\n", "the next command's output")


@FILES.check("file.relative", "Relative paths begin in the work folder.")
def _relative(bench: CheckBench) -> None:
    bench.box.write_text("rel/x", "1")
    same(bench.box.read_text(f"{bench.box.workdir}/rel/x"), "1", "the content")
    same(bench.box.read_text("../workdir/rel/x"), "1", "the content by another path")


# ---- whole trees, hostile ones included ----

_SAMPLE = """
rm -rf tree && mkdir -p tree/empty tree/deep/er 'tree/odd name' && cd tree &&
printf hello > deep/er/file && printf '#!/bin/sh\\necho ran\\n' > run.sh && chmod 755 run.sh && printf s > secret &&
chmod 600 secret && printf o > 'odd name/☃ $x' && ln -s deep/er/file link && ln -s /etc/passwd out && ln -s nowhere lost
"""
_LISTING = """
cd {0} && find . | sort && cat deep/er/file 'odd name/☃ $x' && ./run.sh &&
for one in link out lost; do readlink $one; done && stat -c %a run.sh secret
"""


@FILES.check("tree.round-trip", "A tree goes from one sandbox to another as it is; links stay links.")
def _round_trip(bench: CheckBench) -> None:
    box, other = bench.box, bench.open()
    same(box.exec(_SAMPLE).exit_code, 0, "making the tree")
    archive = bench.folder() / "tree.tar"
    box.pack("tree", archive)
    other.unpack(archive, "copied/tree")
    wanted = box.exec(_LISTING.format("tree"))
    same(wanted.exit_code, 0, "listing the tree")
    same(other.exec(_LISTING.format("copied/tree")).stdout, wanted.stdout, "the listing of the copy")


@FILES.check("tree.specials", "Pipes and devices are left out.")
def _specials(bench: CheckBench) -> None:
    archive = bench.folder() / "tree.tar"
    bench.box.exec(
        "rm -rf special; mkdir special; mkfifo special/pipe; ln -s /dev/zero special/zero; touch special/file"
    )
    bench.box.pack("special", archive)
    with tarfile.open(archive) as opened:
        kinds = {os.path.basename(member.name): member.type for member in opened if not member.isdir()}
    same(kinds, {"file": tarfile.REGTYPE, "zero": tarfile.SYMTYPE}, "the entries")


@FILES.check("tree.limit", "A tree larger than allowed is refused.")
def _limit(bench: CheckBench) -> None:
    archive = bench.folder() / "tree.tar"
    bench.box.exec("rm -rf heavy; mkdir heavy; head -c 3000000 /dev/zero > heavy/file")
    with raises(SandboxError):
        bench.box.pack("heavy", archive, max_bytes=1_000_000)
    holds(not archive.exists(), "a part of the archive was left")
    bench.box.exec("rm heavy/file; truncate -s 100G heavy/file 2>/dev/null || head -c 30000000 /dev/zero > heavy/file")
    with raises(SandboxError):
        bench.box.pack("heavy", archive, max_bytes=10_000_000)
    bench.box.exec(["rm", "-r", "heavy"])
    with raises((OSError, SandboxError)):
        bench.box.pack("no/such/tree", archive)


@FILES.check("tree.closed", "Files that their owner may not read are taken as well.")
def _closed_files(bench: CheckBench) -> None:
    archive = bench.folder() / "tree.tar"
    bench.box.exec("rm -rf shut; mkdir -p shut/in; echo x > shut/in/file; chmod 000 shut/in/file; chmod 000 shut/in")
    bench.box.pack("shut", archive)
    with tarfile.open(archive) as opened:
        files = {member.name.removeprefix("./"): member.size for member in opened if member.isreg()}
    same(files, {"in/file": 2}, "the files in the archive")
    bench.box.exec("chmod -R u+rwx shut")


@FILES.check("tree.count", "Entries of a folder are counted, up to a limit, also if its owner has closed it.")
def _count(bench: CheckBench) -> None:
    box = bench.box
    box.exec("rm -rf many link; mkdir -p many/in; touch many/a many/.b many/in/c; ln -s many link; chmod 000 many")
    same(box.count_entries("many", most=10), 4, "the entries")
    same(box.count_entries("many", most=2), 3, "the entries that were counted")
    for path in ("link", "many/a", "no/such/folder"):
        with raises(NotADirectoryError):
            box.count_entries(path, most=10)
    box.exec("rm -rf many link")


@FILES.check("tree.upload", "Files and trees of the host can be copied in.")
def _upload(bench: CheckBench) -> None:
    folder = bench.folder()
    (folder / "sub").mkdir()
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/run.sh")
    bench.box.upload(folder, "up/tree")
    same(bench.box.exec("up/tree/sub/run.sh; readlink up/tree/link").stdout, "ran\nsub/run.sh\n", "the copy")
    bench.box.upload(folder / "sub" / "run.sh", "up/file")
    ran = bench.box.exec(["up/file"])
    same((ran.stdout, ran.stderr, ran.exit_code), ("ran\n", "", 0), "the result of the copied file")


@FILES.check("tree.download", "Files and trees can be copied out.")
def _download(bench: CheckBench) -> None:
    folder = bench.folder()
    bench.box.exec(_SAMPLE)
    bench.box.download("tree", folder / "tree")
    same((folder / "tree/deep/er/file").read_text(), "hello", "a file")
    holds((folder / "tree/empty").is_dir(), "an empty folder is missing")
    holds(os.stat(folder / "tree/run.sh").st_mode & stat.S_IXUSR, "a program cannot be run")
    same((folder / "tree/link").read_text(), "hello", "a file behind a link")
    bench.box.download("tree/deep/er/file", folder / "new" / "file")
    same((folder / "new" / "file").read_text(), "hello", "a single file")
    with raises((OSError, SandboxError)):
        bench.box.download("no/such/file", folder / "none")


@FILES.check("tree.no-host-files", "A link inside never leads to a file of the host.", feature="isolation")
def _no_host_files(bench: CheckBench) -> None:
    folder = bench.folder()
    (folder / "secret").write_text("HOST SECRET")
    box = bench.box
    script = 'rm -rf lure; mkdir lure; ln -s "$1/secret" lure/x; ln -s "$1" lure/d'
    box.exec(["/bin/sh", "-c", script, "sh", str(folder)])
    with raises((OSError, SandboxError)):
        box.read_bytes("lure/x")
    with raises((OSError, SandboxError)):
        box.read_bytes("lure/d/secret")
    box.download("lure", folder / "got")
    for path in (folder / "got").rglob("*"):
        holds(not path.is_symlink(), "a link that leads out of the tree was downloaded")
    box.pack("lure", folder / "lure.tar")
    holds(b"HOST SECRET" not in (folder / "lure.tar").read_bytes(), "the host's file is in the archive")


@FILES.check("tree.hostile-download", "Nothing is written outside of the target of a download.")
def _hostile_download(bench: CheckBench) -> None:
    folder = bench.folder()
    (folder / "outside").mkdir()
    box = bench.box
    box.exec(
        ["/bin/sh", "-c", 'rm -rf sly; mkdir sly; ln -s "$1" sly/a; ln -s .. sly/up', "sh", str(folder / "outside")]
    )
    box.download("sly", folder / "target")
    box.exec("rm sly/a sly/up; mkdir sly/a sly/up; echo bad > sly/a/file; echo bad > sly/up/file")
    try:
        box.download("sly", folder / "target")
    except SandboxError:
        pass
    same(sorted(path.name for path in folder.iterdir()), ["outside", "target"], "the folder around it")
    same(list((folder / "outside").iterdir()), [], "what lies outside")


@FILES.check("tree.hostile-names", "No entry of an archive lands outside by its name.")
def _hostile_names(bench: CheckBench) -> None:
    for name in ("../escaped", "/tmp/escaped", "a/../../escaped"):
        _unpack(bench, bench.box, [(name, "file", "bad")], "jail")
    paths = bench.box.exec(["find", "/tmp", bench.box.home, "-name", "escaped"]).stdout.splitlines()
    holds(all("/jail/" in path for path in paths), f"an entry landed outside: {paths}")


@FILES.check("tree.hostile-links", "No entry of an archive lands outside through a link.")
def _hostile_links(bench: CheckBench) -> None:
    box = bench.box
    box.exec("rm -rf jail victim; mkdir victim; echo good > victim/file")
    victim = f"{box.workdir}/victim"
    _unpack(bench, box, [("a", "link", victim), ("a/file", "file", "bad"), ("a/new", "file", "bad")], "jail")
    _unpack(bench, box, [("b", "link", f"{victim}/file"), ("b", "file", "bad")], "jail")
    _unpack(bench, box, [("c", "hard", f"{victim}/file"), ("c", "file", "bad")], "jail")
    _unpack(bench, box, [("d", "hard", "../victim/file"), ("d", "file", "bad")], "jail")
    same(box.exec("ls victim; cat victim/file").stdout, "file\ngood\n", "what lies outside")


@FILES.check("tree.over", "Unpacking replaces files and keeps the others.")
def _unpack_over(bench: CheckBench) -> None:
    box = bench.box
    box.exec("rm -rf over-tree; mkdir -p over-tree/a; echo old > over-tree/a/file; echo stays > over-tree/other")
    _unpack(bench, box, [("a/file", "file", "new")], "over-tree")
    same(box.exec("cat over-tree/a/file over-tree/other").stdout, "newstays\n", "the files")


@FILES.check("tree.broken", "What is no archive is refused.")
def _broken_archive(bench: CheckBench) -> None:
    archive = bench.folder() / "broken.tar"
    archive.write_bytes(b"this is no archive" * 1000)
    with raises((OSError, SandboxError)):
        bench.box.unpack(archive, "broken")
    same(bench.box.exec("echo on").stdout, "on\n", "the next command's output")


@SNAPSHOTS.check("snapshot.content", "A sandbox from a snapshot begins with what was written.", feature="snapshots")
def _snapshot_content(bench: CheckBench) -> None:
    box = bench.open()
    box.exec(
        "mkdir -p 'a b/c' ../tools; echo 1 > 'a b/c/file'; echo run > ../tools/tool; chmod 750 ../tools/tool;"
        "ln -s ../tools/tool link; mkdir closed; echo 2 > closed/file; chmod 500 closed; touch -d '2001-02-03' old;"
        "echo 3 > /tmp/file; chmod 600 /tmp/file; mkdir /tmp/folder; echo 4 > /dev/shm/file"
    )
    look = "cat 'a b/c/file' ../tools/tool /tmp/file /dev/shm/file closed/file; readlink link; ls -lR .. /tmp /dev/shm"
    with box.snapshot() as snapshot:
        box.exec("echo later > later; rm -rf /tmp/folder")
        copy = bench.open(SandboxSpec(timeout_s=600, from_snapshot=snapshot))
        other = bench.open(SandboxSpec(timeout_s=600, from_snapshot=snapshot))
    holds(copy.from_snapshot is snapshot, "it does not say from which snapshot it is")
    box.exec("rm later; mkdir /tmp/folder")
    same(_without_owners(copy.exec(look).stdout), _without_owners(box.exec(look).stdout), "what is in the copy")
    same(copy.exec("echo 5 > 'a b/c/file' && echo 5 > /tmp/file && echo 5 > closed/file").exit_code, 0, "the exit code")
    same(other.exec("cat 'a b/c/file' /tmp/file").stdout, "1\n3\n", "what the other copy has")
    same(copy.exec("test ! -w closed && touch /tmp/new /dev/shm/new new").exit_code, 0, "the exit code")


@SNAPSHOTS.check("snapshot.files-only", "What a snapshot would not have is no part of one.", feature="snapshots")
def _snapshot_files_only(bench: CheckBench) -> None:
    box = bench.open()
    job = box.start_bg(["sleep", "600"])
    with raises(SandboxUnsupported):
        box.snapshot()
    job.kill()
    box.exec("(setsid sleep 600 > /dev/null 2>&1 &)")
    with raises(SandboxUnsupported):
        box.snapshot()
    box.stop_processes()
    box.exec("mkfifo pipe")
    if box.exists("pipe"):
        with raises(SandboxUnsupported):
            box.snapshot()
    box.exec("rm -f pipe")
    box.snapshot().close()


@SNAPSHOTS.check("snapshot.limits", "Too much is refused, and so is what has ended.", feature="snapshots")
def _snapshot_limits(bench: CheckBench) -> None:
    box = bench.open()
    box.exec("head -c 3000000 /dev/zero > zeros")
    with raises(SandboxTreeError):
        box.snapshot(max_bytes=2_000_000)
    snapshot = box.snapshot(max_bytes=4_000_000)
    box.kill()
    with raises(SandboxGone):
        box.snapshot()
    same(bench.open(SandboxSpec(from_snapshot=snapshot)).exec("wc -c < zeros").stdout.strip(), "3000000", "the size")
    snapshot.close()
    with raises(SandboxError):
        bench.open(SandboxSpec(from_snapshot=snapshot))


def _without_owners(listing: str) -> list[list[str]]:
    """Leave users, sizes of folders and times of today out of what `ls -l` prints."""
    lines = [line.split() for line in listing.splitlines() if not line.startswith("total ")]
    return [[line[0], *line[5:]] if "2001" in line else [line[0], *line[8:]] for line in lines if line]


def _unpack(bench: CheckBench, box: Sandbox, entries: list[tuple[str, str, str]], path: str) -> None:
    """Unpack an archive; it may be refused or be taken in part."""
    archive = bench.folder() / "hostile.tar"
    _make(archive, entries)
    try:
        box.unpack(archive, path)
    except (SandboxError, OSError, ValueError):
        pass


def _make(archive: Path, entries: list[tuple[str, str, str]]) -> None:
    with tarfile.open(archive, "w") as opened:
        for name, kind, value in entries:
            entry = tarfile.TarInfo(name)
            entry.mode = 0o644
            if kind == "file":
                entry.size = len(value)
                opened.addfile(entry, io.BytesIO(value.encode()))
            else:
                entry.type = tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE
                entry.linkname = value
                opened.addfile(entry)
