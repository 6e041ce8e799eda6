"""Contract checks of commands: arguments, environment, input, output, exit codes, timeouts and background jobs."""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
import time
from collections import Counter

from openenv.errors import SandboxGone
from openenv.sandboxes.base import BgJob, SandboxSpec, Stream
from openenv.sandboxes.checks.bench import CheckBench, CheckGroup, eventually, holds, raises, running, same, seconds

_TEXT = "naïve ☃ 🦊 \u202e שלום"

COMMANDS = CheckGroup()


@COMMANDS.check("exec.exit-code", "The exit code is the command's.")
def _exit_codes(bench: CheckBench) -> None:
    for code in (0, 1, 3, 42, 255):
        same(bench.box.exec(f"exit {code}").exit_code, code, "the exit code")


@COMMANDS.check("exec.signal", "A command that a signal ended has exit code 128 and the signal's number.")
def _signals(bench: CheckBench) -> None:
    same(bench.box.exec("kill -TERM $$").exit_code, 143, "the exit code after SIGTERM")
    same(bench.box.exec("kill -KILL $$").exit_code, 137, "the exit code after SIGKILL")


@COMMANDS.check("exec.missing", "A program that is not there has exit code 127.")
def _missing_program(bench: CheckBench) -> None:
    result = bench.box.exec(["/no/such/program"])
    same(result.exit_code, 127, "the exit code of a missing program")
    holds(result.stderr, "nothing on stderr says what is missing")
    same(bench.box.exec("no-such-program").exit_code, 127, "the shell's exit code")


@COMMANDS.check("exec.not-executable", "A file that is no program has exit code 126.")
def _not_executable(bench: CheckBench) -> None:
    bench.box.write_text("plain.txt", "not a program")
    same(bench.box.exec(["./plain.txt"]).exit_code, 126, "the exit code")


@COMMANDS.check("exec.arguments", "An argument list arrives as it is, no shell reads it.")
def _arguments(bench: CheckBench) -> None:
    odd = ["$HOME", "a b", "'", '"', "*", "x\ny", "", "-n", _TEXT, "\\", ";exit 9"]
    result = bench.box.exec(["/bin/sh", "-c", 'for a in "$@"; do printf "[%s]" "$a"; done', "sh", *odd])
    same(result.stdout, "".join(f"[{part}]" for part in odd), "what arrived")


@COMMANDS.check("exec.shell", "A text is a shell line.")
def _shell_lines(bench: CheckBench) -> None:
    result = bench.box.exec("cat <<'END' | tr a-z A-Z\nit's $HOME\nEND\nexit 4")
    same((result.exit_code, result.stdout), (4, "IT'S $HOME\n"), "the result")


@COMMANDS.check("exec.environment", "Variables come from the spec and the call, and the call's win.")
def _environment(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(envs={"FIRST": "spec", "SECOND": "spec"}))
    result = box.exec('printf "%s %s %s" "$FIRST" "$SECOND" "$THIRD"', envs={"SECOND": "call", "THIRD": f"{_TEXT}\n"})
    same(result.stdout, f"spec call {_TEXT}\n", "the environment")
    same(box.exec('printf "%s" "${THIRD-unset}"').stdout, "unset", "a variable of an earlier command")


@COMMANDS.check("exec.folder", "Commands start in the work folder or in the one that the call names.")
def _folders(bench: CheckBench) -> None:
    box = bench.box
    same(box.exec("pwd").stdout.strip(), box.workdir, "the folder that commands start in")
    same(box.exec("pwd", cwd="/").stdout.strip(), "/", "the folder of the call")
    box.exec("mkdir -p 'sub dir'")
    same(box.exec("pwd", cwd="sub dir").stdout.strip(), f"{box.workdir}/sub dir", "a relative folder")
    result = box.exec("echo here", cwd="/no/such/folder")
    same((result.exit_code, result.stdout), (126, ""), "the result in a folder that is not there")


@COMMANDS.check("exec.home", "Home and work folder exist and can be written to.")
def _home(bench: CheckBench) -> None:
    box = bench.box
    same(box.exec('printf "%s" "$HOME"').stdout, box.home, "HOME")
    same(box.exec('touch "$HOME/x" && touch "$HOME/workdir/x"').exit_code, 0, "writing to home and work folder")


@COMMANDS.check("exec.text", "Text comes out as it is, with replacements for what is none.")
def _text(bench: CheckBench) -> None:
    same(bench.box.exec(["printf", "%s", _TEXT]).stdout, _TEXT, "the text")
    result = bench.box.exec(r"printf 'a\377b'")
    same(result.stdout, "a\ufffdb", "bytes that are not UTF-8")


@COMMANDS.check("exec.no-input", "A command without input reads the end of it at once.")
def _no_input(bench: CheckBench) -> None:
    result = bench.box.exec("cat; echo end", timeout=10)
    same((result.stdout, result.timed_out), ("end\n", False), "the result")


@COMMANDS.check("exec.input", "Input arrives byte by byte.")
def _given_input(bench: CheckBench) -> None:
    every = bytes(range(256))
    got = bytearray()
    bench.box.exec(["cat"], stdin=every, on_output=lambda stream, data: got.extend(data))
    same(bytes(got), every, "what came back")
    result = bench.box.exec(["wc", "-c"], stdin=bytes(1_000_003))
    same(result.stdout.strip(), "1000003", "the size of the input")
    same(bench.box.exec("cat; echo end", stdin=b"").stdout, "end\n", "the result with an empty input")


@COMMANDS.check("exec.unread-input", "Input that is not read does not delay the result.")
def _unread_input(bench: CheckBench) -> None:
    result = bench.box.exec(["true"], stdin=bytes(8_000_000), timeout=20)
    same((result.exit_code, result.timed_out), (0, False), "the result")


@COMMANDS.check("exec.large", "Commands and variables may be large.")
def _large_command(bench: CheckBench) -> None:
    result = bench.box.exec(f': {"x" * 100_000}; printf %s "$BIG" | wc -c', envs={"BIG": "y" * 100_000})
    same((result.exit_code, result.stdout.strip()), (0, "100000"), "the result")


# ---- output ----

_HUNDRED_MB = 100 * 1024 * 1024


@COMMANDS.check("output.streams", "Both streams are kept apart.")
def _streams(bench: CheckBench) -> None:
    result = bench.box.exec("echo out; echo err >&2; exit 5")
    same((result.exit_code, result.stdout, result.stderr), (5, "out\n", "err\n"), "the result")
    holds(0 < result.duration_s < 60, "the duration is not set")


@COMMANDS.check("output.binary", "Every byte comes out as it was written.")
def _binary(bench: CheckBench) -> None:
    content = bytes(range(256)) * 4096
    bench.box.write_bytes("bytes.bin", content)
    got: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    result = bench.box.exec("cat bytes.bin; cat bytes.bin >&2", on_output=lambda stream, data: got[stream].extend(data))
    same(result.exit_code, 0, "the exit code")
    for stream, received in got.items():
        same(hashlib.sha256(received).hexdigest(), hashlib.sha256(content).hexdigest(), f"the hash of {stream}")


@COMMANDS.check("output.huge", "100 MB pass through, and only the beginning is kept.")
def _huge(bench: CheckBench) -> None:
    count: Counter[str] = Counter()
    command = f"head -c {_HUNDRED_MB} /dev/zero"
    result = bench.box.exec(
        command, timeout=120, max_output=1000, on_output=lambda stream, data: count.update({stream: len(data)})
    )
    same((result.exit_code, count["stdout"]), (0, _HUNDRED_MB), "exit code and size")
    same((len(result.stdout), result.truncated), (1000, True), "what was kept")


@COMMANDS.check("output.kept", "More than max_output bytes of a stream are dropped, and `truncated` is set.")
def _kept(bench: CheckBench) -> None:
    result = bench.box.exec("printf 0123456789; printf abc >&2", max_output=4)
    same((result.stdout, result.stderr, result.truncated), ("0123", "abc", True), "what was kept")
    result = bench.box.exec("printf 0123", max_output=4)
    same((result.stdout, result.truncated), ("0123", False), "what was kept")


@COMMANDS.check("output.streaming", "Output is passed on while the command runs.")
def _streaming(bench: CheckBench) -> None:
    seen: list[tuple[float, bytes]] = []
    bench.box.exec(
        "echo first; sleep 0.7; echo second", on_output=lambda stream, data: seen.append((time.monotonic(), data))
    )
    same(b"".join(data for _, data in seen), b"first\nsecond\n", "the output")
    holds(len(seen) > 1 and seen[-1][0] - seen[0][0] > 0.3, "the first line did not come before the second was written")


@COMMANDS.check("output.both", "Two full streams do not block each other.")
def _both(bench: CheckBench) -> None:
    command = "head -c 5000000 /dev/zero >&2 & head -c 5000000 /dev/zero; wait"
    result = bench.box.exec(command, timeout=60)
    same((len(result.stdout), len(result.stderr), result.exit_code), (5_000_000, 5_000_000, 0), "sizes and exit code")


def _fail(stream: Stream, data: bytes) -> None:
    raise ZeroDivisionError


@COMMANDS.check("output.callback", "An exception of the callback ends the command and is raised.")
def _callback_error(bench: CheckBench) -> None:
    with raises(ZeroDivisionError):
        bench.box.exec("echo x; sleep 60", on_output=_fail, timeout=30)
    same(bench.box.exec("echo still here").stdout, "still here\n", "the next command's output")


# ---- timeouts of commands and sandboxes ----

# The inner shell's parents end at once, and it runs in a new session.
_DAEMON = "(setsid sh -c 'sleep {0} & sleep {0}' </dev/null >/dev/null 2>&1 &) ; "


@COMMANDS.check("time.timeout", "A command whose time is over is killed, with code 124 and its output so far.")
def _timeout(bench: CheckBench) -> None:
    result = bench.box.exec("echo begun; echo oops >&2; sleep 60; echo never", timeout=1)
    same((result.exit_code, result.timed_out), (124, True), "the result")
    same((result.stdout, result.stderr), ("begun\n", "oops\n"), "the output so far")
    holds(result.duration_s < 20, "it took too long to notice")


@COMMANDS.check("time.tree", "Its children are killed with it.")
def _tree(bench: CheckBench) -> None:
    first, second, third = seconds(), seconds(), seconds()
    command = f"sh -c 'sleep {first} & sh -c \"sleep {second}\"' & sleep {third}"
    same(bench.box.exec(command, timeout=1).timed_out, True, "timed_out")
    eventually(lambda: not any(running(bench.box, word) for word in (first, second, third)), "a child still runs")


@COMMANDS.check("time.daemon", "Daemons that it started are killed, too.", feature="trees")
def _daemon(bench: CheckBench) -> None:
    word = seconds()
    same(bench.box.exec(_DAEMON.format(word) + "sleep 60", timeout=1).timed_out, True, "timed_out")
    eventually(lambda: not running(bench.box, word), "the daemon still runs")


@COMMANDS.check("time.stubborn", "It cannot refuse to end.")
def _stubborn(bench: CheckBench) -> None:
    command = "trap '' TERM INT HUP QUIT; while :; do sleep 1; done"
    result = bench.box.exec(command, timeout=1)
    same((result.exit_code, result.timed_out), (124, True), "the result")


@COMMANDS.check("time.others", "Other commands go on.")
def _others(bench: CheckBench) -> None:
    word = seconds()
    job = bench.box.start_bg(f"sleep {word}; exit 3")
    try:
        same(bench.box.exec("sleep 60", timeout=0.5).timed_out, True, "timed_out")
        holds(running(bench.box, word), "another command was killed as well")
    finally:
        job.kill()


@COMMANDS.check("time.background", "What a command leaves behind does not delay its result.")
def _background(bench: CheckBench) -> None:
    started = time.monotonic()
    result = bench.box.exec("sleep 20 & echo done", timeout=15)
    same((result.exit_code, result.stdout, result.timed_out), (0, "done\n", False), "the result")
    holds(time.monotonic() - started < 10, "what was left behind delayed the result")
    result = bench.box.exec("(while :; do echo noise; done) & sleep 0.2; exit 7", timeout=30, max_output=100)
    same((result.exit_code, result.timed_out), (7, False), "the result beside endless output")
    bench.box.stop_processes()


@COMMANDS.check("time.unlimited", "Without a limit, a command runs to its end.")
def _unlimited(bench: CheckBench) -> None:
    same(bench.box.exec("sleep 0.2; echo done", timeout=None).stdout, "done\n", "the output")


@COMMANDS.check("time.expiry", "A sandbox ends by itself when its time is over.", feature="expiry")
def _expiry(bench: CheckBench) -> None:
    box = bench.open(SandboxSpec(timeout_s=3))
    started = time.monotonic()
    with raises(SandboxGone):
        box.exec("sleep 100", timeout=60)
    holds(time.monotonic() - started < 30, "the sandbox lived on")
    with raises(SandboxGone):
        box.read_bytes("/etc/hostname")


# ---- background jobs, stop_processes, kill, and many threads ----

_HIDING = """
for each in 1 2 3; do
  (setsid sh -c "trap '' TERM HUP INT; (sleep {0}; sleep {0}) & sleep {0}" </dev/null >/dev/null 2>&1 &)
done
"""


@COMMANDS.check("job.wait", "A job's exit code can be waited for.")
def _wait(bench: CheckBench) -> None:
    job = bench.box.start_bg("sleep 0.3; exit 6")
    holds(isinstance(job, BgJob), "a job is not a BgJob")
    holds(job.pid > 0, "a job has no process id")
    same(job.wait(30), 6, "the exit code")
    same(job.wait(), 6, "the exit code of a second wait")


@COMMANDS.check("job.kill", "A job can be killed with its children; waiting has a limit.")
def _not_yet(bench: CheckBench) -> None:
    word = seconds()
    job = bench.box.start_bg(f"sleep {word} & sleep {word}")
    with raises(TimeoutError):
        job.wait(0.2)
    job.kill()
    same(job.wait(30), 137, "the exit code of a killed job")
    eventually(lambda: not running(bench.box, word), "a child of the job still runs")
    job.kill()


@COMMANDS.check("job.output", "A job's output is passed on while it runs.")
def _job_output(bench: CheckBench) -> None:
    seen: list[bytes] = []
    arrived = threading.Event()

    def take(stream: str, data: bytes) -> None:
        seen.append(data)
        arrived.set()

    job = bench.box.start_bg('printf "%s" "$WORD"; sleep 30', envs={"WORD": "begun"}, cwd="/", on_output=take)
    holds(arrived.wait(20), "no output came")
    same(seen, [b"begun"], "the output")
    job.kill()


@COMMANDS.check("job.files", "What a job writes can be read while it runs.")
def _job_and_files(bench: CheckBench) -> None:
    bench.box.exec(["rm", "-f", "from-job"])
    job = bench.box.start_bg("echo yes > from-job; sleep 30")
    eventually(lambda: bench.box.exists("from-job"), "the job wrote nothing")
    job.kill()


@COMMANDS.check("stop.daemons", "All processes can be killed, those that hide too; files stay.", feature="trees")
def _stop(bench: CheckBench) -> None:
    box = bench.open()
    box.write_text("kept.txt", "kept")
    word = seconds()
    box.exec(_HIDING.format(word))
    job = box.start_bg(f"sleep {word}")
    eventually(lambda: running(box, word), "the daemons did not start")
    box.stop_processes()
    same(job.wait(10), 137, "the exit code of a job that was stopped")
    holds(not running(box, word), "a process survived")
    same(box.read_text("kept.txt"), "kept", "a file from before")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")
    box.stop_processes()


@COMMANDS.check("stop.exec", "A command that is stopped so has exit code 137.")
def _stop_under_exec(bench: CheckBench) -> None:
    box = bench.open()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        word = seconds()
        pending = pool.submit(box.exec, f"sleep {word}")
        eventually(lambda: running(box, word), "the command did not start")
        box.stop_processes()
        same(pending.result(30).exit_code, 137, "the exit code of the command that was stopped")


@COMMANDS.check("kill.exec", "Killing a sandbox ends the command under way.")
def _kill(bench: CheckBench) -> None:
    box = bench.open()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(box.exec, "sleep 100", timeout=None)
        time.sleep(0.3)
        started = time.monotonic()
        box.kill()
        with raises(SandboxGone):
            pending.result(30)
        holds(time.monotonic() - started < 15, "the command went on for long")


@COMMANDS.check("kill.gone", "A sandbox that is gone raises SandboxGone at every use.")
def _gone(bench: CheckBench) -> None:
    box = bench.open()
    job = box.start_bg("sleep 100")
    box.kill()
    box.kill()
    box.close()
    folder = bench.folder()
    (folder / "file").write_text("x")
    for use in (
        lambda: box.exec("true"),
        lambda: box.start_bg("true"),
        lambda: box.read_bytes("x"),
        lambda: box.write_bytes("x", b""),
        lambda: box.exists("x"),
        lambda: box.stop_processes(),
        lambda: box.upload(folder / "file", "x"),
        lambda: box.pack("/tmp", folder / "x.tar"),
    ):
        with raises(SandboxGone):
            use()
    with raises(SandboxGone):
        job.wait(20)


@COMMANDS.check("use.threads", "Many threads can use one sandbox, and nothing is mixed up.")
def _threads(bench: CheckBench) -> None:
    box = bench.open()

    def work(number: int) -> None:
        for turn in range(4):
            word = f"{number}-{turn}"
            box.write_text(f"t/{word}", word)
            result = box.exec(f"cat t/{word}; echo {word} >&2; exit {number}")
            same((result.exit_code, result.stdout, result.stderr), (number, word, f"{word}\n"), "the result")
            same(box.read_text(f"t/{word}"), word, "the file")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(work, number) for number in range(16)]:
            done.result(240)
