"""How local sandboxes end, and what runs in them: owners that die or fork, supervisors that are killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import openenv
from openenv.errors import SandboxGone
from openenv.sandboxes import LocalSandboxes, Sandbox
from waiting import holds_for, wait_until

SOURCE = str(Path(openenv.__file__).parents[1])
Open = Callable[..., Sandbox]


def host_pids(word: str) -> list[int]:
    """Return the processes of this machine that have a word in their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def owner(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that owns a sandbox `box`, prints a line, and goes on with `code`."""
    program = f"""
import os, signal, sys
from openenv.sandboxes import LocalSandboxes, SandboxSpec
backend = LocalSandboxes()
box = backend.open(SandboxSpec(timeout_s=float(sys.argv[1])))
job = box.start_bg(["sleep", sys.argv[2]])
box.exec("(setsid sleep $1 &)" .replace("$1", sys.argv[2]))
print("ready", flush=True)
{textwrap.dedent(code)}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# Owners


def test_a_sandbox_ends_when_its_owner_is_killed_and_the_next_one_sweeps_up(local: LocalSandboxes) -> None:
    process = owner("signal.pause()", "600", "76543.1")
    wait_until(lambda: len(host_pids("sleep\x0076543.1")) == 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not host_pids("76543.1"))
    assert any(f"_{process.pid}_" in name for name in local.abandoned())
    other = LocalSandboxes()
    with other.open():
        pass
    assert not any(f"_{process.pid}_" in name for name in local.abandoned())


def test_a_sweep_leaves_the_sandboxes_of_living_owners_alone(local: LocalSandboxes) -> None:
    process = owner("sys.stdin.readline(); print(box.exec('echo alive').stdout, end='', flush=True)", "600", "76543.2")
    try:
        with LocalSandboxes().open():
            pass
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "alive\n"
    finally:
        finish(process)


def test_a_sandbox_ends_in_time_although_its_owner_hangs(local: LocalSandboxes) -> None:
    process = owner("signal.pause()", "2", "76543.3")
    try:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not host_pids("sleep\x0076543.3"))
    finally:
        process.send_signal(signal.SIGCONT)
        finish(process)


def test_a_sandbox_ends_with_an_owner_that_never_closed_it(local: LocalSandboxes) -> None:
    process = owner("sys.exit(0)", "600", "76543.4")
    process.communicate(timeout=30)
    wait_until(lambda: not host_pids("76543.4"))
    assert not any(f"_{process.pid}_" in name for name in local.abandoned())


def test_a_child_that_its_owner_forked_does_not_keep_it_alive(local: LocalSandboxes) -> None:
    code = """
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        print(child, flush=True)
        signal.pause()
    """
    process = owner(code, "600", "76543.5")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        wait_until(lambda: not host_pids("sleep\x0076543.5"))
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def _use(sandbox: Sandbox, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        sandbox.exec("true")
    except SandboxGone as error:
        answers.put(error.reason)


def test_a_forked_child_cannot_use_its_parents_sandbox(box: Sandbox) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_use, args=(box, answers))
    child.start()
    child.join(30)
    assert "parent" in answers.get()
    assert box.exec("echo mine").stdout == "mine\n"


def test_a_sandbox_outlives_the_thread_that_opened_it(open_local: Open) -> None:
    opened: list[Sandbox] = []
    thread = threading.Thread(target=lambda: opened.append(open_local()))
    thread.start()
    thread.join()
    holds_for(0.2, lambda: opened[0].exec("echo here").stdout == "here\n")


@pytest.mark.usefixtures("local")
def test_a_sandbox_without_references_is_freed() -> None:
    backend = LocalSandboxes()
    box = backend.open()
    box.start_bg(["sleep", "76543.6"])
    wait_until(lambda: bool(host_pids("76543.6")))
    del box
    gc.collect()
    wait_until(lambda: not host_pids("76543.6"))
    assert backend.leftovers() == []


# Processes that fight


MURDER = """
import os, signal, sys, time
parent = os.getppid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
os.kill(parent, {signal})
signal.pause()
"""


def test_killing_the_supervisor_ends_the_whole_command(box: Sandbox) -> None:
    code = MURDER.format(signal="signal.SIGKILL")
    other = box.start_bg("sleep 76543.8; exit 5")
    result = box.exec(["python3", "-c", code, "76543.7"], timeout=30)
    assert result.exit_code == 137
    wait_until(lambda: not host_pids("76543.7"))
    assert host_pids("76543.8"), "another command died as well"
    other.kill()


def test_what_is_made_while_the_supervisor_is_killed_ends_too(box: Sandbox) -> None:
    code = """
import os, signal, sys, time
parent = os.getppid()
for turn in range(20):
    if os.fork() == 0:
        os.setsid()
        time.sleep(turn * 0.0002)
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
os.kill(parent, signal.SIGKILL)
signal.pause()
"""
    for turn in range(10):
        word = f"86543.{turn}"
        box.exec(["python3", "-c", code, word], timeout=30)
        wait_until(lambda word=word: not host_pids(word))


def test_stopping_the_supervisor_does_not_help_against_the_time_limit(box: Sandbox) -> None:
    code = MURDER.format(signal="signal.SIGSTOP")
    result = box.exec(["python3", "-c", code, "76543.9"], timeout=1)
    assert result.timed_out
    wait_until(lambda: not host_pids("76543.9"))


def test_a_command_that_starts_processes_all_the_time_is_killed_without_delay(box: Sandbox) -> None:
    for turn in range(40):
        result = box.exec("trap '' TERM INT; while :; do /bin/true; done", timeout=0.03 + turn % 7 * 0.003)
        assert result.timed_out
        assert result.duration_s < 30


# Signals


def test_the_first_process_outlives_every_signal_from_inside(box: Sandbox) -> None:
    box.exec("for n in $(seq 1 64); do kill -$n 1; done 2> /dev/null; sleep 0.2")
    assert box.exec("echo alive").stdout == "alive\n"


def test_commands_have_the_default_actions_of_signals(box: Sandbox) -> None:
    ignored = box.exec("grep SigIgn /proc/self/status").stdout.split()[1]
    of_libc = 0b11 << 31  # signals 32 and 33: they are as whatever started the tests left them
    assert int(ignored, 16) & ~of_libc == 0
    assert box.exec("kill -TERM $$").exit_code == 128 + signal.SIGTERM
