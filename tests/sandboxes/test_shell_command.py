"""The text that runs a command in a shell-driven sandbox, and the reader that finds its output in any pieces."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv.sandboxes import shell_command
from openenv.sandboxes.base import CommandSpec, Stream
from openenv.sandboxes.shell_command import Invocation, OutputReader, framed

EDGE = b"\x1e"


def read(reader: OutputReader, stream: Stream, parts: list[bytes]) -> bytes:
    return b"".join(reader.feed(stream, part) for part in parts) + reader.flush(stream)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 500)), st.binary(max_size=30))
def test_output_is_found_wherever_the_stream_is_cut(output: bytes, places: list[int], leftover: bytes) -> None:
    nonce = "0123abcd" * 4
    name = nonce.encode()
    output = output.replace(b"x", EDGE + name[:10]).replace(b"y", EDGE + name).replace(b"z", EDGE)
    wire = b"login noise" + EDGE + name + b" S 42" + EDGE + output + EDGE + name + b" E 137 1" + EDGE + leftover
    reader = OutputReader(nonce)
    assert read(reader, "stdout", cut(wire, places)) == output
    assert (reader.pid, reader.exit_code, reader.oom_kills) == (42, 137, 1)
    assert not reader.finished
    assert read(reader, "stderr", cut(wire, places)) == output
    assert reader.finished


def test_a_stream_that_breaks_off_gives_up_what_was_held_back() -> None:
    reader = OutputReader("ab" * 16)
    got = read(reader, "stdout", [EDGE + b"ab" * 16 + b" S 7" + EDGE + b"text" + EDGE + b"abab"])
    assert got == b"text" + EDGE + b"abab"
    assert reader.exit_code is None


def test_what_comes_instead_of_a_command_is_kept_as_a_complaint() -> None:
    reader = OutputReader("ab" * 16)
    assert reader.feed("stderr", b"no such container\n") == b""
    assert reader.complaint == "no such container"
    assert reader.pid is None


def run(call: Invocation, stdin: bytes = b"") -> tuple[OutputReader, bytes, bytes]:
    done = subprocess.run(
        ["/bin/sh", "-c", shell_command.READ_SCRIPT],
        input=framed(call.script()) + stdin,
        capture_output=True,
        check=False,
    )
    reader = OutputReader(call.nonce)
    return reader, read(reader, "stdout", [done.stdout]), read(reader, "stderr", [done.stderr])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="marks are limits of Linux")
def test_a_command_gets_its_folder_variables_input_and_mark(tmp_path: Path) -> None:
    line = "pwd; cat; printf '%s' \"$A\"; grep resident /proc/self/limits >&2; exit 4"
    call = Invocation(
        CommandSpec(line, envs={"A": "it's\n$HOME"}),
        str(tmp_path / "work dir"),
        "/home/user",
        mark=shell_command.mark_kb(5),
        has_input=True,
    )
    reader, out, err = run(call, b"input\n")
    assert out == f"{tmp_path}/work dir\ninput\nit's\n$HOME".encode()
    assert str(shell_command.mark_kb(5) * 1024).encode() in err
    assert (reader.exit_code, reader.finished) == (4, True)
    assert reader.pid is not None


def test_a_command_killed_by_a_signal_says_nothing_on_the_error_stream(tmp_path: Path) -> None:
    reader, out, err = run(Invocation(CommandSpec("kill -SEGV $$"), str(tmp_path), "/"))
    assert (reader.exit_code, out, err) == (139, b"", b"")


def test_variables_may_have_names_that_no_shell_knows(tmp_path: Path) -> None:
    _, out, _ = run(Invocation(CommandSpec(["env"], envs={"odd.name": "1 2"}), str(tmp_path), "/"))
    assert b"\nodd.name=1 2\n" in b"\n" + out


def test_arguments_are_read_by_no_shell(tmp_path: Path) -> None:
    command = CommandSpec(["printf", "%s|", "a b", "$HOME", "it's", "*"])
    _, out, _ = run(Invocation(command, str(tmp_path), "/"))
    assert out == b"a b|$HOME|it's|*|"


def test_what_no_process_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        CommandSpec("a\0b")
    with pytest.raises(ValueError, match="NUL"):
        CommandSpec("a", {"A": "\0"})
    with pytest.raises(ValueError, match="argument list is empty"):
        CommandSpec([])
    with pytest.raises(ValueError, match="name"):
        CommandSpec("a", {"A=B": "c"})


def test_root_never_kills_everything() -> None:
    code = shell_command.KILL_ALL.replace("/proc/self/status", "/dev/stdin").replace("kill -KILL -1", "echo would kill")
    root = subprocess.run(["/bin/sh", "-c", code], input=b"Uid:\t0\t0\t0\t0\n", capture_output=True, check=False)
    assert (root.returncode, root.stdout) == (99, b"")
    user = subprocess.run(["/bin/sh", "-c", code], input=b"Uid:\t1000\t0\t0\t0\n", capture_output=True, check=False)
    assert user.stdout == b"would kill\n"
