"""Fixtures for rollouts: a backend that is shared, a scripted model, and a look at what is left on the machine."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.host import scratch_root
from waiting import wait_until


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of the test's own for scratch folders, which must be empty in the end.

    It comes after `tmp_path`, or pytest would make its own folders in it.
    """
    with tempfile.TemporaryDirectory(prefix="openenv-test-") as folder:  # short, as sockets must be
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
        assert not scratch_root().exists(), "a rollout left its scratch folder"


class Leftovers:
    """What rollouts could leave on this machine, seen from outside: processes, mounts and control groups."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        self._before = self._now()

    def _now(self) -> set[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        mounts = {line.split()[4] for line in lines if "openenv" in line or str(self._tmp) in line}
        children = {f"process {pid} {_command(pid)}" for pid in _descendants(os.getpid())}
        files = {f"file {path}" for path in self._tmp.iterdir()}
        return {*(f"mount {mount}" for mount in mounts), *children, *files, *_groups(os.getpid())}

    def check(self, timeout_s: float = 10.0) -> None:
        """Wait until nothing is there that was not there before."""
        wait_until(lambda: not self._now() - self._before, timeout_s, lambda: self._now() - self._before, every_s=0.02)


def _descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    descendants: set[int] = set()
    while True:
        more = {pid for pid, parent in parents.items() if parent == root or parent in descendants} - descendants
        if not more:
            return descendants
        descendants |= more


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:80]
    except OSError:
        return ""


def _groups(pid: int) -> set[str]:
    """Control groups of sandboxes that this process owns."""
    groups: set[str] = set()
    for folder, names, _ in os.walk("/sys/fs/cgroup"):  # unlike glob, it does not mind what vanishes meanwhile
        owned = [name for name in names if name.startswith("openenv") and re.search(rf"[_-]{pid}[_-]", name)]
        groups.update(f"group {folder}/{name}" for name in owned)
    return groups


@pytest.fixture
def leftovers(local: Sandboxes, own_temporary_folder: Path) -> Callable[[], None]:
    """Call it at the end of a test: everything that was not there at its beginning must be gone."""
    watch = Leftovers(own_temporary_folder)
    return watch.check
