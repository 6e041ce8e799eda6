"""Descriptors of a process: its limit, and how connections share it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from openenv.sandboxes.host import ConnectionQuota, file_limit
from openenv.sandboxes.local.bubblewrap import SharedFiles


@pytest.fixture
def low_limit() -> Iterator[None]:
    """Lower this process's limit to the usual one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flood(quota: ConnectionQuota, holder: str) -> int:
    count = 0
    while quota.take(holder):
        count += 1
    return count


def test_one_that_takes_all_it_can_leaves_every_other_its_own_places() -> None:
    quota = ConnectionQuota(own=4, shared=64)
    assert flood(quota, "greedy") == 4 + 32
    assert flood(quota, "also greedy") == 4 + 32
    assert [flood(quota, f"neighbour {number}") for number in range(100)] == [4] * 100


def test_places_that_are_given_back_can_be_taken_by_others() -> None:
    quota = ConnectionQuota(own=1, shared=4)
    for _ in range(3):
        assert [flood(quota, name) for name in "abc"] == [3, 3, 1]
        assert quota.held("a") == 3
        quota.release("a")
        assert quota.take("c")
        for name, count in (("a", 2), ("b", 3), ("c", 2)):
            for _ in range(count):
                quota.release(name)
    assert quota.held("a") == 0


def test_one_holder_has_a_limit_however_large_the_pool_is() -> None:
    assert flood(ConnectionQuota(own=4, shared=10_000, most=50), "greedy") == 50


def test_shared_files_are_read_from_their_beginning_by_each_start() -> None:
    files = SharedFiles({"/etc/hosts": b"127.0.0.1 localhost\n"}, b"the filter")
    first, second = files.borrow(), files.borrow()
    assert first.options[:4] == ("--perms", "0444", "--file", str(first.descriptors[0]))
    assert first.options[-2:] == ("--seccomp", str(first.descriptors[1]))
    assert os.read(first.descriptors[0], 100) == b"127.0.0.1 localhost\n"
    assert os.read(second.descriptors[0], 9) == b"127.0.0.1", "another start has another position"
    files.give_back(first)
    third = files.borrow()
    assert third == first, "its descriptors are used again"
    assert [os.read(fd, 100) for fd in third.descriptors] == [b"127.0.0.1 localhost\n", b"the filter"]
    with pytest.raises(OSError):
        os.write(third.descriptors[0], b"x")
    files.give_back(third)
    files.give_back(second)


def test_a_burst_of_starts_leaves_few_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = SharedFiles({"/etc/hosts": b"x"}, b"y")
    for each in [files.borrow() for _ in range(50)]:
        files.give_back(each)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 + 2 * 16
    del files
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_pool_comes_from_the_limit_of_the_process(low_limit: None) -> None:
    assert file_limit() == 1024
    quota = ConnectionQuota()
    assert 4 * quota.shared <= 1024 // 4  # four descriptors for a connection
    assert 4 * quota.most < 1024 // 4


def test_programs_raise_their_limit_to_the_highest_that_they_may_have() -> None:
    code = """
import resource
from openenv.sandboxes.host import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2000", "2000", "2000"]
