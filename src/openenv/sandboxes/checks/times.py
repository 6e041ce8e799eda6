"""Checks: commands whose time is over, what they leave behind, and sandboxes whose time is over."""

from __future__ import annotations

import time

from openenv.errors import SandboxGone
from openenv.sandboxes.checks.bench import Bench, Check, eventually, holds, raises, running, same, seconds

# The inner shell's parents end at once, and it has a session of its own.
_DAEMON = "(setsid sh -c 'sleep {0} & sleep {0}' </dev/null >/dev/null 2>&1 &) ; "


def timeout(bench: Bench) -> None:
    """Take too long."""
    result = bench.box.exec("echo begun; echo oops >&2; sleep 60; echo never", timeout=1)
    same((result.exit_code, result.timed_out), (124, True), "the result")
    same((result.stdout, result.stderr), ("begun\n", "oops\n"), "the output so far")
    holds(result.duration_s < 20, "it took too long to notice")


def tree(bench: Bench) -> None:
    """Take too long with children and grandchildren."""
    first, second, third = seconds(), seconds(), seconds()
    command = f"sh -c 'sleep {first} & sh -c \"sleep {second}\"' & sleep {third}"
    same(bench.box.exec(command, timeout=1).timed_out, True, "timed_out")
    eventually(lambda: not any(running(bench.box, word) for word in (first, second, third)), "a child still runs")


def daemon(bench: Bench) -> None:
    """Take too long after a daemon was started."""
    word = seconds()
    same(bench.box.exec(_DAEMON.format(word) + "sleep 60", timeout=1).timed_out, True, "timed_out")
    eventually(lambda: not running(bench.box, word), "the daemon still runs")


def stubborn(bench: Bench) -> None:
    """Take too long and ignore signals."""
    command = "trap '' TERM INT HUP QUIT; while :; do sleep 1; done"
    result = bench.box.exec(command, timeout=1)
    same((result.exit_code, result.timed_out), (124, True), "the result")


def others(bench: Bench) -> None:
    """Take too long beside another command."""
    word = seconds()
    job = bench.box.start_bg(f"sleep {word}; exit 3")
    try:
        same(bench.box.exec("sleep 60", timeout=0.5).timed_out, True, "timed_out")
        holds(running(bench.box, word), "another command was killed as well")
    finally:
        job.kill()


def background(bench: Bench) -> None:
    """Leave something behind that holds the output open."""
    started = time.monotonic()
    result = bench.box.exec("sleep 20 & echo done", timeout=15)
    same((result.exit_code, result.stdout, result.timed_out), (0, "done\n", False), "the result")
    holds(time.monotonic() - started < 10, "what was left behind delayed the result")
    result = bench.box.exec("(while :; do echo noise; done) & sleep 0.2; exit 7", timeout=30, max_output=100)
    same((result.exit_code, result.timed_out), (7, False), "the result beside endless output")
    bench.box.stop_processes()


def unlimited(bench: Bench) -> None:
    """Have no time limit."""
    same(bench.box.exec("sleep 0.2; echo done", timeout=None).stdout, "done\n", "the output")


def expiry(bench: Bench) -> None:
    """Outlive the sandbox's time."""
    box = bench.open(timeout_s=3)
    started = time.monotonic()
    with raises(SandboxGone):
        box.exec("sleep 100", timeout=60)
    holds(time.monotonic() - started < 30, "the sandbox lived on")
    with raises(SandboxGone):
        box.read_bytes("/etc/hostname")


CHECKS = (
    Check("time.timeout", "A command whose time is over is killed, with code 124 and its output so far.", timeout),
    Check("time.tree", "Its children are killed with it.", tree),
    Check("time.daemon", "Daemons that it started are killed, too.", daemon, "trees"),
    Check("time.stubborn", "It cannot refuse to end.", stubborn),
    Check("time.others", "Other commands go on.", others),
    Check("time.background", "What a command leaves behind does not delay its result.", background),
    Check("time.unlimited", "Without a limit, a command runs to its end.", unlimited),
    Check("time.expiry", "A sandbox ends by itself when its time is over.", expiry, "expiry"),
)
