"""Checks: what is left when a sandbox has ended."""

from __future__ import annotations

import os
import threading

from openenv.errors import SandboxGone
from openenv.sandboxes.checks.bench import Bench, Check, holds, raises, same


def nothing_left(bench: Bench) -> None:
    """Use sandboxes in every way, and close them."""
    bench.box.exec("true")
    before = sorted(bench.backend.leftovers())
    for end in ("close", "kill"):
        box = bench.open()
        box.start_bg("(setsid sleep 600 &); sleep 600")
        box.exec("sleep 600 & (setsid sleep 600 &); echo x > $HOME/file; mkdir /tmp/folder")
        box.exec("sleep 60", timeout=0.3)
        getattr(box, end)()
        same(sorted(bench.backend.leftovers()), before, f"what is left after {end}()")


def descriptors(bench: Bench) -> None:
    """Open and close sandboxes, and count open files."""
    self_fds = "/proc/self/fd"
    if not os.path.isdir(self_fds):
        return
    counts = []
    for _ in range(3):
        box = bench.open()
        box.exec("echo x >&2", stdin=b"x")
        box.write_text("a", "b")
        box.read_text("a")
        box.close()
        counts.append(len(os.listdir(self_fds)))
    holds(counts[-1] <= counts[0], f"open files grow: {counts}")


def threads(bench: Bench) -> None:
    """Open and close sandboxes, and count threads."""
    counts = []
    for _ in range(3):
        box = bench.open()
        box.start_bg("sleep 0.1; echo x", on_output=lambda stream, data: None).wait(20)
        box.exec("true")
        box.close()
        counts.append(threading.active_count())
    holds(counts[-1] <= counts[0] + 1, f"threads grow: {counts}")


def context_manager(bench: Bench) -> None:
    """Leave a with block by an exception."""
    box = bench.open()
    with raises(ZeroDivisionError), box as same_box:
        same(same_box, box, "what the with block gives")
        raise ZeroDivisionError
    with raises(SandboxGone):
        box.exec("true")


def identity(bench: Bench) -> None:
    """Open two sandboxes, one of them as existing code does."""
    one, two = bench.open(), bench.backend.create(timeout_s=60, envs={"A": "b"}, metadata={"who": "check"})
    with two:
        holds(one.sandbox_id and one.sandbox_id != two.sandbox_id, "two sandboxes have the same name")
        same(two.exec('printf "%s" "$A"').stdout, "b", "the variable")


CHECKS = (
    Check("end.nothing-left", "A closed or killed sandbox leaves nothing on the host.", nothing_left),
    Check("end.descriptors", "Open files do not grow.", descriptors),
    Check("end.threads", "Threads do not grow.", threads),
    Check("end.with", "A with block closes its sandbox, whatever happens in it.", context_manager),
    Check("end.identity", "Every sandbox has a name of its own.", identity),
)
