"""Ray clusters of several nodes on this machine, on loopback, whose nodes can be killed.

Import this before Ray, which reads its variables once. Nothing is stopped but what was started here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: on a busy machine they would starve


class RayNodes:
    """A head that runs nothing of ours, and nodes.

    Args:
        folder: Where Ray keeps its files; short, since it has sockets.
        cpus: How many processors each node says that it has.
    """

    def __init__(self, folder: str, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self.folder = Path(folder)
        self._cpus = cpus
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        """What `ray.init` takes."""
        return str(self._cluster.address)

    def add(self) -> str:
        """Start a node; return its id."""
        node = self._cluster.add_node(num_cpus=self._cpus)
        self.nodes.append(node)
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Kill a node as a power cut does: all of its processes, at once."""
        node = next(one for one in self.nodes if one.node_id == node_id)
        self.nodes.remove(node)
        roots = {entry.process.pid for entries in node.all_processes.values() for entry in entries}
        for pid in (*roots, *descendants(roots)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)  # collects what has ended

    def close(self) -> None:
        """End all of it."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def descendants(roots: set[int]) -> set[int]:
    """Return the processes that these have started, and those that they have, at this moment."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in roots | found} - found:
        found |= more
    return found


@contextlib.contextmanager
def ray_nodes(count: int = 2, cpus: int = 2) -> Iterator[RayNodes]:
    """Run a cluster with so many nodes."""
    with tempfile.TemporaryDirectory(prefix="oe-ray-", ignore_cleanup_errors=True) as folder, address_file_in(folder):
        nodes = RayNodes(folder, cpus)
        try:
            for _ in range(count):
                nodes.add()
            yield nodes
        finally:
            nodes.close()


@contextlib.contextmanager
def address_file_in(folder: str) -> Iterator[None]:
    """Let Ray note the cluster's address here: in its default place it may be that of the user's own cluster.

    Where no Ray has run yet, that place is missing, and `Cluster` fails. Temporary files of its processes are here too,
    apart from those of the other tests on this machine.
    """
    (Path(folder) / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("TMPDIR", folder)
        yield


def processes_with(text: str) -> list[int]:
    """Return the processes that have a text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]
