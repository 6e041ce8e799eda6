"""Control groups: finding a place for them in both versions, on copies of the kernel's files, and sweeping."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openenv.errors import SandboxError, SandboxUnavailable
from openenv.sandboxes import Limits
from openenv.sandboxes.host import ProcessOwner
from openenv.sandboxes.local import cgroups
from openenv.sandboxes.local.cgroups import Group, Hierarchy

DEAD = ProcessOwner(ProcessOwner.current().place, 4_000_001, "12")


def mountinfo(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text("".join(f"{line}\n" for line in ("22 1 8:1 / / rw - ext4 /dev/root rw", *lines)))
    return path


def own_groups(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def version_2(root: Path, group: str, *, controllers: str = "cpu memory pids", subtree: str = "") -> Path:
    folder = root / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("")
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(subtree)
    return folder


def test_version_1_makes_groups_below_our_own_in_each_hierarchy(tmp_path: Path) -> None:
    lines = []
    for name, group in (("memory", "box/a"), ("pids", ""), ("cpu,cpuacct", "")):
        (tmp_path / name / group).mkdir(parents=True)
        (tmp_path / name / group / "cgroup.procs").write_text("")
        lines.append(f"30 25 0:27 / {tmp_path / name} rw - cgroup cgroup rw,{name}")
    hierarchy = cgroups.find(
        own_groups(tmp_path, "4:memory:/box/a", "3:pids:/", "2:cpu,cpuacct:/"), mountinfo(tmp_path, *lines)
    )
    assert hierarchy == Hierarchy(1, (tmp_path / "memory/box/a", tmp_path / "pids", tmp_path / "cpu,cpuacct"))


def test_a_mount_of_a_part_of_the_hierarchy_is_understood(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    version_2(root, "", subtree="cpu memory pids")
    mounts = mountinfo(tmp_path, f"30 25 0:27 /docker/abc {root} rw - cgroup2 cgroup2 rw")
    assert cgroups.find(own_groups(tmp_path, "0::/docker/abc"), mounts) == Hierarchy(2, (root,))


def test_version_2_uses_the_nearest_group_that_may_give_controllers(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    version_2(root, "", controllers="cpu io memory pids", subtree="cpu memory pids")
    version_2(root, "user.slice/app.slice", subtree="memory pids")
    own = version_2(root, "user.slice/app.slice/run.scope", subtree="")
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").mkdir()  # writing fails, as it does in a group with processes
    mounts = mountinfo(tmp_path, f"30 25 0:27 / {root} rw - cgroup2 cgroup2 rw")
    hierarchy = cgroups.find(own_groups(tmp_path, "0::/user.slice/app.slice/run.scope"), mounts)
    assert hierarchy == Hierarchy(2, (root / "user.slice/app.slice",))
    assert (root / "user.slice/app.slice/cgroup.subtree_control").read_text() == "+cpu"


def test_version_2_without_the_controllers_is_of_no_use(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    version_2(root, "", controllers="io")
    mounts = mountinfo(tmp_path, f"30 25 0:27 / {root} rw - cgroup2 cgroup2 rw")
    with pytest.raises(SandboxUnavailable, match="systemd-run --user --scope"):
        cgroups.find(own_groups(tmp_path, "0::/"), mounts)


def test_a_machine_without_control_groups_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="require_cgroup=False"):
        cgroups.find(own_groups(tmp_path, "0::/"), mountinfo(tmp_path))


def test_limits_of_version_2(tmp_path: Path) -> None:
    group = Hierarchy(2, (tmp_path,)).create(
        ProcessOwner.current(), "x1", Limits(memory_mb=100, pids=50, cpus=1.5, disk_mb=60)
    )
    (folder,) = group.folders
    assert int((folder / "memory.max").read_text()) == (100 + 60 + 24) * 1024 * 1024
    assert (folder / "pids.max").read_text() == "54"
    assert (folder / "cpu.max").read_text() == "150000 100000"
    assert group.entry_files() == [str(folder / "cgroup.procs")]


def test_limits_of_version_1(tmp_path: Path) -> None:
    parents = tuple(tmp_path / name for name in cgroups.CONTROLLERS)
    for parent in parents:
        parent.mkdir()
    group = Hierarchy(1, parents).create(
        ProcessOwner.current(), "x1", Limits(memory_mb=100, pids=50, cpus=0.5, disk_mb=60)
    )
    memory, pids, cpu = group.folders
    assert int((memory / "memory.limit_in_bytes").read_text()) == (100 + 60 + 24) * 1024 * 1024
    assert (pids / "pids.max").read_text() == "54"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "50000"
    assert group.entry_files() == [str(folder / "tasks") for folder in group.folders]


def test_memory_kills_are_counted_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 2\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert Group((tmp_path,), 2).oom_kills() == 2
    assert Group((tmp_path,), 1).oom_kills() == 3
    assert Group((tmp_path / "none",), 2).oom_kills() == 0


def test_a_sweep_removes_what_dead_owners_left_and_nothing_else(tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, (tmp_path,))
    elsewhere = ProcessOwner("another-machine.1", 1, "1")
    for owner in (DEAD, ProcessOwner.current(), elsewhere):
        (tmp_path / cgroups.group_name(owner, "a1x1")).mkdir()
    (tmp_path / "system.slice").mkdir()
    assert hierarchy.sweep() == [cgroups.group_name(DEAD, "a1x1")]
    left = {cgroups.group_name(ProcessOwner.current(), "a1x1"), cgroups.group_name(elsewhere, "a1x1"), "system.slice"}
    assert set(os.listdir(tmp_path)) == left


def test_a_sweep_leaves_what_is_still_ending_to_others(tmp_path: Path) -> None:
    busy = tmp_path / cgroups.group_name(DEAD, "a1x1")
    busy.mkdir()
    (busy / "file").write_text("")
    assert Hierarchy(2, (tmp_path,)).sweep() == []
    assert busy.exists()


def test_a_group_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "file").write_text("")
    with pytest.raises(SandboxError, match="cannot be removed"):
        Group((folder,), 2).remove(within_s=0.1)


def test_removing_twice_is_fine(tmp_path: Path) -> None:
    group = Group((tmp_path / "never",), 2)
    group.remove()
    group.remove()
