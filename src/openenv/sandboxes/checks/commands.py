"""Checks: commands, their arguments, environment, input and exit codes."""

from __future__ import annotations

from openenv.sandboxes.checks.bench import Bench, Check, holds, same

_TEXT = "naïve ☃ 🦊 \u202e שלום"


def exit_codes(bench: Bench) -> None:
    """Exit with several codes."""
    for code in (0, 1, 3, 42, 255):
        same(bench.box.exec(f"exit {code}").exit_code, code, "the exit code")


def signals(bench: Bench) -> None:
    """End by a signal."""
    same(bench.box.exec("kill -TERM $$").exit_code, 143, "the exit code after SIGTERM")
    same(bench.box.exec("kill -KILL $$").exit_code, 137, "the exit code after SIGKILL")


def missing_program(bench: Bench) -> None:
    """Start what is not there."""
    result = bench.box.exec(["/no/such/program"])
    same(result.exit_code, 127, "the exit code of a missing program")
    holds(result.stderr, "nothing on stderr says what is missing")
    same(bench.box.exec("no-such-program").exit_code, 127, "the shell's exit code")


def not_executable(bench: Bench) -> None:
    """Start a file that is no program."""
    bench.box.write_text("plain.txt", "not a program")
    same(bench.box.exec(["./plain.txt"]).exit_code, 126, "the exit code")


def arguments(bench: Bench) -> None:
    """Pass arguments that a shell would change."""
    odd = ["$HOME", "a b", "'", '"', "*", "x\ny", "", "-n", _TEXT, "\\", ";exit 9"]
    result = bench.box.exec(["/bin/sh", "-c", 'for a in "$@"; do printf "[%s]" "$a"; done', "sh", *odd])
    same(result.stdout, "".join(f"[{part}]" for part in odd), "what arrived")


def shell_lines(bench: Bench) -> None:
    """Run a line with pipes, quotes and a here-document."""
    result = bench.box.exec("cat <<'END' | tr a-z A-Z\nit's $HOME\nEND\nexit 4")
    same((result.exit_code, result.stdout), (4, "IT'S $HOME\n"), "the result")


def environment(bench: Bench) -> None:
    """Set variables for the sandbox and for one command."""
    box = bench.open(envs={"FIRST": "spec", "SECOND": "spec"})
    result = box.exec('printf "%s %s %s" "$FIRST" "$SECOND" "$THIRD"', envs={"SECOND": "call", "THIRD": f"{_TEXT}\n"})
    same(result.stdout, f"spec call {_TEXT}\n", "the environment")
    same(box.exec('printf "%s" "${THIRD-unset}"').stdout, "unset", "a variable of an earlier command")


def folders(bench: Bench) -> None:
    """Start in the work folder, or in another one."""
    box = bench.box
    same(box.exec("pwd").stdout.strip(), box.workdir, "the folder that commands start in")
    same(box.exec("pwd", cwd="/").stdout.strip(), "/", "the folder that was asked for")
    box.exec("mkdir -p 'sub dir'")
    same(box.exec("pwd", cwd="sub dir").stdout.strip(), f"{box.workdir}/sub dir", "a relative folder")
    result = box.exec("echo here", cwd="/no/such/folder")
    same((result.exit_code, result.stdout), (126, ""), "the result in a folder that is not there")


def home(bench: Bench) -> None:
    """Find a home that can be written to."""
    box = bench.box
    same(box.exec('printf "%s" "$HOME"').stdout, box.home, "HOME")
    same(box.exec('touch "$HOME/x" && touch "$HOME/workdir/x"').exit_code, 0, "writing to home and work folder")


def text(bench: Bench) -> None:
    """Pass text that is not ASCII in and out."""
    same(bench.box.exec(["printf", "%s", _TEXT]).stdout, _TEXT, "the text")
    result = bench.box.exec(r"printf 'a\377b'")
    same(result.stdout, "a\ufffdb", "bytes that are not UTF-8")


def no_input(bench: Bench) -> None:
    """Read input when there is none."""
    result = bench.box.exec("cat; echo end", timeout=10)
    same((result.stdout, result.timed_out), ("end\n", False), "the result")


def given_input(bench: Bench) -> None:
    """Read input of every byte, and of a megabyte."""
    every = bytes(range(256))
    got = bytearray()
    bench.box.exec(["cat"], stdin=every, on_output=lambda stream, data: got.extend(data))
    same(bytes(got), every, "what came back")
    result = bench.box.exec(["wc", "-c"], stdin=bytes(1_000_003))
    same(result.stdout.strip(), "1000003", "the size of the input")
    same(bench.box.exec("cat; echo end", stdin=b"").stdout, "end\n", "the result with an empty input")


def unread_input(bench: Bench) -> None:
    """Do not read the input."""
    result = bench.box.exec(["true"], stdin=bytes(8_000_000), timeout=20)
    same((result.exit_code, result.timed_out), (0, False), "the result")


def large_command(bench: Bench) -> None:
    """Run a line and an environment of 100 kB each."""
    result = bench.box.exec(f': {"x" * 100_000}; printf %s "$BIG" | wc -c', envs={"BIG": "y" * 100_000})
    same((result.exit_code, result.stdout.strip()), (0, "100000"), "the result")


CHECKS = (
    Check("exec.exit-code", "The exit code is the command's.", exit_codes),
    Check("exec.signal", "A command that a signal ended has exit code 128 and the signal's number.", signals),
    Check("exec.missing", "A program that is not there has exit code 127.", missing_program),
    Check("exec.not-executable", "A file that is no program has exit code 126.", not_executable),
    Check("exec.arguments", "An argument list arrives as it is, no shell reads it.", arguments),
    Check("exec.shell", "A text is a shell line.", shell_lines),
    Check("exec.environment", "Variables come from the spec and the call, and the call's win.", environment),
    Check("exec.folder", "Commands start in the work folder or where they are told to.", folders),
    Check("exec.home", "Home and work folder exist and can be written to.", home),
    Check("exec.text", "Text comes out as it is, with replacements for what is none.", text),
    Check("exec.no-input", "A command without input reads the end of it at once.", no_input),
    Check("exec.input", "Input arrives byte by byte.", given_input),
    Check("exec.unread-input", "Input that nobody reads does not delay the result.", unread_input),
    Check("exec.large", "Commands and variables may be large.", large_command),
)
