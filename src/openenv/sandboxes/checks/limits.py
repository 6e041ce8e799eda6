"""Checks: what a sandbox may use, and that it lives on after it tried to use more."""

from __future__ import annotations

from openenv.sandboxes.base import Limits
from openenv.sandboxes.checks.bench import Bench, Check, holds, same

_BOMB = """
import os, time
end = time.monotonic() + 10
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
_FORKS = """
import os, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""
_BURN = """
import os, time
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        end = time.monotonic() + 1.5
        while time.monotonic() < end: pass
        os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
print(os.times().children_user + os.times().children_system)
"""


def memory(bench: Bench) -> None:
    """Use more memory than there is."""
    box = bench.open(limits=Limits(memory_mb=128, disk_mb=64))
    result = bench.python(box, "x = [bytearray(10_000_000) for _ in range(300)]", timeout=60)
    holds(result.exit_code != 0 and not result.timed_out, "nothing stopped it")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")
    result = bench.python(box, "x = bytearray(2_000_000_000); print('GOT IT')", timeout=60)
    holds("GOT IT" not in result.stdout, "2 GB were available")


def processes(bench: Bench) -> None:
    """Start more processes than are allowed."""
    box = bench.open(limits=Limits(pids=64))
    result = bench.python(box, _FORKS, timeout=60)
    holds(0 < int(result.stdout) <= 64, f"{result.stdout.strip()} processes could be started")
    box.stop_processes()
    same(box.exec("echo on").stdout, "on\n", "the next command's output")


def fork_bomb(bench: Bench) -> None:
    """Run a fork bomb into a time limit, and one into a stop."""
    box = bench.open(limits=Limits(pids=100, cpus=1.0))
    holds(int(bench.python(box, _FORKS, timeout=60).stdout) <= 100, "there is no limit")  # or the host would be hit
    box.stop_processes()
    result = bench.python(box, _BOMB, timeout=2)
    same(result.timed_out, True, "timed_out")
    same(box.exec("echo on", timeout=30).stdout, "on\n", "the next command's output")
    job = box.start_bg(["python3", "-c", _BOMB])
    box.stop_processes()
    same(job.wait(30), 137, "the exit code of the bomb")
    same(box.exec("echo on", timeout=30).stdout, "on\n", "the next command's output")


def cpu(bench: Bench) -> None:
    """Burn three processors' time with half of one allowed."""
    box = bench.open(limits=Limits(cpus=0.5))
    used = float(bench.python(box, _BURN, timeout=60).stdout)
    holds(used < 1.3, f"1.5 s took {used:.2f} s of processor time")


def disk(bench: Bench) -> None:
    """Fill the disk."""
    box = bench.open(limits=Limits(disk_mb=64))
    for path in ("$HOME/full", "/tmp/full", "/dev/shm/full"):
        result = box.exec(f"head -c 200000000 /dev/zero > {path}", timeout=60)
        holds(result.exit_code != 0, f"200 MB fit into {path}")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")
    same(box.exec("rm -f $HOME/full /tmp/full; echo x > $HOME/again").exit_code, 0, "writing after making room")


def disk_default(bench: Bench) -> None:
    """Fill the disk when it is as large as the memory."""
    box = bench.open(limits=Limits(memory_mb=96, disk_mb=96))
    result = box.exec("head -c 500000000 /dev/zero > $HOME/full; head -c 500000000 /dev/zero > /tmp/full", timeout=60)
    holds(result.exit_code != 0, "500 MB fit into 96 MB")
    same(box.exec("echo on").stdout, "on\n", "the next command's output")


_FEATURE = "limits"
CHECKS = (
    Check("limit.memory", "A process that uses up the memory is ended, and the sandbox lives.", memory, _FEATURE),
    Check("limit.processes", "There is a limit to the number of processes.", processes, _FEATURE),
    Check("limit.fork-bomb", "A fork bomb can be ended, and the sandbox lives.", fork_bomb, _FEATURE),
    Check("limit.cpu", "There is a limit to processor time.", cpu, _FEATURE),
    Check("limit.disk", "A full disk is an error of the writer.", disk, _FEATURE),
    Check("limit.disk-and-memory", "Filling the disk does not end the sandbox.", disk_default, _FEATURE),
)
