"""The owner of a sandbox: a process is not taken for a later one with the same pid."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from openenv.sandboxes.host import ProcessOwner

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="owners are found in /proc")


def test_a_living_owner_is_not_dead_and_its_label_can_be_read_back() -> None:
    owner = ProcessOwner.current()
    assert owner.pid == os.getpid()
    assert ProcessOwner.parse(str(owner)) == owner
    assert not owner.is_dead()


def test_a_process_that_is_over_is_dead_also_as_a_zombie_or_when_its_pid_is_used_again() -> None:
    code = "from openenv.sandboxes.host import ProcessOwner; print(ProcessOwner.current())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    owner = ProcessOwner.parse(process.stdout.read().strip())
    process.stdout.close()
    assert owner is not None
    assert owner.pid == process.pid
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_dead()
    process.wait()
    assert owner.is_dead()
    assert replace(ProcessOwner.current(), started="1").is_dead()


def test_nothing_is_said_about_a_process_of_another_place() -> None:
    assert not ProcessOwner("another-boot.1", 1, "5").is_dead()
    assert ProcessOwner.parse("nonsense") is None
    assert ProcessOwner.parse("a/b/c") is None
