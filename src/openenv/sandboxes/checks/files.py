"""Checks: single files."""

from __future__ import annotations

from openenv.errors import SandboxError
from openenv.sandboxes.checks.bench import Bench, Check, holds, raises, same

_NAMES = (
    "with space", "quo'te", 'dou"ble', "new\nline", "-dash", "dollar$HOME", "star*", "snow☃", "back\\slash", "..odd",
)  # fmt: skip


def contents(bench: Bench) -> None:
    """Write and read contents of all kinds."""
    for content in (b"", b"\x00", bytes(range(256)) * 100, "☃".encode(), b"no end of line", b"\r\n\n"):
        bench.box.write_bytes("content", content)
        same(bench.box.read_bytes("content"), content, "what was read")
    bench.box.write_text("text", "snow ☃\n")
    same(bench.box.read_text("text"), "snow ☃\n", "the text")
    bench.box.write_bytes("text", b"a\xffb")
    same(bench.box.read_text("text"), "a\ufffdb", "a text that is not UTF-8")


def large(bench: Bench) -> None:
    """Write and read 20 MB."""
    content = bytes(range(251)) * 80_000
    bench.box.write_bytes("large", content)
    same(bench.box.exec(["wc", "-c", "large"]).stdout.split()[0], str(len(content)), "the size inside")
    holds(bench.box.read_bytes("large") == content, "it is not the same when read again")
    bench.box.exec(["rm", "large"])


def parents(bench: Bench) -> None:
    """Write where no folder is yet, with a mode."""
    bench.box.write_bytes("made/on/the/way.sh", b"#!/bin/sh\necho run\n", mode=0o755)
    same(bench.box.exec(["made/on/the/way.sh"]).stdout, "run\n", "the script's output")
    bench.box.write_bytes("made/plain", b"")
    holds("-rw-r--r--" in bench.box.exec(["ls", "-l", "made/plain"]).stdout, "the default mode is not 0644")


def missing(bench: Bench) -> None:
    """Read what is no file."""
    with raises(FileNotFoundError):
        bench.box.read_bytes("no/such/file")
    with raises(IsADirectoryError):
        bench.box.read_bytes("/tmp")
    bench.box.exec("touch closed; chmod 000 closed")
    with raises((IsADirectoryError, PermissionError, NotADirectoryError, SandboxError)):
        bench.box.write_bytes("/tmp", b"")


def part(bench: Bench) -> None:
    """Read the beginning of a file."""
    bench.box.write_bytes("digits", b"0123456789")
    same(bench.box.read_bytes("digits", max_bytes=4), b"0123", "the beginning")
    same(bench.box.read_bytes("digits", max_bytes=100), b"0123456789", "all of it")
    same(bench.box.read_bytes("digits", max_bytes=0), b"", "nothing of it")


def owner(bench: Bench) -> None:
    """Change, as a command, a file that was written from outside."""
    bench.box.write_text("mine", "old")
    same(bench.box.exec("echo new > mine && chmod 600 mine && rm mine").exit_code, 0, "the exit code")
    bench.box.exec("echo secret > own; chmod 600 own")
    same(bench.box.read_text("own"), "secret\n", "a file of the sandbox's user")


def names(bench: Bench) -> None:
    """Use names that a shell would change."""
    for name in _NAMES:
        path = f"names/{name}/{name}"
        bench.box.write_text(path, name)
        same(bench.box.read_text(path), name, f"the content of {name!r}")
        holds(bench.box.exists(path), f"{name!r} does not exist")
    same(bench.box.exec("ls names | wc -l", cwd=bench.box.workdir).exit_code, 0, "the exit code")


def overwrite(bench: Bench) -> None:
    """Write less than there was, and through a link."""
    bench.box.write_text("over", "a long text")
    bench.box.write_text("over", "short")
    same(bench.box.read_text("over"), "short", "the content")
    bench.box.exec("ln -sf over over-link")
    bench.box.write_text("over-link", "linked")
    same(bench.box.read_text("over"), "linked", "the content of the file behind the link")


def exist(bench: Bench) -> None:
    """Ask for files, folders and links."""
    box = bench.box
    box.exec("touch there; mkdir -p folder; ln -sfn nowhere dangling")
    same(
        [box.exists(path) for path in ("there", "folder", "/", "not-there", "dangling")],
        [True, True, True, False, False],
    )


def not_files(bench: Bench) -> None:
    """Read and write what would never end or never answer."""
    bench.box.exec("mkfifo pipe")
    for path in ("pipe", "/dev/zero"):
        with raises((OSError, SandboxError)):
            bench.box.read_bytes(path)
    with raises((OSError, SandboxError)):
        bench.box.write_bytes("pipe", b"x" * 1_000_000)
    same(bench.box.exec("echo on").stdout, "on\n", "the next command's output")


def relative(bench: Bench) -> None:
    """Use relative and absolute paths."""
    bench.box.write_text("rel/x", "1")
    same(bench.box.read_text(f"{bench.box.workdir}/rel/x"), "1", "the content")
    same(bench.box.read_text("../workdir/rel/x"), "1", "the content by another path")


CHECKS = (
    Check("file.content", "Files hold exactly what was written.", contents),
    Check("file.large", "20 MB go in and come out.", large),
    Check("file.parents", "Folders above a file are made, and its mode is set.", parents),
    Check("file.missing", "What is no file raises what open() would.", missing),
    Check("file.part", "The beginning of a file can be read.", part),
    Check("file.owner", "Files belong to the sandbox's user.", owner),
    Check("file.names", "Any name is just a name.", names),
    Check("file.overwrite", "Writing replaces what was there, also behind a link.", overwrite),
    Check("file.exists", "exists() knows files, folders and links to them.", exist),
    Check("file.not-files", "Pipes and devices are refused, and nothing hangs.", not_files),
    Check("file.relative", "Relative paths begin in the work folder.", relative),
)
