"""Snapshots of sandboxes: what they refuse, and that nothing of them stays; the contract checks say what they keep."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import openenv
from openenv.errors import SandboxError, SandboxGone, SandboxTreeError, SandboxUnsupported
from openenv.sandboxes import (
    DockerSandboxes,
    Limits,
    LocalSandboxes,
    ProcessSandboxes,
    Sandbox,
    SandboxPool,
    SandboxSnapshot,
    SandboxSpec,
)

SOURCE = str(Path(openenv.__file__).parents[1])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Keep snapshots in a place of the test's own; give the folders that are there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: sorted(tmp_path.glob("openenv-snapshot*"))


@pytest.fixture
def snapshot(box: Sandbox) -> Iterator[SandboxSnapshot]:
    box.write_text("note.txt", "kept")
    with box.snapshot() as snapshot:
        yield snapshot


def test_a_sandbox_is_opened_from_a_snapshot_by_argument_or_by_spec(
    local: LocalSandboxes, box: Sandbox, folders: Callable[[], list[Path]]
) -> None:
    box.write_text("note.txt", "kept")
    with box.snapshot() as snapshot:
        box.write_text("note.txt", "changed")
        box.close()
        assert set(snapshot.archives) == {"/home/user"}  # the other trees are empty
        assert snapshot.size < 100_000
        with (
            local.open(from_snapshot=snapshot) as first,
            local.open(SandboxSpec(envs={"A": "1"}, from_snapshot=snapshot)) as second,
            local.open(SandboxSpec(envs={"A": "2"}), from_snapshot=snapshot) as third,
        ):
            assert [one.exec("cat note.txt; echo $A").stdout for one in (first, second, third)] == [
                "kept\n",
                "kept1\n",
                "kept2\n",
            ]
            with first.snapshot() as next_one, local.open(from_snapshot=next_one) as fourth:
                assert fourth.read_text("note.txt") == "kept"
    assert folders() == []


def test_a_pool_keeps_sandboxes_ready_that_begin_with_a_snapshot(
    local: LocalSandboxes, snapshot: SandboxSnapshot
) -> None:
    with SandboxPool(local, SandboxSpec(from_snapshot=snapshot), size=1) as pool, pool.lease() as leased:
        assert leased.read_text("note.txt") == "kept"


def test_a_snapshot_of_another_backend_or_home_is_refused(local: LocalSandboxes, snapshot: SandboxSnapshot) -> None:
    with pytest.raises(SandboxUnsupported, match="home at /home/user, not of one of local at /home/agent"):
        local.open(SandboxSpec(home="/home/agent", from_snapshot=snapshot))
    foreign = SandboxSnapshot("docker", snapshot.home, Path("/nowhere"), {})
    with pytest.raises(SandboxUnsupported, match="of the backend docker"):
        local.open(from_snapshot=foreign)
    assert local.leftovers() == []


def test_backends_without_snapshots_say_so(process: ProcessSandboxes, snapshot: SandboxSnapshot) -> None:
    with pytest.raises(SandboxUnsupported, match="The backend process has no snapshots; local and docker do"):
        process.open(SandboxSpec(from_snapshot=snapshot))
    with process.open() as plain, pytest.raises(SandboxUnsupported, match="local and docker do"):
        plain.snapshot()


def test_a_sandbox_that_is_too_small_for_a_snapshot_is_not_opened(local: LocalSandboxes, box: Sandbox) -> None:
    box.exec("head -c 20000000 /dev/urandom > large")
    with box.snapshot() as snapshot, pytest.raises(SandboxError, match="cannot be unpacked"):
        local.open(SandboxSpec(limits=Limits(disk_mb=16), from_snapshot=snapshot))
    assert local.leftovers() == []


# what fails leaves nothing


def test_too_much_to_keep_leaves_nothing(box: Sandbox, folders: Callable[[], list[Path]]) -> None:
    box.exec("head -c 2000000 /dev/zero > /tmp/zeros")
    with pytest.raises(SandboxTreeError):
        box.snapshot(max_bytes=1_000_000)
    assert folders() == []
    assert box.exec("echo on").stdout == "on\n"


@contextlib.contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """Let writes beyond a size fail, as on a disk that is full; Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing(box: Sandbox, folders: Callable[[], list[Path]]) -> None:
    box.exec("head -c 3000000 /dev/zero > zeros")
    with no_file_over(1_000_000), pytest.raises(OSError, match="too large"):
        box.snapshot()
    assert folders() == []
    box.snapshot().close()


def test_a_sandbox_that_is_killed_meanwhile_leaves_nothing(box: Sandbox, folders: Callable[[], list[Path]]) -> None:
    box.exec("truncate -s 400M zeros")

    def kill_when_it_has_begun() -> None:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size for folder in folders() for path in folder.glob("0.tar")):
            assert time.monotonic() < deadline
        box.kill()

    killer = threading.Thread(target=kill_when_it_has_begun)
    killer.start()
    with pytest.raises(SandboxGone):
        box.snapshot()
    killer.join()
    assert folders() == []


OWNER = """
import sys, tempfile, time
from openenv.sandboxes import LocalSandboxes
tempfile.tempdir = sys.argv[1]
box = LocalSandboxes().open()
snapshot = box.snapshot()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_the_snapshots_of_a_killed_process_are_swept_and_those_of_a_living_one_are_not(
    box: Sandbox, tmp_path: Path, folders: Callable[[], list[Path]]
) -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": SOURCE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    with owners[0] as killed, owners[1] as living:
        for owner in owners:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
        killed.kill()
        killed.wait(30)
        assert len(folders()) == 2
        with box.snapshot():
            assert len(folders()) == 2  # this one, and that of the other that lives
            assert [f"_{living.pid}_" in folder.name for folder in folders()].count(True) == 1
        living.communicate("end\n", timeout=30)
    assert folders() == []  # the end of a process removes what it has not closed


def test_a_forked_child_removes_no_snapshot_of_its_parent(snapshot: SandboxSnapshot, local: LocalSandboxes) -> None:
    child = multiprocessing.get_context("fork").Process(target=snapshot.close)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    with local.open(from_snapshot=snapshot) as copy:
        assert copy.read_text("note.txt") == "kept"


@pytest.mark.slow
def test_docker_opens_containers_from_a_snapshot(
    docker: DockerSandboxes, local: LocalSandboxes, folders: Callable[[], list[Path]]
) -> None:
    with docker.open() as box:
        box.exec("echo kept > note.txt; echo kept > /tmp/note.txt; mkdir -m 700 /dev/shm/own")
        snapshot = box.snapshot()
    with snapshot:
        assert set(snapshot.archives) == {"/home/user", "/tmp", "/dev/shm"}
        with docker.open(from_snapshot=snapshot) as copy:
            assert copy.exec("cat note.txt /tmp/note.txt; ls /dev/shm").stdout == "kept\nkept\nown\n"
            assert copy.exec("stat -c %a /tmp /dev/shm").stdout == "1777\n1777\n"
        with pytest.raises(SandboxUnsupported, match="of the backend docker"):
            local.open(from_snapshot=snapshot)
    assert docker.leftovers() == []
    assert folders() == []
